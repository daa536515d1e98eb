"""Win rates by judges that compare two answers."""

import pytest

from rlhf_cli import statistics
from rlhf_cli.evaluation.pairwise import pairwise_win_rates
from rlhf_cli.evaluation.responses import EvalResponses
from rlhf_cli.judges.pairwise import Comparison
from rlhf_cli.runs.report import WinRates

WIN, LOSS, TIE = Comparison("1", "2"), Comparison("2", "1"), Comparison("tie", "tie")
FIRST, EQUAL = Comparison("1", "1"), Comparison()
COMPARED = [WIN, WIN, WIN, LOSS, TIE, FIRST, FIRST, EQUAL, WIN, LOSS]


def responses(model: str, scores: list[float], lengths: list[int]) -> EvalResponses:
    count = len(scores)
    texts = [f"{model} {row}" for row in range(count)]
    prompts = [f"prompt {row}" for row in range(count)]
    return EvalResponses(model, "sampled", prompts, texts, [True] * count, lengths, {"reward": scores}, [0.0] * count)


def rates(**compared: list[Comparison]) -> WinRates:
    ppo = responses("ppo", [1, 1, 1, 1, 1, 1, 1, 1, 0, 0], [5, 6, 7, 8, 9, 5, 6, 7, 8, 9])
    sft = responses("sft", [0, 0, 0, 0, 0, 0, 0, 0, 0, 1], [6, 5, 8, 7, 9, 6, 7, 5, 9, 8])
    return pairwise_win_rates(compared, ppo, sft)


def test_by_hand() -> None:
    """Points 1 1 1 0 .5 .5 .5 .5 1 0; the reward prefers PPO on the first eight prompts, none on the ninth."""
    rate = rates(llm=COMPARED)["llm"]
    points = [1, 1, 1, 0, 0.5, 0.5, 0.5, 0.5, 1, 0]
    assert (rate.value, rate.ties, rate.n) == (0.6, 4, 10)
    assert rate.ci95 == pytest.approx(statistics.share_interval(points)), "both orders are one result"
    assert rate.length_controlled is not None and rate.difference is None

    assert rate.consistency == pytest.approx(7 / 9), "of the pairs that were asked"
    assert rate.first_slot == pytest.approx((6 + 4) / 16), "half of the decided pairs, and all of two"
    low, high = rate.first_slot_ci95 or (0, 0)
    assert low < 10 / 16 < high
    assert rate.agreement and rate.agreement["reward"].value == pytest.approx(4 / 5)
    assert rate.agrees_with_reward == rate.agreement["reward"].value


def test_two_judges_agree_with_one_another() -> None:
    both = rates(a=COMPARED, b=[*COMPARED[:3], WIN, *COMPARED[4:]])
    assert both["a"].agreement and both["b"].agreement
    assert both["a"].agreement["b"] == both["b"].agreement["a"] and both["a"].agreement["b"].value == pytest.approx(
        5 / 6
    )
    assert list(both["a"].agreement) == ["reward", "b"]


def test_equal_answers_alone_leave_nothing_to_say() -> None:
    rate = rates(llm=[EQUAL] * 10)["llm"]
    assert (rate.value, rate.ties, rate.consistency, rate.first_slot, rate.agreement) == (0.5, 10, None, None, None)
    assert "consistency" not in rate.to_json()
