"""The frontier: KL and judge scores of PPO's snapshots, and the selection of one of them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlhf_cli import statistics
from rlhf_cli.config.eval import Select
from rlhf_cli.evaluation.comparison import as_list, policy_means, win_rates
from rlhf_cli.evaluation.responses import EvalResponses
from rlhf_cli.runs.report import FrontierPoint, JudgeMean, SelectedPolicy, WinRate


class Selection(NamedTuple):
    """The selected step, None if no policy is within the bound, and how it was selected."""

    step: int | None
    selected: SelectedPolicy


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


def select_point(
    points: Sequence[FrontierPoint], policies: Mapping[int, EvalResponses], sft: EvalResponses, select: Select
) -> Selection:
    """Select the point with the highest mean of the judge within the bound on KL; ties go to the smaller KL.

    `policies`: by step. The selection also has the rule as text and the other steps within noise of the best (for all
    comparisons together). Its scores and win rates are without the bias of the selection, `optimism` of the mean.
    """
    judge = select.judge
    kl_max = select.kl_max
    eligible = [point for point in points if kl_max is None or point.kl <= kl_max]
    eligible.sort(key=lambda point: point.kl)

    bound = "" if kl_max is None else f" with a KL of at most {kl_max:g}"
    rule = f"the highest mean of {judge} among {len(eligible)} of {len(points)} policies{bound}"
    if not eligible:
        return Selection(None, SelectedPolicy(judge=judge, rule=rule))

    best = _highest(eligible, judge)
    candidates = {point.step: policies[point.step] for point in eligible}
    scores = {step: policy.scores[judge] for step, policy in candidates.items()}
    tied = [step for step in statistics.within_noise(scores, sft.prompts) if step != best.step]

    weights = statistics.selection_weights(scores, sft.prompts)
    bias = SelectionBias(candidates, sft, weights, chosen=list(scores).index(best.step))
    judges = {name: bias.without(best.judges[name], name) for name in sft.scores}
    reward = judges.get("reward")
    selected = SelectedPolicy(
        judge=judge,
        rule=rule,
        within_noise=tied,
        optimism=bias.of_mean(judge),
        step=best.step,
        reward_mean=reward.mean if reward else None,
        reward_ci95=reward.ci95 if reward else None,
        kl=best.kl,
        kl_ci95=best.kl_ci95,
        response_length_mean=best.response_length_mean,
        eos_fraction=best.eos_fraction,
        distinct_fraction=best.distinct_fraction,
        judges=judges,
        win_rate={name: bias.without_in_rate(best.win_rate[name], name) for name in sft.scores},
    )
    return Selection(best.step, selected)


class SelectionBias(NamedTuple):
    """By how much results of the selected policy are above those of policies selected on other prompts."""

    candidates: Mapping[int, EvalResponses]
    sft: EvalResponses
    weights: NDArray[np.float64]  # (prompts, candidates), see `statistics.selection_weights`
    chosen: int  # index of the selected candidate

    def of_mean(self, judge: str) -> float:
        """Return the bias of a judge's mean."""
        return self._bias([policy.scores[judge] for policy in self.candidates.values()])

    def of_rate(self, judge: str) -> float:
        """Return the bias of a judge's win rate; length-controlled rates are biased as the plain ones."""
        theirs = self.sft.scores[judge]
        return self._bias([statistics.win_points(each.scores[judge], theirs) for each in self.candidates.values()])

    def _bias(self, columns: Sequence[Sequence[float]]) -> float:
        rows = np.array(columns, dtype=np.float64).T
        elsewhere = (self.weights * rows).sum(axis=1)
        return float((rows[:, self.chosen] - elsewhere).mean())

    def without(self, mean: JudgeMean, judge: str) -> JudgeMean:
        """Return a judge's mean without its bias."""
        value, bounds = statistics.without_bias(mean.mean, mean.ci95, self.of_mean(judge))
        return mean.with_changes(mean=value, ci95=bounds)

    def without_in_rate(self, rate: WinRate, judge: str) -> WinRate:
        """Return a win rate without its bias, within 0 and 1."""
        bias = self.of_rate(judge)
        value, bounds = _share_without_bias(rate.value, rate.ci95, bias)
        changed = rate.with_changes(value=value, ci95=bounds)

        if rate.difference is not None:
            difference, bounds = statistics.without_bias(rate.difference, rate.difference_ci95, self.of_mean(judge))
            changed = changed.with_changes(difference=difference, difference_ci95=bounds)
        if rate.length_controlled is not None:
            controlled, bounds = _share_without_bias(rate.length_controlled, rate.length_controlled_ci95, bias)
            changed = changed.with_changes(length_controlled=controlled, length_controlled_ci95=bounds)
        return changed


def _share_without_bias(value: float, bounds: Sequence[float] | None, bias: float) -> tuple[float, list[float] | None]:
    """Return a share and its interval without bias, within 0 and 1."""
    share, interval = statistics.without_bias(value, bounds, bias)
    return _clip(share), None if interval is None else [_clip(end) for end in interval]


def _clip(share: float) -> float:
    return min(1.0, max(0.0, share))
