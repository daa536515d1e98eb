"""What answers come to, as numbers with 95 % intervals: one model's means, and one model against another."""

from collections.abc import Sequence
from typing import Any

from rlhf_cli import statistics
from rlhf_cli.stages.eval.answers import Answers


def describe(answers: Answers, seed: int) -> dict[str, Any]:
    """One model's means over prompts."""
    rows, judges = len(answers.responses), {}
    for judge, scores in answers.scores.items():
        judges[judge] = {"mean": _mean(scores), "ci95": list(statistics.bootstrap_mean(scores, seed=seed))}
    found: dict[str, Any] = {}
    if "reward" in judges:
        found |= {"reward_mean": judges["reward"]["mean"], "reward_ci95": judges["reward"]["ci95"]}
    if answers.kl is not None:
        found |= {"kl": _mean(answers.kl), "kl_ci95": list(statistics.bootstrap_mean(answers.kl, seed=seed))}
    return found | {
        "response_length_mean": _mean(answers.lengths),
        "eos_fraction": sum(answers.ended) / rows,
        "distinct_fraction": len(set(answers.responses)) / rows,
        "judges": judges,
    }


def win_rates(ours: Answers, theirs: Answers, seed: int) -> dict[str, Any]:
    """Per judge, how often our response to a prompt scores above theirs to the same one, a tie counting half.

    Beside it the rate at equal lengths, and by how much our scores are higher on the mean.
    """
    longer = [one - other for one, other in zip(ours.lengths, theirs.lengths, strict=True)]
    return {judge: _win_rate(ours.scores[judge], theirs.scores[judge], longer, seed) for judge in ours.scores}


def _win_rate(ours: Sequence[float], theirs: Sequence[float], longer: Sequence[int], seed: int) -> dict[str, Any]:
    controlled, bounds = statistics.length_controlled(ours, theirs, longer, seed=seed)
    return {
        **statistics.win_rate(ours, theirs),
        "length_controlled": controlled,
        "length_controlled_ci95": list(bounds),
        **statistics.difference(ours, theirs, seed=seed),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
