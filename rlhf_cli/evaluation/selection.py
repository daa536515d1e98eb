"""The frontier, KL and scores of PPO's policies; and the recommended one, chosen on half of the prompts."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from rlhf_cli import statistics
from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.evaluation.comparison import as_list, policy_means, win_rates
from rlhf_cli.evaluation.responses import EvalResponses
from rlhf_cli.runs.report import FrontierPoint, JudgeMean, RecommendedPolicy, policy_label


def frontier_points(policies: Sequence[EvalResponses], sft: EvalResponses) -> list[FrontierPoint]:
    """Return a point for each policy by step. All respond to the same prompts."""
    by_step = policies_by_step(policies)
    points = [frontier_point(step, policy, sft) for step, policy in by_step.items()]
    return _with_distances(points, by_step, sft)


def policies_by_step(policies: Sequence[EvalResponses]) -> dict[int, EvalResponses]:
    """Return the policies by their number of updates, in this order."""
    ordered = sorted(policies, key=lambda policy: policy.step or 0)
    return {policy.step or 0: policy for policy in ordered}


def frontier_point(step: int, policy: EvalResponses, sft: EvalResponses) -> FrontierPoint:
    """Return the means of a snapshot, and its win rate over SFT."""
    return FrontierPoint(step=step, **policy_means(policy), win_rate=win_rates(policy, sft))


def _with_distances(
    points: Sequence[FrontierPoint], policies: Mapping[int, EvalResponses], sft: EvalResponses
) -> list[FrontierPoint]:
    """Add to each judge's mean its distance from the highest one, and whether that is within noise."""
    judges: dict[int, dict[str, JudgeMean]] = {point.step: {} for point in points}
    for judge in sft.scores:
        scores = {step: policy.scores[judge] for step, policy in policies.items()}
        best = _highest(points, judge)
        tied = statistics.within_noise(scores, sft.prompts)
        for point in points:
            gap, interval = statistics.paired_difference(scores[point.step], scores[best.step], sft.prompts)
            judges[point.step][judge] = point.judges[judge].with_changes(
                from_best=gap,
                from_best_ci95=as_list(interval),
                within_noise=point.step in tied,
            )
    return [point.with_changes(judges=judges[point.step]) for point in points]


def _highest(points: Sequence[FrontierPoint], judge: str) -> FrontierPoint:
    return max(points, key=lambda point: point.judges[judge].mean)


# The recommended policy


NEAR, TARGET = 0.85, 0.95  # of the KL limit: a share that has NEAR is enough, another one is sought at TARGET


class Rule(NamedTuple):
    """The highest mean of a judge among the policies within a KL from SFT, in nats; None: any KL."""

    judge: str
    max_kl: float | None


class Halves(NamedTuple):
    """The rows of the prompts that choose a policy, and those of the prompts that its figures are from."""

    choosing: list[int]
    reporting: list[int]


class Choice(NamedTuple):
    """A chosen policy, and why it was chosen."""

    policy: EvalResponses
    why: str


def split_prompts(prompts: Sequence[str]) -> Halves:
    """Split the prompts into halves by a hash of each; the rows of one prompt are in the same half."""
    distinct = sorted(set(prompts), key=lambda prompt: derive_seed(0, f"recommend/{prompt}"))
    choosing = set(distinct[: len(distinct) // 2])
    halves = Halves([], [])
    for row, prompt in enumerate(prompts):
        half = halves.choosing if prompt in choosing else halves.reporting
        half.append(row)
    return halves


def share_at_limit(kl_by_share: Mapping[float, float], max_kl: float) -> float | None:
    """Return the share of a policy with about TARGET of a KL limit, in nats; None if all shares are within the limit.

    Also None if a share has at least NEAR of the limit already. KL grows like a power of the share, so logarithms are
    interpolated; below the lowest share the power is 2.
    """
    known = {share: kl for share, kl in kl_by_share.items() if kl > 0}
    beyond = [share for share, kl in known.items() if kl > max_kl]
    near = [share for share, kl in known.items() if NEAR * max_kl <= kl <= max_kl]
    if not beyond or near:
        return None

    share = min(beyond)
    below = [other for other in known if other < share]
    power = 2.0
    if below:
        lower = max(below)
        power = math.log(known[share] / known[lower]) / math.log(share / lower)
    found: float = share * (TARGET * max_kl / known[share]) ** (1 / power)
    return round(found, 3)


def choose(candidates: Sequence[EvalResponses], sft: EvalResponses, rows: Sequence[int], rule: Rule) -> Choice:
    """Return the candidate that the rule takes by these rows, or SFT if it is worse than SFT beyond chance.

    Of equal means the one with the lowest KL is taken. SFT is also taken if no candidate is within the KL.
    """

    def kl(policy: EvalResponses) -> float:
        return _mean(policy.kl, rows)

    def score(policy: EvalResponses) -> float:
        return _mean(policy.scores[rule.judge], rows)

    near = list(candidates)
    bound = ""
    if rule.max_kl is not None:
        near = [each for each in candidates if kl(each) <= rule.max_kl]
        bound = f" with a KL of at most {rule.max_kl:g}"
    if not near:
        return Choice(sft, f"none of {len(candidates)} policies has a KL of at most {rule.max_kl:g}")

    best = max(near, key=lambda each: (score(each), -kl(each)))
    among = f"among {len(near)} of {len(candidates)} policies{bound}"
    highest = f"the highest mean of {rule.judge} on {len(rows)} prompts {among}"

    prompts = [sft.prompts[row] for row in rows]
    ours = [best.scores[rule.judge][row] for row in rows]
    theirs = [sft.scores[rule.judge][row] for row in rows]
    _, interval = statistics.paired_difference(ours, theirs, prompts)
    if interval and interval[1] < 0:
        label = policy_label(best.step, best.share)
        return Choice(sft, f"{highest} is that of {label}, and below SFT's beyond chance")
    return Choice(best, highest)


def _mean(values: Sequence[float] | None, rows: Sequence[int]) -> float:
    assert values is not None, "the answers were sampled"
    return fmean(values[row] for row in rows)


def recommend(candidates: Sequence[EvalResponses], sft: EvalResponses, rule: Rule) -> RecommendedPolicy | None:
    """Choose a policy on one half of the prompts, and return it with its figures on the other half.

    The first of the `candidates` is the last policy of PPO; without others there is no choice. All have the step of
    PPO's policy that they are or are made from. The choice does not bias the figures: they are of other prompts.
    """
    halves = split_prompts(sft.prompts)
    if len(candidates) < 2 or not halves.choosing:
        return None

    last = candidates[0]
    policy, why = choose(candidates, sft, halves.choosing, rule)
    reported = policy.rows(halves.reporting)
    over_last = None if policy is last else win_rates(reported, last.rows(halves.reporting))
    return RecommendedPolicy(
        judge=rule.judge,
        rule=why,
        policy=policy.model,
        chosen_on=len(halves.choosing),
        reported_on=len(halves.reporting),
        step=policy.step,
        share=policy.share,
        **policy_means(reported),
        win_rate=win_rates(reported, sft.rows(halves.reporting)),
        over_last=over_last,
    )
