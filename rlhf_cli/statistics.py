"""Intervals for evaluation: plain numbers in, plain numbers out."""

import math
from collections.abc import Sequence

Z95 = 1.959963984540054  # standard normal quantile at 0.975


def wilson(wins: float, n: int) -> tuple[float, float]:
    """95 % Wilson score interval of a proportion `wins / n`; a tie may count as half a win, the interval is then wide.

    Wilson 1927; Brown, Cai and DasGupta 2001, section 3.1.1.
    """
    assert n > 0 and 0 <= wins <= n
    share, z2 = wins / n, Z95 * Z95
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def bootstrap_mean(values: Sequence[float], *, seed: int = 0, resamples: int = 2000) -> tuple[float, float]:
    """95 % bootstrap interval of the mean (BCa, Efron 1987), the same for the same seed.

    A constant sample has an interval of width 0.
    """
    import numpy as np
    from scipy.stats import bootstrap

    sample = np.asarray(values, dtype=np.float64)
    assert sample.ndim == 1 and sample.size > 0
    if sample.size == 1 or np.ptp(sample) == 0:
        return float(sample[0]), float(sample[0])
    result = bootstrap(
        (sample,), np.mean, n_resamples=resamples, batch=200, rng=np.random.default_rng(seed), method="BCa"
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def win_rate(ours: Sequence[float], theirs: Sequence[float]) -> dict:
    """Share of rows where `ours` is above `theirs`, a tie counting half: {value, ci95, n, ties}."""
    assert len(ours) == len(theirs) > 0
    wins = sum(a > b for a, b in zip(ours, theirs, strict=True))
    ties = sum(a == b for a, b in zip(ours, theirs, strict=True))
    n, points = len(ours), wins + 0.5 * ties
    return {"value": points / n, "ci95": list(wilson(points, n)), "n": n, "ties": ties}


def best_of_n_kl(n: int) -> float:
    """Upper bound in nats on KL(best-of-n policy || policy).

    log n - (n - 1) / n (Stiennon et al. 2020, appendix G.3; Beirami et al. 2024).
    """
    return math.log(n) - (n - 1) / n
