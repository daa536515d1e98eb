"""What scored evaluation pairs say: accuracy, margins, calibration, and whether the score follows the length."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_cli.statistics import wilson

MARGIN_EDGES = (-4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0)  # log-odds: 1, 2 and 4 are said chances of 73, 88 and 98 %
BINS = 10  # of calibration, of like width, from 0.5 to 1
RESAMPLES = 1000


@dataclass(frozen=True)
class ScoredPair:
    """An evaluation pair with its raw scores, and the answers' lengths in tokens, end token included."""

    chosen: float
    rejected: float
    chosen_length: int
    rejected_length: int

    @property
    def margin(self) -> float:
        return self.chosen - self.rejected

    @property
    def right(self) -> float:
        """1 where the chosen answer scores higher, 0 where the rejected does; a tie is half right."""
        return 0.5 if self.chosen == self.rejected else float(self.chosen > self.rejected)


def measure(pairs: Sequence[ScoredPair], *, seed: int = 0) -> dict[str, Any]:
    """The card's numbers of at least one pair, all scores finite; the same for the same seed."""
    n, wins = len(pairs), sum(pair.right for pair in pairs)
    correlation, interval = length_correlation(pairs, seed=seed)
    found: dict[str, Any] = {
        "n": n,
        "accuracy": wins / n,
        "accuracy_ci95": list(wilson(wins, n)),
        "margin": sum(pair.margin for pair in pairs) / n,
        "margin_histogram": {"edges": list(MARGIN_EDGES), "counts": histogram([pair.margin for pair in pairs])},
        "ece": calibration_error(pairs),
        "ece_by_chance": error_by_chance(pairs, seed=seed),
        "calibration": calibration(pairs),
        "length_correlation": correlation,
        "length_correlation_ci95": list(interval),
    }
    if lengths := longer(pairs):
        found["longer_answer"] = lengths
    return found


def histogram(margins: Sequence[float]) -> list[int]:
    """How many margins lie below the first of MARGIN_EDGES, from each edge up to the next, and from the last on."""
    counts = [0] * (len(MARGIN_EDGES) + 1)
    for margin in margins:
        counts[bisect_right(MARGIN_EDGES, margin)] += 1
    return counts


def confidence(pair: ScoredPair) -> float:
    """The chance that the scores give to the answer that they prefer: max(p, 1 - p), p = sigmoid(margin).

    That the chosen answer is written first says nothing, so that p itself would be calibrated only by halves: a model
    that is always sure and always right has p = 1 throughout, one that is always sure and always wrong p = 0.
    """
    return 1 / (1 + math.exp(-abs(pair.margin)))


def calibration(pairs: Sequence[ScoredPair]) -> list[dict[str, float]]:
    """{from, to, n, confidence, accuracy} of each bin that holds a pair."""
    held: dict[int, list[ScoredPair]] = {}
    for pair in pairs:
        held.setdefault(_bin(confidence(pair)), []).append(pair)
    return [
        {
            "from": 0.5 + 0.5 * number / BINS,
            "to": 0.5 + 0.5 * (number + 1) / BINS,
            "n": len(held[number]),
            "confidence": sum(map(confidence, held[number])) / len(held[number]),
            "accuracy": sum(pair.right for pair in held[number]) / len(held[number]),
        }
        for number in sorted(held)
    ]


def calibration_error(pairs: Sequence[ScoredPair]) -> float:
    """Expected calibration error: sum over bins of n_bin / n * |accuracy - mean confidence|.

    Guo et al. 2017, arXiv 1706.04599, equation 3; of two answers, so that the bins begin at 0.5.
    """
    return sum(each["n"] * abs(each["accuracy"] - each["confidence"]) for each in calibration(pairs)) / len(pairs)


def error_by_chance(pairs: Sequence[ScoredPair], *, seed: int = 0) -> float:
    """What the calibration error stays below in 95 of 100 draws of the outcomes from these very confidences.

    With few pairs a bin's accuracy is off by chance alone (consistency resampling: Broecker and Smith 2007).
    """
    import numpy as np

    sure = np.array([confidence(pair) for pair in pairs])
    bins, draw = np.array([_bin(each) for each in sure]), np.random.default_rng(seed)
    errors = [
        np.abs(np.bincount(bins, weights=(draw.random(len(sure)) < sure) - sure)).sum() / len(sure)
        for _ in range(RESAMPLES)
    ]
    return float(np.quantile(errors, 0.95))


def _bin(sure: float) -> int:
    return min(BINS - 1, int((sure - 0.5) * 2 * BINS))


def length_correlation(pairs: Sequence[ScoredPair], *, seed: int = 0) -> tuple[float, tuple[float, float]]:
    """Spearman's correlation of score and length over all answers, and its 95 % interval.

    Of ranks, because a reward that rises with the length need not rise in a line, and one answer of great length must
    not decide. The interval is a bootstrap over pairs (their two answers share a prompt), with the ranks of the whole.
    0 with an interval of width 0 where all lengths, or all scores, are the same.
    """
    import numpy as np
    from scipy.stats import rankdata

    scores = rankdata([score for pair in pairs for score in (pair.chosen, pair.rejected)])
    lengths = rankdata([length for pair in pairs for length in (pair.chosen_length, pair.rejected_length)])
    x, y = scores - scores.mean(), lengths - lengths.mean()
    moments = np.stack([x, y, x * x, y * y, x * y]).reshape(5, len(pairs), 2).mean(axis=2)

    def correlation(means: Any) -> float:
        spread = (means[2] - means[0] ** 2) * (means[3] - means[1] ** 2)
        return float((means[4] - means[0] * means[1]) / math.sqrt(spread)) if spread > 1e-9 else 0.0

    draw = np.random.default_rng(seed)
    drawn = [draw.integers(len(pairs), size=len(pairs)) for _ in range(RESAMPLES)]
    resampled = [correlation(moments[:, rows].mean(axis=1)) for rows in drawn]
    low, high = np.quantile(resampled, (0.025, 0.975))
    return correlation(moments.mean(axis=1)), (float(low), float(high))


def longer(pairs: Sequence[ScoredPair]) -> dict[str, Any] | None:
    """Of pairs whose answers differ in length, how often the longer one scores higher, and how often it was chosen.

    {n, preferred, ci95 (of preferred), chosen}; None where there are no such pairs.

    A share and no correlation: all pairs are written chosen first, so that with the longer one always chosen neither
    sign would vary. 2 * share - 1 is the correlation of the signs over both orders of each pair.
    """
    kept = [pair for pair in pairs if pair.chosen_length != pair.rejected_length]
    if not kept:
        return None
    n, chosen = len(kept), [pair.chosen_length > pair.rejected_length for pair in kept]
    wins = sum(pair.right if longest else 1 - pair.right for pair, longest in zip(kept, chosen, strict=True))
    return {"n": n, "preferred": wins / n, "ci95": list(wilson(wins, n)), "chosen": sum(chosen) / n}
