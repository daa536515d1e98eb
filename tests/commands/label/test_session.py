"""Which pairs annotators see, in which order, and what is stored."""

from pathlib import Path

import pytest
from label_run import PAIRS, session

from rlhf_cli.commands.label.session import LabelProgress, Refused
from rlhf_cli.data.labels import preference_row


def test_the_answer_that_was_picked_is_the_chosen_one(tmp_path: Path) -> None:
    here = session(tmp_path)
    orders = set()
    for pair in PAIRS:
        shown = here.show(pair, "me")
        label = here.choose("me", pair.name, "2", seconds=1.0)
        row = preference_row(label, label.choice)
        assert (row["rejected"], row["chosen"]) == shown.answers
        assert label.sources == ["sft", "ppo"]
        orders.add(shown.order)
    assert orders == {(0, 1), (1, 0)}


def test_a_choice_sent_twice_is_stored_once_and_another_one_is_refused(tmp_path: Path) -> None:
    here = session(tmp_path)
    first = here.choose("me", "3:0-1", "tie", seconds=1.0)
    assert here.choose("me", "3:0-1", "tie", seconds=2.0) is first
    with pytest.raises(Refused, match="undo it first"):
        here.choose("me", "3:0-1", "bad", seconds=2.0)
    with pytest.raises(Refused, match="no pair"):
        here.choose("me", "99:0-1", "bad", seconds=2.0)
    with pytest.raises(Refused, match="not one of"):
        here.choose("me", "4:0-1", "first", seconds=2.0)
    with pytest.raises(Refused, match="tags"):
        here.choose("me", "4:0-1", "bad", seconds=2.0, tags=["x" * 61])
    assert len((tmp_path / "labels.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(("overlap", "shared"), [(0.0, 0), (0.2, 2), (0.5, 5), (1.0, 10)])
def test_annotators_share_some_pairs_and_split_the_others(tmp_path: Path, overlap: float, shared: int) -> None:
    here = session(tmp_path, "a", "b", overlap=overlap)
    seen: dict[str, set[str]] = {"a": set(), "b": set()}
    for annotator, names in seen.items():
        while (shown := here.next(annotator)) is not None:
            here.choose(annotator, shown.pair.name, "skip", seconds=0.0)
            names.add(shown.pair.name)
    assert len(seen["a"] & seen["b"]) == shared
    assert seen["a"] | seen["b"] == {pair.name for pair in PAIRS}
    assert here.done == here.total == 10 + shared


def test_a_break_does_not_change_the_pace() -> None:
    assert LabelProgress(3, 9, [10.0, 4000.0, 10.0]).an_hour == 360
    assert LabelProgress(0, 9, []).an_hour is None
