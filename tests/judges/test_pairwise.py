"""Judges that compare two answers, in both orders."""

from pathlib import Path
from typing import Any

import pytest
from stand_in_judge import MODEL, StandIn

from rlhf_cli.config.judges import OpenAIJudge
from rlhf_cli.judges.pairwise import Comparison, Pair, PairwiseJudge

PAIRS = [Pair(f"what is number {n}?", f"This is the number {n}.", "dull words") for n in range(5)]


def judge_of(server: StandIn, folder: Path, **settings: Any) -> PairwiseJudge:
    settings = {"url": server.url, "model": MODEL, "key_env": None, **settings}
    return PairwiseJudge.of("llm", OpenAIJudge(**settings), folder, lambda key: key)


@pytest.mark.parametrize(
    ("winners", "points", "consistent", "slots"),
    [
        (("1", "2"), 1.0, True, [1.0, 0.0]),
        (("2", "1"), 0.0, True, [0.0, 1.0]),
        (("tie", "tie"), 0.5, True, []),
        (("1", "1"), 0.5, False, [1.0, 1.0]),
        (("2", "2"), 0.5, False, [0.0, 0.0]),
        (("1", "tie"), 0.5, False, [1.0]),
        (("tie", "1"), 0.5, False, [1.0]),
        ((), 0.5, False, []),
    ],
)
def test_a_disagreement_of_the_orders_is_a_tie(
    winners: tuple[Any, ...], points: float, consistent: bool, slots: list[float]
) -> None:
    comparison = Comparison(*winners)
    assert (comparison.points, comparison.is_consistent, comparison.slots) == (points, consistent, slots)


def test_each_pair_is_asked_in_both_orders_and_equal_answers_are_not(server: StandIn, tmp_path: Path) -> None:
    pairs = [*PAIRS[:2], Pair("what?", "the same", "the same"), PAIRS[0], Pair(PAIRS[0].prompt, *"xy")]
    judge = judge_of(server, tmp_path)
    found = judge.compare(pairs)
    assert found == [Comparison("1", "2")] * 2 + [Comparison(), Comparison("1", "2"), Comparison("tie", "tie")]
    shown = {body["messages"][0]["content"] for body in server.requests}
    assert len(shown) == len(server.requests) == 6, "a pair that occurs twice is asked once"
    assert (judge.cost.answers, judge.cost.calls, judge.cost.prompt_tokens) == (6, 6, 1200)
