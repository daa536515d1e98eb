"""What an evaluation comes to, in one sentence."""

from collections.abc import Mapping
from typing import Any, Literal

from rlhf_cli.statistics import with_interval
from rlhf_cli.verdict.frontier import deciding_judge
from rlhf_cli.verdict.rewards import HELD_OUT

Standing = Literal["better", "undecided", "worse"]
HALF = 0.5
OWN_REWARD = "the reward itself, which proves little"  # the judge that PPO pleases by its training
LEADS = {
    "better": "PPO beats SFT: it wins",
    "undecided": "undecided: PPO wins",
    "worse": "PPO is worse than SFT: it wins",
}


def standing(rate: Mapping[str, Any]) -> Standing:
    """What a win rate says for sure: what its interval leaves open is undecided."""
    low, high = rate.get("ci95") or (0.0, 1.0)
    return "better" if low > HALF else "worse" if high < HALF else "undecided"


def sentence(report: Mapping[str, Any]) -> str | None:
    """PPO against SFT by the judge that decides, and how far the reward model agrees; None where none was compared."""
    rates = report.get("win_rate", {}).get("ppo_vs_sft")
    if not rates:
        return None
    judge = deciding_judge(rates)
    rate, kl = rates[judge], report["models"]["ppo"].get("kl")
    far = "" if kl is None else f", at a KL of {kl:z.2f}"
    won = with_interval(rate["value"], rate.get("ci95"))
    said = f"{LEADS[standing(rate)]} {won} of {rate['n']} {HELD_OUT}, judged by {judge}{far}"
    more = " (more prompts, eval.n, would tell more)" if standing(rate) == "undecided" else ""
    return said + more + _at_equal_length(rate) + _by_the_reward(rates, judge)


def _at_equal_length(rate: Mapping[str, Any]) -> str:
    """Where it won, and may have won by the length of its answers alone."""
    low, _ = rate.get("length_controlled_ci95") or (1.0, 1.0)
    if standing(rate) != "better" or low > HALF:
        return ""
    return f"; at equal length {with_interval(rate['length_controlled'], rate['length_controlled_ci95'])}, undecided"


def _by_the_reward(rates: Mapping[str, Any], judge: str) -> str:
    if judge == "reward":
        return f": {OWN_REWARD}; name another judge in eval.yaml"
    if "reward" not in rates:
        return ""
    own = rates["reward"]
    said = f"; by the reward itself it wins {with_interval(own['value'], own.get('ci95'))}"
    if standing(own) == "better" and standing(rates[judge]) == "worse":
        return f"{said}: PPO found what the reward gets wrong (docs/rewards.md)"
    if standing(own) == "better" and standing(rates[judge]) == "undecided":
        return f"{said}, and {judge} does not confirm it"
    return said
