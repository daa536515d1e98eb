"""Means of a policy's scores, and win rates of one policy over another, with 95 % intervals."""

from collections.abc import Hashable, Mapping, Sequence
from itertools import product
from typing import Any

from rlhf_cli import statistics
from rlhf_cli.evaluation.responses import EvalResponses
from rlhf_cli.runs.report import JudgeMean, PolicyScores, SampledResults, WinRate, WinRates

Scores = Sequence[float]  # one per prompt
# Compared if both were evaluated; models.previous and each of `policies` are also compared with SFT and PPO.
PAIRS = (("ppo", "sft"), ("sft", "base"), ("ppo", "base"))


def policy_means(evaluated: EvalResponses) -> dict[str, Any]:
    """Return the means over the answers of one policy, with its KL if they were sampled, as PolicyScores has them."""
    count = len(evaluated.responses)
    judges = {judge: judge_mean(scores, evaluated.prompts) for judge, scores in evaluated.scores.items()}
    reward = judges.get("reward")
    means = {
        "reward_mean": reward.mean if reward else None,
        "reward_ci95": reward.ci95 if reward else None,
        "response_length_mean": sum(evaluated.lengths) / count,
        "eos_fraction": sum(evaluated.ended) / count,
        "distinct_fraction": len(set(evaluated.responses)) / count,
        "judges": judges,
    }
    kl = evaluated.kl
    if kl is not None:
        means["kl"] = sum(kl) / count
        means["kl_ci95"] = as_list(statistics.mean_interval(kl, evaluated.prompts))
    return means


def judge_mean(scores: Sequence[float], prompts: Sequence[str]) -> JudgeMean:
    """Return a judge's mean. The interval of a judge that scores 0 or 1, such as a verifier, is Wilson's.

    Rows of one prompt depend on one another.
    """
    are_shares = set(scores) <= {0.0, 1.0}
    interval = statistics.share_interval if are_shares else statistics.mean_interval
    return JudgeMean(mean=sum(scores) / len(scores), ci95=as_list(interval(scores, prompts)))


def sampled_results(policies: Mapping[str, EvalResponses]) -> SampledResults:
    """Return the means of each policy, and the win rates of all pairs that are compared."""
    named = [name for name in policies if name not in ("base", "sft", "ppo")]
    pairs = [*PAIRS, *product(named, ["sft"]), *product(["ppo"], named)]
    rates: dict[str, WinRates] = {}
    for policy, baseline in pairs:
        if policy in policies and baseline in policies:
            rates[f"{policy}_vs_{baseline}"] = win_rates(policies[policy], policies[baseline])
    models = {name: PolicyScores(**policy_means(evaluated)) for name, evaluated in policies.items()}
    return SampledResults(models=models, win_rate=rates)


def win_rates(policy: EvalResponses, baseline: EvalResponses) -> WinRates:
    """Return per judge the fraction of prompts on which `policy` scores above `baseline`; a tie counts 0.5."""
    return {judge: win_rate(judge, policy, baseline) for judge in policy.scores}


def win_rate(judge: str, policy: EvalResponses, baseline: EvalResponses) -> WinRate:
    """Return a judge's win rate, also length-controlled if possible, and its agreement with the reward model."""
    prompts = policy.prompts
    scores = policy.scores[judge]
    other_scores = baseline.scores[judge]
    extra_lengths = [ours - theirs for ours, theirs in zip(policy.lengths, baseline.lengths, strict=True)]

    plain = statistics.win_rate(scores, other_scores, prompts)
    controlled = statistics.length_controlled(scores, other_scores, extra_lengths, prompts)
    difference, difference_interval = statistics.paired_difference(scores, other_scores, prompts)

    agreed = None
    if judge != "reward" and "reward" in policy.scores:
        rewards = policy.scores["reward"], baseline.scores["reward"]
        agreed = agreement((scores, other_scores), rewards, prompts)

    return WinRate(
        **plain,
        length_controlled=controlled[0] if controlled else None,
        length_controlled_ci95=list(controlled[1]) if controlled else None,
        no_length_controlled=None if controlled else _one_sided(extra_lengths),
        difference=difference,
        difference_ci95=as_list(difference_interval),
        agrees_with_reward=agreed[0] if agreed else None,
        agrees_with_reward_ci95=list(agreed[1]) if agreed else None,
    )


def _one_sided(extra_lengths: Sequence[int]) -> str:
    """Return on how many prompts one side's answers are longer, as text."""
    longer = sum(extra > 0 for extra in extra_lengths)
    shorter = sum(extra < 0 for extra in extra_lengths)
    word = "longer" if longer > shorter else "shorter"
    return f"the answers are {word} on {max(longer, shorter) / len(extra_lengths):.0%} of the prompts"


def agreement(
    judge: tuple[Scores, Scores], reward: tuple[Scores, Scores], groups: Sequence[Hashable]
) -> tuple[float, tuple[float, float]] | None:
    """Return the share of the prompts on which both prefer the same of two answers, with its 95 % interval.

    Each has its scores of the two answers. Prompts on which one scores both the same do not count; None without
    others. `groups`: rows of the same value are of one prompt.
    """
    agreed: list[float] = []
    decided: list[Hashable] = []  # the groups of the rows that count
    for first, second, first_reward, second_reward, group in zip(*judge, *reward, groups, strict=True):
        if first != second and first_reward != second_reward:
            agreed.append(float((first > second) == (first_reward > second_reward)))
            decided.append(group)
    if not agreed:
        return None
    return sum(agreed) / len(agreed), statistics.share_interval(agreed, decided)


def as_list(interval: Sequence[float] | None) -> list[float] | None:
    """Return an interval as JSON has it."""
    return None if interval is None else list(interval)
