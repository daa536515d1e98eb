"""The frontier: KL and judge scores of PPO's snapshots, and the selection of one of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_cli import statistics
from rlhf_cli.config.eval import Select
from rlhf_cli.evaluation.aggregate import policy_means, win_rates
from rlhf_cli.evaluation.responses import EvalResponses

Point = dict[str, Any]


def frontier_section(
    policies: Sequence[EvalResponses], sft: EvalResponses, select: Select | None, seed: int
) -> dict[str, Any]:
    """Return {frontier: points by step}, and with `select` the keys of `_select`. All respond to the same prompts."""
    by_step = {policy.step: policy for policy in sorted(policies, key=lambda policy: policy.step or 0)}
    points = [_point(policy, sft, seed) for policy in by_step.values()]
    for judge in sft.scores:
        best = max(points, key=lambda point: point["judges"][judge]["mean"])["step"]
        tied = statistics.within_noise({step: policy.scores[judge] for step, policy in by_step.items()}, seed=seed)
        for point in points:
            step = point["step"]
            diff = statistics.paired_difference(by_step[step].scores[judge], by_step[best].scores[judge], seed=seed)
            columns = {"from_best": diff["difference"], "from_best_ci95": diff["difference_ci95"]}
            point["judges"][judge] |= {**columns, "within_noise": step in tied}
    if select is None:
        return {"frontier": points}
    scores = {step: policy.scores[select.judge] for step, policy in by_step.items()}
    return {"frontier": points, **_select(points, scores, select, seed)}


def _point(policy: EvalResponses, sft: EvalResponses, seed: int) -> Point:
    means = policy_means(policy, seed)
    renamed = {"reward" if key == "reward_mean" else key: value for key, value in means.items()}
    return {"step": policy.step, **renamed, "win_rate": win_rates(policy, sft, seed)}


def _select(points: list[Point], scores: Mapping[Any, list[float]], select: Select, seed: int) -> Point:
    """Return {selected_step, selected}: the point with the highest mean of the judge within the bound on KL.

    Ties go to the smaller KL. `selected` also has the rule as text, the other steps within noise of the best (for all
    comparisons together), and the selection bias of its mean. Without a point within the bound there is no
    `selected_step`. `scores` are the judge's, by step.
    """
    judge, kl_max = select.judge, select.kl_max
    eligible = [point for point in points if kl_max is None or point["kl"] <= kl_max]
    bound = "" if kl_max is None else f" with a KL of at most {kl_max:g}"
    rule = f"the highest mean of {judge} among {len(eligible)} of {len(points)} policies{bound}"
    if not eligible:
        return {"selected": {"judge": judge, "rule": rule}}
    best = max(eligible, key=lambda point: (point["judges"][judge]["mean"], -point["kl"]))
    eligible_scores, step = {point["step"]: scores[point["step"]] for point in eligible}, best["step"]
    tied = [other for other in statistics.within_noise(eligible_scores, seed=seed) if other != step]
    bias = statistics.selection_bias(eligible_scores, seed=seed)
    return {
        "selected_step": step,
        "selected": {"judge": judge, "rule": rule, "within_noise": tied, "optimism": bias, **best},
    }
