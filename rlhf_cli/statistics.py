"""Statistics of the evaluation: confidence intervals, win rates and selection bias. Takes and returns plain numbers."""

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise
from statistics import NormalDist, fmean
from typing import Any

Z95 = 1.959963984540054  # standard normal quantile at 0.975
CAUCHY = 2.5  # scale of the prior, Gelman et al. 2008: few effects change the log-odds by more
RESAMPLES = 2000
FEWEST = 8  # values of a series: fewer do not separate noise from a trend
MAX_ITERATIONS, TOLERANCE = 200, 1e-8  # of the fit; the tolerance is on the rate


def bonferroni_z(count: int) -> float:
    """Return the normal quantile for `count` simultaneous 95 % intervals (Bonferroni)."""
    return Z95 if count == 1 else NormalDist().inv_cdf(1 - 0.025 / count)


def wilson(wins: float, n: float, z: float = Z95) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a proportion `wins / n`. Too wide where ties count as half wins.

    Wilson 1927; Brown, Cai and DasGupta 2001, section 3.1.1. Another `z` gives another level.
    """
    assert n > 0 and 0 <= wins <= n
    share, z2 = wins / n, z * z
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = z * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def wilson_difference(first: tuple[float, int], second: tuple[float, int], z: float = Z95) -> tuple[float, float]:
    """Return the 95 % interval of the difference of two independent proportions, each (share, n).

    Newcombe 1998 (Statistics in Medicine 17, 873-890), method 10. Too wide for correlated rows.
    """
    (p1, p2), bounds = (first[0], second[0]), [wilson(share * n, n, z) for share, n in (first, second)]
    (low1, high1), (low2, high2) = bounds
    return p1 - p2 - math.hypot(p1 - low1, high2 - p2), p1 - p2 + math.hypot(high1 - p1, p2 - low2)


def bootstrap_mean(values: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean (BCa, Efron 1987), deterministic for a seed.

    A constant sample has an interval of width 0.
    """
    import numpy as np
    from scipy.stats import bootstrap

    sample = np.asarray(values, dtype=np.float64)
    assert sample.ndim == 1 and sample.size > 0
    if sample.size == 1 or np.ptp(sample) == 0:
        return float(sample[0]), float(sample[0])
    result = bootstrap(
        (sample,), np.mean, n_resamples=RESAMPLES, batch=200, rng=np.random.default_rng(seed), method="BCa"
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def win_rate(scores: Sequence[float], baseline: Sequence[float]) -> dict:
    """Return the share of rows where `scores` is above `baseline`, ties counting half: {value, ci95, n, ties}."""
    points = _points(scores, baseline)
    return {"value": fmean(points), "ci95": list(share_interval(points)), "n": len(points), "ties": points.count(0.5)}


def share_interval(points: Sequence[float], groups: Sequence[Hashable] | None = None) -> tuple[float, float]:
    """Return the 95 % interval of the mean of wins (1), ties (0.5) and losses (0).

    It is Wilson's, of as many independent rows without ties as give the mean the same variance. Rows of one of the
    `groups`, such as pairs of one prompt, depend on one another; then it is of as many rows as there are at most.
    """
    n, mean, sums = len(points), fmean(points), defaultdict[Hashable, float](float)
    for group, point in zip(range(n) if groups is None else groups, points, strict=True):
        sums[group] += point - mean
    variance, count = math.fsum(each * each for each in sums.values()) / n, len(sums)
    rows = n * mean * (1 - mean) / variance if variance else n if 0 < mean < 1 < count else count
    if variance and count < n:  # with Bessel's correction
        rows = min(max(rows * (count - 1) / count, 1), n)
    return wilson(mean * rows, rows)


def _points(scores: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Return 1 for each win, 0.5 for a tie and 0 for a loss."""
    assert len(scores) == len(baseline) > 0
    return [0.5 * ((a > b) + (a >= b)) for a, b in zip(scores, baseline, strict=True)]


def paired_difference(scores: Sequence[float], baseline: Sequence[float], *, seed: int = 0) -> dict[str, Any]:
    """Return the mean of scores - baseline, row by row: {difference, difference_ci95}.

    Pairing cancels the difficulty of a prompt, so the interval is narrower than those of the means.
    """
    gains = [a - b for a, b in zip(scores, baseline, strict=True)]
    return {"difference": math.fsum(gains) / len(gains), "difference_ci95": list(bootstrap_mean(gains, seed=seed))}


def length_controlled(
    scores: Sequence[float], baseline: Sequence[float], length_difference: Sequence[float], *, seed: int = 0
) -> tuple[float, tuple[float, float]]:
    """Return the win rate expected at equal answer lengths, and its 95 % interval (paired bootstrap).

    `length_difference` is by how much our answer is longer, row by row. Dubois et al. 2024 (arXiv 2404.04475), section
    3: the preference is regressed on the length difference d, P(win) = logistic(a + b tanh(d / std d)), a tie counting
    half, and d is set to 0, which leaves logistic(a). Their term for the difficulty of a prompt is omitted: it needs
    several models on the same prompts. They shrink b by an L1 penalty chosen by cross-validation; here it has Gelman et
    al.'s default prior (2008, Annals of Applied Statistics 2(4), sections 2-3: Cauchy of scale 2.5, fitted by their
    EM), which needs no random draws.

    If all differences are equal, or one side wins every row, lengths explain nothing: returns the plain rate with its
    interval of `win_rate`.
    """
    import numpy as np
    from scipy.special import expit

    points, differences = _points(scores, baseline), np.asarray(length_difference, dtype=np.float64)
    n, won = len(points), sum(points)
    if np.ptp(differences) == 0 or won in (0, n):
        return won / n, share_interval(points)
    # rows of equal difference and result form a cell; a resample is the number of draws per cell
    (d, y), rows = np.unique(np.stack([differences, points]), axis=1, return_counts=True)
    drawn = np.random.default_rng(seed).multinomial(n, rows / n, size=RESAMPLES)
    counts = np.concatenate([rows[None], drawn]).astype(np.float64)
    spread = np.sqrt(np.maximum(counts @ d**2 / n - (counts @ d / n) ** 2, 0.0))[:, None]
    x = np.tanh(np.divide(d, spread, out=np.zeros_like(counts), where=spread > 0))
    rates = expit(_logistic_intercept(x, y, counts))
    low, high = np.quantile(rates[1:], [0.025, 0.975])
    return float(rates[0]), (float(low), float(high))


def _logistic_intercept(x: Any, y: Any, counts: Any) -> Any:
    """Return a of P(y) = logistic(a + b x) for each row of `counts`, by Newton; b has the prior of `CAUCHY`."""
    import numpy as np
    from scipy.special import expit

    a, b = np.zeros(len(counts)), np.zeros(len(counts))
    for _ in range(MAX_ITERATIONS):
        precision = 2 / (CAUCHY**2 + b * b)  # E step: a Cauchy is a normal of unknown variance
        p = expit(a[:, None] + b[:, None] * x)
        residual, weight = counts * (y - p), counts * p * (1 - p)
        grad_a, grad_b = residual.sum(1), (residual * x).sum(1) - precision * b
        aa, ab, bb = weight.sum(1) + 1e-9, (weight * x).sum(1), (weight * x * x).sum(1) + precision
        step_a, step_b = (
            (bb * grad_a - ab * grad_b) / (aa * bb - ab**2),
            (aa * grad_b - ab * grad_a) / (aa * bb - ab**2),
        )
        damping = 2 / np.maximum(2, np.maximum(np.abs(step_a), np.abs(step_b)))  # a resample may be all wins
        before = expit(a)
        a, b = a + damping * step_a, b + damping * step_b
        if np.abs(expit(a) - before).max() < TOLERANCE:
            break
    return a


def selection_bias(scores: Mapping[Any, Sequence[float]], *, seed: int = 0) -> float:
    """Return by how much the mean of the best candidate is overestimated because it was selected on the same rows.

    `scores`: each candidate's, row by row. Efron 1983 (JASA 78), bootstrap estimate of optimism: rows are resampled,
    the best candidate is selected on them, and its mean there is compared with its mean over the original rows.
    """
    import numpy as np

    table = np.asarray(list(scores.values()), dtype=np.float64)
    n, means = table.shape[1], table.mean(axis=1)
    drawn = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=RESAMPLES) @ table.T / n
    picked, best = drawn.argmax(axis=1), means.argmax()
    # control variate: the best candidate's gain in the resample has mean 0; subtracting it reduces the noise
    return float((drawn.max(axis=1) - drawn[:, best] + means[best] - means[picked]).mean())


def within_noise(scores: Mapping[Any, Sequence[float]], *, seed: int = 0) -> list[Any]:
    """Return the candidates that may be as good as the best one; all others are significantly worse.

    `scores`: each candidate's, row by row. Multiple comparisons with the best (Hsu 1981, Annals of Statistics 9(5)): at
    95 %, no candidate as good as the best is excluded, however many there are. The critical values come from a
    bootstrap over rows of all candidates together (White 2000, Econometrica 68(5)).
    """
    import numpy as np
    from scipy.special import stdtrit

    table = np.asarray(list(scores.values()), dtype=np.float64)
    (k, n), means = table.shape, table.mean(axis=1)
    if n < 2:
        return list(scores)  # one row has no variance
    drawn = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=RESAMPLES) @ table.T / n
    # small samples: correct the bootstrap's standard deviation, and replace normal by Student's t tails
    level, freedom = 1 - 0.05 / max(2, k), n - 1
    widening = math.sqrt(n / freedom) * float(stdtrit(freedom, level)) / NormalDist().inv_cdf(level)
    noise = (drawn - means) * widening
    bounds = np.quantile(noise.max(axis=1)[:, None] - noise, 0.95, axis=0)
    gaps = means.max() - means
    return [name for name, gap, bound in zip(scores, gaps, bounds, strict=True) if gap <= bound]


def with_interval(value: float, bounds: Sequence[float] | None) -> str:
    """Return a value as text for reports, with its 95 % interval if there is one."""
    return f"{value:.3f} [{bounds[0]:.3f}, {bounds[1]:.3f}]" if bounds else f"{value:.3f}"


def best_of_n_kl(n: int) -> float:
    """Return an upper bound in nats on KL(best-of-n policy || policy).

    log n - (n - 1) / n (Stiennon et al. 2020, appendix G.3; Beirami et al. 2024).
    """
    return math.log(n) - (n - 1) / n


# Noise of a series, from one update or evaluation to the next. Intervals are of 95 %.


def noise(values: Sequence[float], share: float = 1.0) -> float:
    """Return half the 95 % interval of a sum whose variance is `share` times that of the noise of one value.

    The noise is estimated from differences of neighbours, which a slow trend hardly affects: sum d^2 / (2 (n - 1)),
    with 2 (n - 1)^2 / (3 n - 4) degrees of freedom (von Neumann et al. 1941, Annals of Mathematical Statistics 12(2)).
    """
    n, steps = len(values), _differences(values)
    return _student(2 * (n - 1) ** 2 / (3 * n - 4)) * math.sqrt(share * fmean(step * step for step in steps) / 2)


def _student(freedom: float, searched: int = 1) -> float:
    """Return Student's t quantile for `searched` simultaneous 95 % intervals (Bonferroni)."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 1 - 0.025 / searched))


def _differences(values: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(values)]


def last_quarter(values: Sequence[float]) -> Sequence[float]:
    """Return the values that represent the end of a run; a single update has few responses."""
    return values[-max(1, len(values) // 4) :]


def end_noise(values: Sequence[float], of_the_first: float = 0.0) -> float:
    """Return half the 95 % interval of the mean of the last quarter, with the noise of the last half.

    `of_the_first`: the mean is compared with this multiple of the first value, which has the same noise.
    """
    return noise(values[len(values) // 2 :], 1 / len(last_quarter(values)) + of_the_first**2)


def gained(values: Sequence[float]) -> tuple[float, float]:
    """Return the last quarter's mean minus the first tenth's, and half its 95 % interval. At least FEWEST values."""
    head, tail = values[: max(1, len(values) // 10)], last_quarter(values)
    return fmean(tail) - fmean(head), noise(values, 1 / len(head) + 1 / len(tail))


def rose_again(values: Sequence[float]) -> bool:
    """Return True if the last of at least FEWEST values is above the lowest by more than noise.

    The noise is that of second differences, which a slow bend hardly affects: sum d^2 / (6 (n - 2)), with
    18 (n - 2) / 35 degrees of freedom (Gasser et al. 1986, Biometrika 73(3)). Corrected for the search of the lowest.
    """
    bends = _differences(_differences(values))
    half = _student(18 * len(bends) / 35, searched=len(values) - 1)
    return values[-1] - min(values) > half * math.sqrt(2 * fmean(bend * bend for bend in bends) / 6)
