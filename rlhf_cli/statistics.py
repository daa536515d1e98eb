"""Intervals for evaluation: plain numbers in, plain numbers out."""

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

Z95 = 1.959963984540054  # standard normal quantile at 0.975
CAUCHY = 2.5  # Gelman et al. 2008: few effects move log-odds by more than this
RESAMPLES = 2000
ROUNDS, SETTLED = 200, 1e-8  # of a fit; its rate then moves by less than this


def bonferroni_z(count: int) -> float:
    """The normal quantile for which `count` intervals hold together with 95 % (Bonferroni)."""
    return Z95 if count == 1 else NormalDist().inv_cdf(1 - 0.025 / count)


def wilson(wins: float, n: int, z: float = Z95) -> tuple[float, float]:
    """95 % Wilson score interval of a proportion `wins / n`; a tie may count as half a win, the interval is then wide.

    Wilson 1927; Brown, Cai and DasGupta 2001, section 3.1.1. Another `z` gives another level.
    """
    assert n > 0 and 0 <= wins <= n
    share, z2 = wins / n, z * z
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = z * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def wilson_difference(ours: tuple[float, int], theirs: tuple[float, int], z: float = Z95) -> tuple[float, float]:
    """95 % interval of the difference of two proportions, each (share, n), of independent rows.

    Newcombe 1998 (Statistics in Medicine 17, 873-890), method 10. Of rows that are alike it is too wide.
    """
    (one, other), bounds = (ours[0], theirs[0]), [wilson(share * n, n, z) for share, n in (ours, theirs)]
    (low, high), (low_other, high_other) = bounds
    return (
        one - other - math.hypot(one - low, high_other - other),
        one - other + math.hypot(high - one, other - low_other),
    )


def bootstrap_mean(values: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES) -> tuple[float, float]:
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
    points = _points(ours, theirs)
    n, won = len(points), sum(points)
    return {"value": won / n, "ci95": list(wilson(won, n)), "n": n, "ties": points.count(0.5)}


