"""Win rates by judges that compare two answers in both orders."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlhf_cli import statistics
from rlhf_cli.evaluation.comparison import agreement, win_rate
from rlhf_cli.evaluation.responses import EvalResponses
from rlhf_cli.judges.pairwise import Comparison
from rlhf_cli.runs.report import Agreement, WinRate, WinRates

TIE = 0.5


def pairwise_win_rates(
    compared: Mapping[str, Sequence[Comparison]], policy: EvalResponses, baseline: EvalResponses
) -> WinRates:
    """Return the win rates of `policy` by judges that compared its answers (first) with those of `baseline`.

    Both orders of a pair are one result, so that the interval counts prompts. Pairs that are too long for a judge do
    not count.
    """
    points = {judge: [each.points for each in comparisons] for judge, comparisons in compared.items()}
    ties = {judge: [TIE] * len(comparisons) for judge, comparisons in compared.items()}
    policy = replace(policy, scores={**policy.scores, **points})
    baseline = replace(baseline, scores={**baseline.scores, **ties})

    rates = {}
    for judge, comparisons in compared.items():
        judged = [row for row, each in enumerate(comparisons) if not each.is_too_long]
        ours = policy.rows(judged)
        theirs = baseline.rows(judged)
        rate = win_rate(judge, ours, theirs).with_changes(difference=None, difference_ci95=None)  # of no scores
        rate = with_agreement(rate, judge, ours, theirs)
        rates[judge] = _with_consistency(rate, comparisons, policy.prompts)
    return rates


def with_agreement(rate: WinRate, judge: str, policy: EvalResponses, baseline: EvalResponses) -> WinRate:
    """Add how often a judge agrees with each other judge, where any prompt is decided by both."""
    ours = policy.scores[judge], baseline.scores[judge]
    found = {}
    for other in (name for name in policy.scores if name != judge):
        theirs = policy.scores[other], baseline.scores[other]
        agreed = agreement(ours, theirs, policy.prompts)
        if agreed:
            share, interval = agreed
            found[other] = Agreement(value=share, ci95=list(interval))
    return rate.with_changes(agreement=found or None)


def _with_consistency(rate: WinRate, comparisons: Sequence[Comparison], prompts: Sequence[str]) -> WinRate:
    """Add how far the pairs that were asked depend on the order in which they were shown."""
    consistent: list[float] = []
    asked_prompts: list[str] = []
    first_wins: list[float] = []
    decided_prompts: list[str] = []
    for comparison, prompt in zip(comparisons, prompts, strict=True):
        if comparison.winner:
            consistent.append(float(comparison.is_consistent))
            asked_prompts.append(prompt)
            first_wins += comparison.slots
            decided_prompts += [prompt] * len(comparison.slots)

    if consistent:
        interval = statistics.share_interval(consistent, asked_prompts)
        rate = rate.with_changes(consistency=sum(consistent) / len(consistent), consistency_ci95=list(interval))
    return with_first_slot(rate, first_wins, decided_prompts)


def with_first_slot(rate: WinRate, first_wins: Sequence[float], prompts: Sequence[str]) -> WinRate:
    """Add how often the answer that is shown first wins: 1 or 0 of each decision, with its prompt."""
    if not first_wins:
        return rate
    interval = statistics.share_interval(first_wins, prompts)
    return rate.with_changes(first_slot=sum(first_wins) / len(first_wins), first_slot_ci95=list(interval))
