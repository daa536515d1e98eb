"""Win rates by judges that compare two answers in both orders."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlhf_cli import statistics
from rlhf_cli.evaluation.comparison import Scores, agreement, win_rate
from rlhf_cli.evaluation.responses import EvalResponses
from rlhf_cli.judges.pairwise import Comparison
from rlhf_cli.runs.report import Agreement, WinRate, WinRates


def pairwise_win_rates(
    compared: Mapping[str, Sequence[Comparison]], policy: EvalResponses, baseline: EvalResponses
) -> WinRates:
    """Return the win rates of `policy` by judges that compared its answers (first) with those of `baseline`.

    Both orders of a pair are one result, so that the interval counts prompts.
    """
    points = {judge: [each.points for each in comparisons] for judge, comparisons in compared.items()}
    ours = replace(policy, scores={**policy.scores, **points})
    theirs = replace(baseline, scores={**baseline.scores, **{judge: [0.5] * len(points[judge]) for judge in points}})
    return {judge: _win_rate(judge, comparisons, ours, theirs) for judge, comparisons in compared.items()}


def _win_rate(judge: str, comparisons: Sequence[Comparison], policy: EvalResponses, baseline: EvalResponses) -> WinRate:
    """Return a judge's win rate, how it depends on the order, and how it agrees with the other judges."""
    plain = win_rate(judge, policy, baseline)
    others = {other: _agreement(judge, other, policy, baseline) for other in policy.scores if other != judge}
    rate = plain.with_changes(
        difference=None,  # of points, which are no scores
        difference_ci95=None,
        agreement={other: agreed for other, agreed in others.items() if agreed is not None} or None,
    )

    asked = [(each, prompt) for each, prompt in zip(comparisons, policy.prompts, strict=True) if each.winner]
    if asked:
        consistent = [float(each.is_consistent) for each, _ in asked]
        interval = statistics.share_interval(consistent, [prompt for _, prompt in asked])
        rate = rate.with_changes(consistency=sum(consistent) / len(consistent), consistency_ci95=list(interval))

    slots = [(slot, prompt) for each, prompt in asked for slot in each.slots]
    if slots:
        first = [slot for slot, _ in slots]
        interval = statistics.share_interval(first, [prompt for _, prompt in slots])
        rate = rate.with_changes(first_slot=sum(first) / len(first), first_slot_ci95=list(interval))
    return rate


def _agreement(judge: str, other: str, policy: EvalResponses, baseline: EvalResponses) -> Agreement | None:
    """Return how two judges agree; None if no prompt is decided by both."""

    def scores(name: str) -> tuple[Scores, Scores]:
        return policy.scores[name], baseline.scores[name]

    agreed = agreement(scores(judge), scores(other), policy.prompts)
    return None if agreed is None else Agreement(value=agreed[0], ci95=list(agreed[1]))
