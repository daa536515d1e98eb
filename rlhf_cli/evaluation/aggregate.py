"""Means of a policy's responses and win rates between two policies, with 95 % intervals."""

from collections.abc import Sequence
from typing import Any

from rlhf_cli import statistics
from rlhf_cli.evaluation.responses import EvalResponses


def policy_means(evaluated: EvalResponses, seed: int) -> dict[str, Any]:
    """Return the means over prompts of one policy, as in `models` of report.json."""
    count, judges = len(evaluated.responses), {}
    for judge, scores in evaluated.scores.items():
        judges[judge] = {"mean": _mean(scores), "ci95": list(statistics.bootstrap_mean(scores, seed=seed))}
    means: dict[str, Any] = {}
    if "reward" in judges:
        means |= {"reward_mean": judges["reward"]["mean"], "reward_ci95": judges["reward"]["ci95"]}
    if evaluated.kl is not None:
        means |= {"kl": _mean(evaluated.kl), "kl_ci95": list(statistics.bootstrap_mean(evaluated.kl, seed=seed))}
    return means | {
        "response_length_mean": _mean(evaluated.lengths),
        "eos_fraction": sum(evaluated.ended) / count,
        "distinct_fraction": len(set(evaluated.responses)) / count,
        "judges": judges,
    }


def win_rates(policy: EvalResponses, baseline: EvalResponses, seed: int) -> dict[str, Any]:
    """Return per judge the fraction of prompts on which `policy` scores above `baseline`; a tie counts 0.5.

    Each with its length-controlled win rate and the mean difference of the scores.
    """
    extra_lengths = [a - b for a, b in zip(policy.lengths, baseline.lengths, strict=True)]
    return {
        judge: _win_rate(policy.scores[judge], baseline.scores[judge], extra_lengths, seed) for judge in policy.scores
    }


def _win_rate(
    scores: Sequence[float], baseline: Sequence[float], extra_lengths: Sequence[int], seed: int
) -> dict[str, Any]:
    controlled, interval = statistics.length_controlled(scores, baseline, extra_lengths, seed=seed)
    return {
        **statistics.win_rate(scores, baseline),
        "length_controlled": controlled,
        "length_controlled_ci95": list(interval),
        **statistics.paired_difference(scores, baseline, seed=seed),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
