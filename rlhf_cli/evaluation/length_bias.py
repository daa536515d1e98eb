"""Length bias of a reward model: the slope of its scores over the answers' lengths, and its scores without it.

Post-hoc reward calibration (Huang et al. 2024, arXiv 2409.17407), with a straight line in place of their local
regression: it has one number, and it is defined at lengths that no sampled answer has. No torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlhf_cli.config.reward import MIN_DEBIAS_ANSWERS
from rlhf_cli.evaluation.reward_model import ScoredPair, length_correlation
from rlhf_cli.runs.report import LengthDebiasing, LengthResult
from rlhf_cli.statistics import paired_difference, share_interval


@dataclass(frozen=True)
class LengthTrend:
    """The line of raw scores over lengths in tokens; at `mean_length` it changes no score."""

    slope: float
    mean_length: float

    def without(self, score: float, length: float) -> float:
        """Return a raw score without the part that its answer's length explains."""
        return score - self.slope * (length - self.mean_length)


def fit_trend(scores: Sequence[float], lengths: Sequence[int], ended: Sequence[bool]) -> LengthTrend | None:
    """Return the least-squares line through the answers that ended, around the mean length of all answers.

    An answer that was cut off has an unusual score for what it lacks, not for its length, and all of these have the
    greatest length. None if fewer than MIN_DEBIAS_ANSWERS ended, or all of these have one length.
    """
    import numpy as np

    complete = np.asarray(ended, dtype=bool)
    if complete.sum() < MIN_DEBIAS_ANSWERS:
        return None
    all_lengths = np.asarray(lengths, dtype=np.float64)
    x = all_lengths[complete]
    y = np.asarray(scores, dtype=np.float64)[complete]
    if np.ptp(x) == 0:
        return None

    deviations = x - x.mean()
    slope = float(deviations @ y) / float(deviations @ deviations)
    return LengthTrend(slope, float(all_lengths.mean()))


def debias(pairs: Sequence[ScoredPair], trend: LengthTrend) -> list[ScoredPair]:
    """Return the pairs with scores without the trend."""
    return [
        replace(
            pair,
            chosen=trend.without(pair.chosen, pair.chosen_length),
            rejected=trend.without(pair.rejected, pair.rejected_length),
        )
        for pair in pairs
    ]


def compare(pairs: Sequence[ScoredPair], trend: LengthTrend, *, applied: bool) -> LengthDebiasing:
    """Return the results of pairs with raw scores, before and after the trend is subtracted.

    `applied`: the reward model subtracts it.
    """
    debiased = debias(pairs, trend)
    after = [pair.right for pair in debiased]
    before = [pair.right for pair in pairs]
    difference, interval = paired_difference(after, before, [pair.prompt for pair in pairs])
    if after == before:  # ties alone have a variance that is not known
        interval = None
    return LengthDebiasing(
        slope=trend.slope,
        applied=applied,
        raw=_result(pairs),
        debiased=_result(debiased),
        accuracy_difference=difference,
        accuracy_difference_ci95=list(interval) if interval else None,
    )


def _result(pairs: Sequence[ScoredPair]) -> LengthResult:
    right = [pair.right for pair in pairs]
    correlation, interval = length_correlation(pairs)
    return LengthResult(
        accuracy=sum(right) / len(right),
        accuracy_ci95=list(share_interval(right, [pair.prompt for pair in pairs])),
        length_correlation=correlation,
        length_correlation_ci95=list(interval),
    )
