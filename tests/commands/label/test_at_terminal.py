"""Labels at the terminal."""

from pathlib import Path

import pytest
from label_run import label
from ppo_folder import lines, must_succeed

pytestmark = pytest.mark.full


def test_a_label_is_stored_for_each_key_and_undo_shows_the_pair_again(run: Path) -> None:
    result = must_succeed(label(run, "--terminal", "--n", 4, typed="1\n2 short, odd\nu\n0\nx\nb\nq\n"))
    rows = lines(run / "labels/people/labels.jsonl")
    assert [row.get("choice", "undo") for row in rows][2:] == ["undo", "tie", "bad"]
    assert rows[1]["tags"] == ["short", "odd"] and rows[1]["pair"] == rows[2]["undo"] == rows[3]["pair"]
    assert "3 of 4 labels" in result.stderr and "sft" not in result.stdout
    result = must_succeed(label(run, "--terminal", "--n", 4, typed="s\n1\n"))
    assert "4 of 4 labels" in result.stderr and len(lines(run / "labels/people/labels.jsonl")) == 6
