"""labels.jsonl: what a killed process, a full disk and an editor leave."""

import os
from pathlib import Path

import pytest
from label_run import session

from rlhf_cli.commands.label import store
from rlhf_cli.commands.label.session import LabelSession
from rlhf_cli.errors import RLHFError
from rlhf_cli.jsonl import BOM


def choose_next(open_session: LabelSession, slot: str = "1") -> str:
    shown = open_session.next("me")
    assert shown is not None
    open_session.choose("me", shown.pair.name, slot, seconds=1.0)
    return shown.pair.name


def choices(folder: Path) -> list[tuple[str, str]]:
    return [(label.pair, label.choice) for label in store.LabelStore(folder).labels]


def test_another_process_goes_on_behind_the_last_label(tmp_path: Path) -> None:
    first = session(tmp_path)
    names = [choose_next(first, "tie"), choose_next(first, "bad")]
    second = session(tmp_path)
    shown = second.next("me")
    assert choices(tmp_path) == list(zip(names, ("tie", "bad"), strict=True))
    assert shown is not None and shown.pair.name not in names


@pytest.mark.parametrize("missing", range(1, 60, 7))
def test_a_torn_last_line_is_removed_and_its_pair_shown_again(
    tmp_path: Path, missing: int, capsys: pytest.CaptureFixture[str]
) -> None:
    first = session(tmp_path)
    names = [choose_next(first), choose_next(first)]
    path = tmp_path / "labels.jsonl"
    path.write_bytes(path.read_bytes()[:-missing])
    second = session(tmp_path)
    said = "an unfinished last line of" in capsys.readouterr().err
    assert said == (missing > 1)
    if missing > 1:  # else only the line break is missing, as an editor may leave it
        assert choose_next(second) == names[1]
    assert [name for name, _ in choices(tmp_path)] == names


def test_a_file_that_an_editor_saved_with_a_byte_order_mark_keeps_its_label(tmp_path: Path) -> None:
    name = choose_next(session(tmp_path))
    path = tmp_path / "labels.jsonl"
    path.write_bytes(BOM + path.read_bytes().removesuffix(b"\n"))
    assert choices(tmp_path) == [(name, session(tmp_path).store.labels[0].choice)]
    assert choose_next(session(tmp_path)) != name


@pytest.mark.parametrize("line", ['{"undo": ["x"]}', '{"undo": "0:0-1", "annotator": {}}'])
def test_an_undo_edited_by_hand_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "labels.jsonl").write_text(f"{line}\n")
    with pytest.raises(RLHFError, match="D20") as caught:
        session(tmp_path)
    assert str(caught.value.problems[0].where).endswith("labels.jsonl:1")


def test_a_full_disk_loses_no_label_and_leaves_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    here = session(tmp_path)
    choose_next(here)
    before = (tmp_path / "labels.jsonl").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RLHFError, match="E03"):
            choose_next(here)
    assert (tmp_path / "labels.jsonl").read_bytes() == before
    choose_next(here)
    assert len(choices(tmp_path)) == 2


def test_a_label_taken_back_is_gone_and_its_pair_is_shown_again(tmp_path: Path) -> None:
    here = session(tmp_path)
    choose_next(here)
    name = choose_next(here)
    back = here.undo("me", name)
    assert back is not None and back.pair.name == name
    assert here.undo("me", name) is None  # the request came twice
    shown = session(tmp_path).next("me")
    assert shown is not None and shown.pair.name == name
