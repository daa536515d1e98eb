"""Sentences about an evaluation: the summary with its caveat, and how far to believe a judge."""

from typing import Any

import pytest

from rlhf_cli.evaluation.report_text import pairwise_sentences, summary_sentence
from rlhf_cli.runs.report import JudgeCost, Report
from tests.evaluation.test_pairwise import COMPARED, rates
from tests.evaluation.test_print_report import REPORT

BETTER, OPEN, WORSE = ({"value": value, "ci95": [value - 0.1, value + 0.1], "n": 200} for value in (0.8, 0.5, 0.2))
BY_GOLD = "on 200 held-out prompts, judged by gold, at a KL of 12.30"
OWN = "; by the reward model"


@pytest.mark.parametrize(
    ("rates", "end"),
    [
        (
            {"gold": BETTER, "reward": {**BETTER, "value": 0.93}},
            f"PPO beats SFT: win rate 0.800 [0.700, 0.900] {BY_GOLD}{OWN} 0.930 [0.700, 0.900]",
        ),
        ({"gold": BETTER, "reward": WORSE}, f"{BY_GOLD}{OWN} 0.200 [0.100, 0.300]"),
        (
            {"gold": OPEN, "reward": BETTER},
            f"PPO and SFT are not distinguishable: win rate 0.500 [0.400, 0.600] {BY_GOLD} "
            f"(raise eval.n for narrower intervals){OWN} 0.800 [0.700, 0.900], which gold does not confirm",
        ),
        ({"gold": OPEN, "reward": OPEN}, f"narrower intervals){OWN} 0.500 [0.400, 0.600]"),
        (
            {"gold": WORSE, "reward": BETTER},
            f"PPO loses to SFT: win rate 0.200 [0.100, 0.300] {BY_GOLD}{OWN} 0.800 [0.700, 0.900]: "
            "reward hacking (docs/reward-hacking.md)",
        ),
        ({"gold": WORSE, "reward": WORSE}, f"12.30{OWN} 0.200 [0.100, 0.300]"),
        (
            {"reward": BETTER},
            "12.30: the reward that PPO was trained on, which proves little; add a judge in eval.yaml",
        ),
        ({"helpful": BETTER}, "judged by helpful, at a KL of 12.30"),
        (
            {"helpful": {**BETTER, "length_controlled": 0.55, "length_controlled_ci95": [0.45, 0.65]}},
            "12.30; length-controlled 0.550 [0.450, 0.650], undecided",
        ),
        (
            {"helpful": {**BETTER, "length_controlled": 0.4, "length_controlled_ci95": [0.35, 0.45]}},
            "12.30; length-controlled 0.400 [0.350, 0.450], worse",
        ),
        ({"helpful": {**BETTER, "length_controlled": 0.7, "length_controlled_ci95": [0.6, 0.8]}}, "KL of 12.30"),
    ],
)
def test_the_summary_is_one_sentence_with_its_caveat(rates: dict[str, Any], end: str) -> None:
    summary = summary_sentence(Report.model_validate({**REPORT, "win_rate": {"ppo_vs_sft": rates}}))
    assert summary and summary.endswith(end), summary


def test_a_verifier_named_reward_is_no_reward_model() -> None:
    verified = {**REPORT, "win_rate": {"ppo_vs_sft": {"reward": BETTER}}, "judge_kinds": {"reward": "verifier"}}
    assert str(summary_sentence(Report.model_validate(verified))).endswith("judged by reward, at a KL of 12.30")
    rates = {"gold": BETTER, "reward": BETTER}
    verified["win_rate"] = {"ppo_vs_sft": rates}
    assert "; by the judge reward 0.800" in str(summary_sentence(Report.model_validate(verified)))


def test_the_sentence_says_how_far_to_believe_it() -> None:
    cost = JudgeCost(model="m", answers=18, calls=19, prompt_tokens=1500, completion_tokens=100)
    report = Report(n=10, win_rate={"ppo_vs_sft": rates(llm=COMPARED)}, judge_costs={"llm": cost})
    (sentence,) = pairwise_sentences(report)
    assert sentence.startswith("Judge llm, m: both orders agree on 0.778 [0.")
    assert "the answer shown first wins 0.625 [0." in sentence and "it agrees with reward on 0.800 [0." in sentence
    assert sentence.endswith("18 answers took 19 calls and 1,600 tokens")
    assert list(pairwise_sentences(report.with_changes(judge_costs=None))) == []
