"""Comparison of two policies: how far judges agree, and win rates at equal lengths."""

import pytest

from rlhf_cli import statistics
from rlhf_cli.evaluation.comparison import win_rates
from rlhf_cli.evaluation.report_text import disagreement
from rlhf_cli.evaluation.responses import EvalResponses

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("no_page")]


def test_a_judge_agrees_with_the_reward_model_where_both_prefer_the_same_answer() -> None:
    """Of eight pairs the judge ties in one, the reward model in another; of the six others they agree in four."""

    def responses(gold: list[int], reward: list[int]) -> EvalResponses:
        scores = {"gold": [float(score) for score in gold], "reward": [float(score) for score in reward]}
        return EvalResponses("m", "sampled", [*"abcdefgh"], ["r"] * 8, [True] * 8, [5] * 8, scores, None)

    baseline = responses([0] * 8, [0] * 8)
    rates = win_rates(responses([1, 1, 1, -1, 1, -1, 0, 1], [2, 3, 1, -2, -1, 5, 1, 0]), baseline)
    assert rates["gold"].agrees_with_reward == 4 / 6 and rates["reward"].agrees_with_reward is None
    assert rates["gold"].agrees_with_reward_ci95 == list(statistics.wilson(4, 6))
    name = "the reward model"
    assert not [*disagreement(name, "gold", rates["gold"])] and not [*disagreement(name, "reward", rates["reward"])]
    low = rates["gold"].with_changes(agrees_with_reward=0.52, agrees_with_reward_ci95=[0.43, 0.66])
    (sentence,) = disagreement(name, "gold", low)
    assert sentence.startswith("The reward model and judge gold prefer")
    assert "judge gold prefer the same of PPO's and SFT's answers on 0.520 [0.430, 0.660] of the prompts" in sentence


def test_lengths_control_the_win_rate() -> None:
    """A judge that counts tokens: at equal lengths nothing is left of the win, as nine of ten answers are longer."""
    baseline = [20 + row % 7 for row in range(100)]
    longer = [length + (-1 if row % 10 == 0 else 1 + row % 5) for row, length in enumerate(baseline)]
    policies = []
    for lengths in (longer, baseline):
        scores = {"long": [float(length) for length in lengths]}
        prompts, ended = [*map(str, range(100))], [True] * 100
        policies.append(EvalResponses("m", "sampled", prompts, ["r"] * 100, ended, lengths, scores, None))
    rate = win_rates(*policies)["long"]
    assert rate.value == 0.9 and abs(rate.length_controlled - 0.5) < 0.25
    low, high = rate.length_controlled_ci95
    assert low < rate.length_controlled < high
    assert rate.difference == pytest.approx(sum(longer) / 100 - sum(baseline) / 100)
