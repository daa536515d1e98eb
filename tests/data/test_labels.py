"""Labels as preference pairs: worked examples, and files edited by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli import data, jsonl
from rlhf_cli.config.sources import DataSource
from rlhf_cli.data import labels, sources
from rlhf_cli.errors import RLHFError


def line(pair: str, choice: str, annotator: str = "a", **changes: Any) -> dict[str, Any]:
    return {
        "pair": pair, "prompt": f"prompt {pair}", "answers": ["x", "y"], "sources": ["sft", "sft"], "order": [1, 0],
        "choice": choice, "annotator": annotator, "seconds": 1.5, "time": 0, "tags": [], "rlhf": "0", **changes,
    }  # fmt: skip


def folder_of(path: Path, *rows: dict[str, Any]) -> Path:
    jsonl.write_jsonl(path / labels.LABELS, rows)
    (path / labels.CANDIDATES).touch()
    return path


def test_the_better_answer_is_chosen_whichever_was_shown_first(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, line("0", "first"), line("1", "second"), line("2", "first", order=[0, 1]))
    rows = [row for _, row in sources.raw_rows(DataSource.of(folder))]
    assert rows == [
        {"prompt": "prompt 0", "chosen": "x", "rejected": "y"},
        {"prompt": "prompt 1", "chosen": "y", "rejected": "x"},
        {"prompt": "prompt 2", "chosen": "x", "rejected": "y"},
    ]


def test_pairs_without_a_better_answer_are_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [line("0", "first"), line("1", "tie"), line("2", "bad"), line("3", "skip"), line("4", "tie")]
    rows += [line("5", "first"), {"undo": "5", "annotator": "a", "time": 0}]
    folder = folder_of(tmp_path, *rows)
    assert len(data.preference_rows(folder, None, max_length=None)) == 1
    assert "4 pairs omitted: 1 bad, 1 skip, 2 tie" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("choices", "decision"),
    [
        (["first"], "first"),
        (["first", "second", "second"], "second"),
        (["first", "second"], "disputed"),
        (["skip", "second"], "second"),
        (["skip"], "skip"),
        (["tie", "tie", "first"], "tie"),
    ],
)
def test_of_several_annotators_the_majority_decides(choices: list[str], decision: str) -> None:
    assert labels.majority(choices) == decision


def test_answers_to_a_conversation_are_messages(tmp_path: Path) -> None:
    prompt = [{"role": "user", "content": "hello"}]
    folder = folder_of(tmp_path, line("0", "second", prompt=prompt))
    ((_, row),) = sources.raw_rows(DataSource.of(folder))
    assert row["chosen"] == [{"role": "assistant", "content": "y"}]
    assert data.prompt_form(folder) == "conversation"


def test_the_input_of_a_stage_is_the_file_of_labels(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, line("0", "first"))
    assert sources.locate({"data.train": DataSource.of(folder)}) == {"data.train": [folder / "labels.jsonl"]}


@pytest.mark.parametrize(("missing", "pairs"), [(40, ["0"]), (1, ["0"]), (0, ["0", "1"])])
def test_an_unfinished_last_line_is_no_label(tmp_path: Path, missing: int, pairs: list[str]) -> None:
    path = folder_of(tmp_path, line("0", "first")) / labels.LABELS
    last = json.dumps(line("1", "first"))
    with path.open("a") as file:
        file.write(last[: len(last) - missing])
    assert [label.pair for _, label in labels.read_labels(path).values()] == pairs


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (line("0", "left"), "it is one of first, second, tie, bad, skip"),
        (line("0", "first", answers=["x"]), "not a list of two texts"),
        (line("0", "first", order=[0, 0]), "it is [0, 1] or [1, 0]"),
        (line("0", "first", seconds="1"), "is not a number"),
        (line("0", "first", prompt=1), "neither a text nor a list"),
        ({"pair": "0"}, '"prompt" is missing'),
        (line("9", "first"), "has a label of a in line 1"),
        ({"undo": "8", "annotator": "a"}, "has no label"),
    ],
)
def test_a_file_edited_by_hand_is_refused_with_its_line(tmp_path: Path, row: dict[str, Any], problem: str) -> None:
    folder = folder_of(tmp_path, line("9", "first"), row)
    with pytest.raises(RLHFError) as caught:
        list(sources.raw_rows(DataSource.of(folder)))
    (found,) = caught.value.problems
    assert found.code == "D20" and str(found.where).endswith("labels.jsonl:2") and problem in found.text