def _points(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """1 for a row that ours wins, 0.5 for a tie, 0 for one that it loses."""
    assert len(ours) == len(theirs) > 0
    return [0.5 * ((a > b) + (a >= b)) for a, b in zip(ours, theirs, strict=True)]


def paired_difference(ours: Sequence[float], theirs: Sequence[float], *, seed: int = 0) -> dict[str, Any]:
    """The mean of ours - theirs, row by row: {difference, difference_ci95}.

    Paired: what makes a prompt easy or hard for both falls away, so the interval is narrower than those of the means.
    """
    gains = [a - b for a, b in zip(ours, theirs, strict=True)]
    return {"difference": math.fsum(gains) / len(gains), "difference_ci95": list(bootstrap_mean(gains, seed=seed))}


def length_controlled(
    ours: Sequence[float], theirs: Sequence[float], longer: Sequence[float], *, seed: int = 0
) -> tuple[float, tuple[float, float]]:
    """The win rate that would be if no answer were longer than the other's, and its 95 % interval (paired bootstrap).

    `longer` is by how much ours is the longer one, row by row. Dubois et al. 2024 (arXiv 2404.04475), section 3: the
    preference is regressed on the length difference d, P(win) = logistic(a + b tanh(d / std d)), a tie counting half,
    and d is then set to 0, which leaves logistic(a). Of their terms the one of a prompt's difficulty falls away: it
    wants several models on the same prompts. They hold b back by an L1 penalty that cross-validation picks; here it is
    Gelman et al.'s default prior (2008, Annals of Applied Statistics 2(4), sections 2-3: Cauchy of scale 2.5, fitted
    by their EM), which has no draws of its own.

    Where all differences are the same, or one side wins every row, lengths explain nothing: it is the plain rate, with
    its Wilson interval.
    """
    import numpy as np
    from scipy.special import expit

    points, apart = _points(ours, theirs), np.asarray(longer, dtype=np.float64)
    n, won = len(points), sum(points)
    if np.ptp(apart) == 0 or won in (0, n):
        return won / n, wilson(won, n)
    # Rows of the same difference and result are one cell, and a resample is how often each cell was drawn.
    (d, y), rows = np.unique(np.stack([apart, points]), axis=1, return_counts=True)
    drawn = np.random.default_rng(seed).multinomial(n, rows / n, size=RESAMPLES)
    counts = np.concatenate([rows[None], drawn]).astype(np.float64)
    spread = np.sqrt(np.maximum(counts @ d**2 / n - (counts @ d / n) ** 2, 0.0))[:, None]
    x = np.tanh(np.divide(d, spread, out=np.zeros_like(counts), where=spread > 0))
    rates = expit(_logistic_intercept(x, y, counts))
    low, high = np.quantile(rates[1:], [0.025, 0.975])
    return float(rates[0]), (float(low), float(high))


def _logistic_intercept(x: Any, y: Any, counts: Any) -> Any:
    """a of P(y) = logistic(a + b x) in each row of `counts`, by Newton's steps; b has the prior of `CAUCHY`."""
    import numpy as np
    from scipy.special import expit

    a, b = np.zeros(len(counts)), np.zeros(len(counts))
    for _ in range(ROUNDS):
        held = 2 / (CAUCHY**2 + b * b)  # EM: a Cauchy is a normal of unknown variance, here its inverse expected
        p = expit(a[:, None] + b[:, None] * x)
        off, weight = counts * (y - p), counts * p * (1 - p)
        to_a, to_b = off.sum(1), (off * x).sum(1) - held * b
        aa, ab, bb = weight.sum(1) + 1e-9, (weight * x).sum(1), (weight * x * x).sum(1) + held
        step_a, step_b = (bb * to_a - ab * to_b) / (aa * bb - ab**2), (aa * to_b - ab * to_a) / (aa * bb - ab**2)
        short = 2 / np.maximum(2, np.maximum(np.abs(step_a), np.abs(step_b)))  # a resample may be all wins
        before = expit(a)
        a, b = a + short * step_a, b + short * step_b
        if np.abs(expit(a) - before).max() < SETTLED:
            break
    return a


def selection_bias(scores: Mapping[Any, Sequence[float]], *, seed: int = 0) -> float:
    """How much the mean of the best of several flatters itself for being picked on the very rows that it is told on.

    `scores`: each candidate's, row by row. Efron 1983 (JASA 78), the bootstrap's estimate of optimism: rows are drawn
    anew, the best is picked by them, and its mean there is held against its mean over the rows that were there.
    """
    import numpy as np

    table = np.asarray(list(scores.values()), dtype=np.float64)
    n, means = table.shape[1], table.mean(axis=1)
    drawn = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=RESAMPLES) @ table.T / n
    picked, best = drawn.argmax(axis=1), means.argmax()
    # What the rows' best gains by the draw alone is 0 on the mean: taken off, little noise is left.
    return float((drawn.max(axis=1) - drawn[:, best] + means[best] - means[picked]).mean())


def within_noise(scores: Mapping[Any, Sequence[float]], *, seed: int = 0) -> list[Any]:
    """Those of several whose means chance may have put below the highest one; all others are surely below the best.

    `scores`: each candidate's, row by row. Multiple comparisons with the best (Hsu 1981, Annals of Statistics 9(5)):
    with 95 %, none is left out that is as good as the best, however many were searched. The critical values are a
    bootstrap over rows of all candidates together (White 2000, Econometrica 68(5)).
    """
    import numpy as np
    from scipy.special import stdtrit

    table = np.asarray(list(scores.values()), dtype=np.float64)
    (k, n), means = table.shape, table.mean(axis=1)
    if n < 2:
        return list(scores)  # one row has no spread to learn from
    drawn = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=RESAMPLES) @ table.T / n
    # Of few rows a bootstrap is too narrow: its deviation by this root, its tails by Student's t for the normal's.
    level, freedom = 1 - 0.05 / max(2, k), n - 1
    wider = math.sqrt(n / freedom) * float(stdtrit(freedom, level)) / NormalDist().inv_cdf(level)
    noise = (drawn - means) * wider
    bounds = np.quantile(noise.max(axis=1)[:, None] - noise, 0.95, axis=0)
    below = means.max() - means
    return [name for name, gap, bound in zip(scores, below, bounds, strict=True) if gap <= bound]


def with_interval(value: float, bounds: Sequence[float] | None) -> str:
    """A value as a report tells it, with its 95 % interval where it has one."""
    return f"{value:.3f} [{bounds[0]:.3f}, {bounds[1]:.3f}]" if bounds else f"{value:.3f}"


def best_of_n_kl(n: int) -> float:
    """Upper bound in nats on KL(best-of-n policy || policy).

    log n - (n - 1) / n (Stiennon et al. 2020, appendix G.3; Beirami et al. 2024).
    """
    return math.log(n) - (n - 1) / n
