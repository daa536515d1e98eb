"""Answers that are drawn, and the order of the pairs made from them."""

from pathlib import Path

import pytest
from label_run import label
from ppo_folder import lines, must_succeed

from rlhf_cli.commands.label import candidates

pytestmark = pytest.mark.full


def test_a_killed_draw_goes_on_with_the_same_bytes(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "BATCH_PROMPTS", 4)
    path = run / "labels/people/candidates.jsonl"
    must_succeed(label(run, "--terminal", "--n", 12))
    whole = path.read_bytes()
    assert whole.count(b"\n") >= 12
    for kept in (0, 7, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:kept])
        must_succeed(label(run, "--terminal", "--n", 12))
        assert path.read_bytes() == whole
    must_succeed(label(run, "--terminal", "--n", 16))
    assert path.read_bytes().startswith(whole)


def test_equal_and_empty_answers_are_left_out_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    answers = ["a", " a", "", "b"]
    drawn = [candidates.Candidate(5, "p", answers, ["sft"] * 4, [True] * 4, {})]
    assert [pair.name for pair in candidates.ordered_pairs(drawn, "random", 9)] == ["5:0-3", "5:1-3"]
    candidates.report_unusable(drawn)
    assert "4 of 6 pairs omitted: 3 empty, 1 equal answers" in capsys.readouterr().err


def test_uncertain_pairs_come_first() -> None:
    def candidate(row: int, **scores: list[float]) -> candidates.Candidate:
        return candidates.Candidate(row, "p", ["a", "b"], ["sft"] * 2, [True] * 2, scores)

    one_model = [candidate(0, reward=[3.0, 1.0]), candidate(1, reward=[0.1, 0.2]), candidate(2, reward=[0.0, 1.0])]
    assert [pair.name[0] for pair in candidates.ordered_pairs(one_model, "uncertain", 2)] == ["1", "2"]
    ensemble = [candidate(0, a=[1.0, 0.0], b=[1.0, 0.1]), candidate(1, a=[1.0, 0.0], b=[0.0, 5.0])]
    assert [pair.name[0] for pair in candidates.ordered_pairs(ensemble, "uncertain", 2)] == ["1", "0"]


def test_uncertain_order_scores_with_the_reward_model_of_the_run(run: Path) -> None:
    must_succeed(label(run, "--terminal", "--n", 3, "--order", "uncertain"))
    rows = lines(run / "labels/people/candidates.jsonl")
    assert len(rows) >= 12 and all(len(row["scores"]["reward"]) == 2 for row in rows)
