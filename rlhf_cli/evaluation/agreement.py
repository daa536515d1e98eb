"""Whether a judge and the reward model that PPO was trained on prefer the same answers. Torch-free."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhf_cli import statistics
from rlhf_cli.statistics import with_interval

Scores = Sequence[float]  # one per prompt
LOW = 2 / 3  # two judges agree on so many pairs if each is right on 0.79 of them and they err independently


def agreement(judge: tuple[Scores, Scores], reward: tuple[Scores, Scores]) -> dict[str, Any]:
    """Return the share of the prompts on which both prefer the same of two answers, with its 95 % Wilson interval.

    Each has its scores of the two answers. Prompts on which one scores both the same do not count; without others the
    result is empty.
    """
    pairs = zip(*judge, *reward, strict=True)
    agreed = [(a > b) == (c > d) for a, b, c, d in pairs if a != b and c != d]
    if not agreed:
        return {}
    interval = statistics.wilson(sum(agreed), len(agreed))
    return {"agrees_with_reward": sum(agreed) / len(agreed), "agrees_with_reward_ci95": list(interval)}


def disagreement(judge: str, rate: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence if all of the interval of a judge's agreement is below LOW."""
    share, interval = rate.get("agrees_with_reward"), rate.get("agrees_with_reward_ci95")
    if share is not None and interval and interval[1] < LOW:
        yield (
            f"The reward model and judge {judge} prefer the same of PPO's and SFT's answers on "
            f"{with_interval(share, interval)} of the prompts, fewer than two of three: more training on this reward "
            "may not please this judge"
        )
