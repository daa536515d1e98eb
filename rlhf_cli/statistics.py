"""Statistics of the evaluation: confidence intervals, win rates and selection bias. Takes and returns plain numbers."""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist, fmean, stdev
from typing import Any

Z95 = 1.959963984540054  # standard normal quantile at 0.975
CAUCHY = 2.5  # scale of the prior, Gelman et al. 2008: few effects change the log-odds by more
RESAMPLES = 2000
FOLDS = 5  # of the prompts, for the selection of one of several policies
SPLITS = 20  # ways of dealing the prompts into folds
FEWEST_SIDE = 0.1  # share of rows on each side of equal lengths: with fewer a controlled rate is an extrapolation
FEWEST_DIFFERENT = 5  # rows that differ from the most frequent value: of fewer no variance can be estimated
FEWEST = 8  # values of a series: fewer do not separate noise from a trend
MAX_ITERATIONS = 200  # of the fit
TOLERANCE = 1e-8  # on its rate


def bonferroni_z(count: int) -> float:
    """Return the normal quantile for `count` simultaneous 95 % intervals (Bonferroni)."""
    return Z95 if count == 1 else NormalDist().inv_cdf(1 - 0.025 / count)


def wilson(wins: float, n: float, z: float = Z95) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a proportion `wins / n`. Too wide where ties count as half wins.

    Wilson 1927; Brown, Cai and DasGupta 2001, section 3.1.1. Another `z` gives another level.
    """
    assert n > 0 and 0 <= wins <= n
    share = wins / n
    z2 = z * z
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = z * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def wilson_difference(first: tuple[float, float], second: tuple[float, float], z: float = Z95) -> tuple[float, float]:
    """Return the 95 % interval of the difference of two independent proportions, each (share, n).

    Newcombe 1998 (Statistics in Medicine 17, 873-890), method 10. Too wide for correlated rows.
    """
    p1, n1 = first
    p2, n2 = second
    low1, high1 = wilson(p1 * n1, n1, z)
    low2, high2 = wilson(p2 * n2, n2, z)
    below = math.hypot(p1 - low1, high2 - p2)
    above = math.hypot(high1 - p1, p2 - low2)
    return p1 - p2 - below, p1 - p2 + above


@dataclass(frozen=True)
class Clusters:
    """Rows that depend on one another, such as the pairs of one prompt: the cluster of each row, and their sizes."""

    index: Any  # (rows,)
    sizes: Any  # (clusters,)

    @classmethod
    def of(cls, rows: int, groups: Sequence[Hashable] | None = None) -> "Clusters":
        """Return the clusters of rows with the same value of `groups`; without groups each row is one."""
        import numpy as np

        numbers: dict[Hashable, int] = {}
        index = [numbers.setdefault(group, len(numbers)) for group in (range(rows) if groups is None else groups)]
        assert len(index) == rows > 0
        return cls(np.array(index), np.bincount(index))

    @property
    def effective(self) -> float:
        """Return the number of clusters of equal size that would tell as much (Kish 1965, Survey sampling)."""
        return float(len(self.index) ** 2 / (self.sizes @ self.sizes))

    @property
    def quantile(self) -> float:
        """Return Student's t quantile of a 95 % interval whose variance comes from these clusters."""
        return _student(max(self.effective - 1, 1.0))

    @property
    def dependent(self) -> bool:
        """True if rows depend on one another and there are clusters that tell how much."""
        return 1 < len(self.sizes) < len(self.index)

    def quantile_of(self, deviations: Any) -> Any:
        """Return Student's t quantile of a 95 % interval whose variance is the sum of the squares of `deviations`.

        It has 2 V^2 / Var(V) degrees of freedom, since a few clusters may have nearly all of the variance V (Pan and
        Wall 2002, Statistics in Medicine 21, 1429-1441), but at most those of `quantile`.
        """
        import numpy as np
        from scipy.special import stdtrit

        if not self.dependent:
            return self.quantile
        squares = deviations**2
        variance = len(squares) * squares.var(axis=0, ddof=1)  # of their sum
        freedom = 2 * squares.sum(axis=0) ** 2 / np.maximum(variance, 1e-300)
        return stdtrit(np.clip(freedom, 1.0, max(self.effective - 1, 1.0)), 0.975)

    def sums(self, values: Any) -> Any:
        """Return the sum over each cluster, (clusters, ...), of values (rows, ...)."""
        import numpy as np

        if len(self.sizes) == len(self.index):
            return values
        starts = np.cumsum(self.sizes) - self.sizes
        return np.add.reduceat(values[np.argsort(self.index, kind="stable")], starts, axis=0)

    def deviations(self, influence: Any) -> Any:
        """Return by how much each cluster moves a mean, (clusters, ...); the sum of their squares is its variance.

        `influence` (rows, ...): values of rows minus their mean. This is the delete-one-cluster jackknife (Efron and
        Stein 1981, Annals of Statistics 9(3)).
        """
        import numpy as np

        count = len(self.sizes)
        rest = len(self.index) - self.sizes
        if count == 1:
            return np.zeros((1, *influence.shape[1:]))  # of one cluster no variance is known
        scale = np.sqrt((count - 1) / count) / rest
        return self.sums(influence) * scale.reshape(-1, *[1] * (influence.ndim - 1))


def mean_intervals(values: Any, clusters: Clusters) -> tuple[Any, Any]:
    """Return both ends of the 95 % intervals of the means over rows, for values (rows, ...); of one cluster no width.

    Each is the union of Student's interval and that of Hall's transformation, which corrects for skewness (1992,
    Journal of the Royal Statistical Society B 54(1), 221-228): the latter covers where rows are skewed, the former
    where few rows differ from the others. Coverage: docs/evaluation.md.
    """
    import numpy as np

    means = values.mean(axis=0)
    deviations = clusters.deviations(values - means)
    errors = np.sqrt((deviations**2).sum(axis=0))
    skewness = (deviations**3).sum(axis=0) / np.maximum(errors**3, 1e-300)
    skewed = np.abs(skewness) > 1e-6
    t = clusters.quantile_of(deviations)

    def ends(quantile: Any) -> Any:
        slope = np.where(skewed, skewness, 1.0)
        transformed = 3 / slope * (np.cbrt(1 + slope * (quantile - slope / 6)) - 1)
        return means - errors * np.where(skewed, transformed, quantile)

    return np.minimum(ends(t), means - t * errors), np.maximum(ends(-t), means + t * errors)


def mean_interval(values: Sequence[float], groups: Sequence[Hashable] | None = None) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean of rows; None if it cannot be known.

    That is if all but FEWEST_DIFFERENT of the `groups` (else rows) have the same value, or if there are fewer groups.
    """
    import numpy as np

    groups = range(len(values)) if groups is None else groups
    if _different(values, groups) < min(FEWEST_DIFFERENT, len(values) - 1) or len(set(groups)) == 1:
        return None
    clusters = Clusters.of(len(values), groups)
    low, high = mean_intervals(np.asarray(values, dtype=np.float64), clusters)
    return float(low), float(high)


def _different(values: Sequence[float], groups: Iterable[Hashable]) -> int:
    """Return the number of groups with a row that has not the most frequent value."""
    usual, _ = Counter(values).most_common(1)[0]
    return len({group for group, value in zip(groups, values, strict=True) if value != usual})


def win_rate(
    scores: Sequence[float], baseline: Sequence[float], groups: Sequence[Hashable] | None = None
) -> dict[str, Any]:
    """Return the share of rows where `scores` is above `baseline`, ties counting half: {value, ci95, n, ties}."""
    points = win_points(scores, baseline)
    interval = list(share_interval(points, groups))
    return {"value": fmean(points), "ci95": interval, "n": len(points), "ties": points.count(0.5)}


def share_interval(points: Sequence[float], groups: Sequence[Hashable] | None = None) -> tuple[float, float]:
    """Return the 95 % interval of the mean of wins (1), ties (0.5) and losses (0), or of other values from 0 to 1.

    It is Wilson's, of as many independent rows without ties as give the mean the same variance. Rows of one of the
    `groups`, such as pairs of one prompt, depend on one another; then the quantile is Student's, and with ties it is
    that of wins against losses.
    """
    import numpy as np

    clusters = Clusters.of(len(points), groups)
    values = np.asarray(points, dtype=np.float64)
    if clusters.dependent and set(points) <= {0, 0.5, 1} and 0.5 in values:
        return _win_loss_interval(values, clusters)
    rows = effective_rows(values, clusters)
    return wilson(float(values.mean()) * rows, rows, clusters.quantile if clusters.dependent else Z95)


def _win_loss_interval(points: Any, clusters: Clusters) -> tuple[float, float]:
    """Return the interval of (1 + share of wins - share of losses) / 2, from the Wilson intervals of both shares.

    Method of variance estimates recovery (Zou and Donner 2008, Statistics in Medicine 27, 1693-1702). Where nearly all
    rows are ties, it keeps the skewness of few wins or losses, which a Wilson interval about 1/2 has not.
    """
    won = points == 1
    lost = points == 0
    wins, low_wins, high_wins = _wilson_of(won, clusters)
    losses, low_losses, high_losses = _wilson_of(lost, clusters)
    by_cluster = clusters.deviations(won - wins), clusters.deviations(lost - losses)
    correlation = _correlation(*by_cluster) or _correlation(won - wins, lost - losses)

    def half(of_wins: float, of_losses: float) -> float:
        square = of_wins**2 + of_losses**2 - 2 * correlation * of_wins * of_losses
        return math.sqrt(max(square, 0.0)) / 2

    share = (1 + wins - losses) / 2
    low = share - half(wins - low_wins, high_losses - losses)
    high = share + half(high_wins - wins, losses - low_losses)
    return max(0.0, low), min(1.0, high)


def _correlation(first: Any, second: Any) -> float:
    """Return the correlation of centred values; 0 if one of them is constant."""
    squares = float(first @ first) * float(second @ second)
    return float(first @ second) / math.sqrt(squares) if squares > 1e-30 else 0.0


def _wilson_of(outcome: Any, clusters: Clusters) -> tuple[float, float, float]:
    """Return the share of rows with an outcome and its Wilson interval, with Student's quantile."""
    share = float(outcome.mean())
    rows = _rows_of_that_variance(outcome, clusters)
    return share, *wilson(share * rows, rows, clusters.quantile)


def effective_rows(points: Any, clusters: Clusters) -> float:
    """Return the number of independent rows without ties whose mean has the variance of that of points in 0 to 1.

    Clusters tell at most as much as independent rows. If fewer than FEWEST_DIFFERENT of them have a row that differs
    from the most frequent value, it is unknown how much rows depend on one another: then clusters count, not rows.
    """
    rows = _rows_of_that_variance(points, clusters)
    fewest = min(FEWEST_DIFFERENT, len(clusters.sizes))
    if clusters.dependent and _different(points.tolist(), clusters.index.tolist()) < fewest:
        return min(rows, clusters.effective)
    return rows


def _rows_of_that_variance(points: Any, clusters: Clusters) -> float:
    """Return the rows of `effective_rows`, however few clusters tell how much rows depend on one another."""
    n = len(points)
    count = len(clusters.sizes)
    mean = float(points.mean())
    if count == 1 < n:
        return 1.0
    spread = mean * (1 - mean)
    variance = float(((points - mean) ** 2).sum()) / n**2
    if variance < 1e-18:
        return n if 0 < mean < 1 and count == n else clusters.effective
    if count < n:
        variance = min(max(variance, float((clusters.deviations(points - mean) ** 2).sum())), spread)
    return spread / variance


def win_points(scores: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Return 1 for each win, 0.5 for a tie and 0 for a loss."""
    assert len(scores) == len(baseline) > 0
    return [0.5 * ((a > b) + (a >= b)) for a, b in zip(scores, baseline, strict=True)]


def paired_difference(
    scores: Sequence[float], baseline: Sequence[float], groups: Sequence[Hashable] | None = None
) -> tuple[float, tuple[float, float] | None]:
    """Return the mean of scores - baseline, row by row, and its 95 % interval if there is one.

    Pairing cancels the difficulty of a prompt, so the interval is narrower than those of the means. The difference of
    two shares, of scores 0 and 1, has the interval of their win rate.
    """
    gains = [a - b for a, b in zip(scores, baseline, strict=True)]
    if {*scores, *baseline} <= {0.0, 1.0}:
        low, high = share_interval(win_points(scores, baseline), groups)
        interval: tuple[float, float] | None = 2 * low - 1, 2 * high - 1
    else:
        interval = mean_interval(gains, groups)
    return math.fsum(gains) / len(gains), interval


def length_controlled(
    scores: Sequence[float],
    baseline: Sequence[float],
    length_difference: Sequence[float],
    groups: Sequence[Hashable] | None = None,
) -> tuple[float, tuple[float, float]] | None:
    """Return the win rate expected at equal answer lengths and its 95 % interval; None if it would be extrapolated.

    `length_difference` is by how much our answer is longer, row by row. Dubois et al. 2024 (arXiv 2404.04475), section
    3: the preference is regressed on the length difference d, P(win) = logistic(a + b tanh(d / std d)), a tie counting
    half, and d is set to 0, which leaves logistic(a). Their term for the difficulty of a prompt is omitted: it needs
    several models on the same prompts. They shrink b by an L1 penalty chosen by cross-validation; here it has Gelman et
    al.'s default prior (2008, Annals of Applied Statistics 2(4), sections 2-3: Cauchy of scale 2.5, fitted by their
    EM), which needs no random draws. The interval is that of a, by the delete-one-cluster jackknife of its influence.

    It is extrapolated if fewer than FEWEST_SIDE of the rows have an answer that is at most, or at least, as long. If
    all lengths are equal, or one side wins every row, lengths explain nothing: returns the plain rate with its interval
    of `win_rate`.
    """
    import numpy as np
    from scipy.special import expit

    differences = np.asarray(length_difference, dtype=np.float64)
    if min((differences >= 0).mean(), (differences <= 0).mean()) < FEWEST_SIDE:
        return None
    points = np.asarray(win_points(scores, baseline))
    n = len(differences)
    clusters = Clusters.of(n, groups)
    if np.ptp(differences) == 0 or points.sum() in (0, n) or len(clusters.sizes) == 1:
        return float(points.mean()), share_interval(points.tolist(), groups)
    a, influence = _logistic_intercept(np.tanh(differences / differences.std()), points)
    half = clusters.quantile * math.sqrt(float((clusters.deviations(influence) ** 2).sum()))
    return float(expit(a)), (float(expit(a - half)), float(expit(a + half)))


def _logistic_intercept(x: Any, y: Any) -> tuple[float, Any]:
    """Return a of P(y) = logistic(a + b x) by Newton, and each row's influence on it; b has the prior of CAUCHY."""
    import numpy as np
    from scipy.special import expit

    a = b = 0.0
    for _ in range(MAX_ITERATIONS):
        precision = 2 / (CAUCHY**2 + b * b)  # E step: a Cauchy is a normal of unknown variance
        rate = expit(a + b * x)
        weight = rate * (1 - rate)
        residual = y - rate
        slope = np.stack([residual, residual * x])  # of the log-likelihood, row by row
        bend = np.array([[weight.sum() + 1e-9, weight @ x], [weight @ x, weight @ x**2 + precision]])
        step_a, step_b = np.linalg.solve(bend, slope.sum(axis=1) - [0.0, precision * b])
        damping = 2 / max(2, abs(step_a), abs(step_b))  # nearly all rows may be wins
        before = expit(a)
        a = a + damping * step_a
        b = b + damping * step_b
        if abs(expit(a) - before) < TOLERANCE:
            break
    influence = len(x) * np.linalg.solve(bend, slope)[0]
    return a, influence - influence.mean()


def selection_weights(scores: Mapping[Any, Sequence[float]], groups: Sequence[Hashable] | None = None) -> Any:
    """Return how often each candidate is the best on other rows, (rows, candidates): rows sum to 1.

    `scores`: each candidate's, row by row; the first of equal ones is the best. The groups are dealt into FOLDS, and a
    row counts for the candidate with the highest mean of the other folds, over SPLITS deals. So a mean over rows and
    candidates with these weights is that of a selected candidate, without the bias of the selection on the same rows
    (cross-validation, Stone 1974, Journal of the Royal Statistical Society B 36(2)).
    """
    import numpy as np

    table = np.asarray(list(scores.values()), dtype=np.float64).T
    clusters = Clusters.of(len(table), groups)
    sums = clusters.sums(table)
    count = len(clusters.sizes)
    weights = np.zeros((count, table.shape[1]))
    rng = np.random.default_rng(0)
    rows = np.arange(count)
    for _ in range(SPLITS):
        fold = rng.permutation(count) % FOLDS
        parts = np.zeros((FOLDS, table.shape[1]))
        np.add.at(parts, fold, sums)
        best = (parts.sum(axis=0) - parts).argmax(axis=1)
        weights[rows, best[fold]] += 1
    return weights[clusters.index] / SPLITS


def without_bias(value: float, bounds: Sequence[float] | None, bias: float) -> tuple[float, list[float] | None]:
    """Return a mean without its selection bias, and its interval. It is wider: the bias is known to about its size."""
    mean = value - bias
    if bounds is None:
        return mean, None
    low, high = bounds
    return mean, [mean - math.hypot(low - value, bias), mean + math.hypot(high - value, bias)]


def within_noise(scores: Mapping[Any, Sequence[float]], groups: Sequence[Hashable] | None = None) -> list[Any]:
    """Return the candidates that may be as good as the best one; all others are significantly worse.

    `scores`: each candidate's, row by row. Multiple comparisons with the best (Hsu 1981, Annals of Statistics 9(5)): at
    95 %, no candidate as good as the best is excluded, however many there are. The critical values come from a
    bootstrap over the groups of rows of all candidates together (White 2000, Econometrica 68(5)).
    """
    import numpy as np
    from scipy.special import stdtrit

    table = np.asarray(list(scores.values()), dtype=np.float64).T
    means = table.mean(axis=0)
    clusters = Clusters.of(len(table), groups)
    k = len(means)
    n = len(clusters.sizes)
    if n < 2:
        return list(scores)  # one prompt has no variance
    drawn = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=RESAMPLES)
    # small samples: correct the bootstrap's standard deviation, and replace normal by Student's t tails
    level = 1 - 0.05 / max(2, k)
    freedom = n - 1
    widening = math.sqrt(n / freedom) * float(stdtrit(freedom, level)) / NormalDist().inv_cdf(level)
    noise = drawn @ clusters.sums(table - means) / len(table) * widening
    bounds = np.quantile(noise.max(axis=1)[:, None] - noise, 0.95, axis=0)
    gaps = means.max() - means
    return [name for name, gap, bound in zip(scores, gaps, bounds, strict=True) if gap <= bound]


def with_interval(value: float, bounds: Sequence[float] | None, *, sign: str = "") -> str:
    """Return a value as text for reports, with its 95 % interval if there is one; `sign` "+" marks positive values."""
    numbers = [f"{number:{sign}.3f}" for number in (value, *(bounds or ()))]
    return f"{numbers[0]} [{numbers[1]}, {numbers[2]}]" if bounds else numbers[0]


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
    n = len(values)
    steps = _differences(values)
    return _student(2 * (n - 1) ** 2 / (3 * n - 4)) * math.sqrt(share * fmean(step * step for step in steps) / 2)


def _student(freedom: float, searched: int = 1) -> float:
    """Return Student's t quantile for `searched` simultaneous 95 % intervals (Bonferroni)."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 1 - 0.025 / searched))


def student_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return Student's 95 % interval of the mean of independent values, e.g. of seeds; None of fewer than two."""
    n = len(values)
    if n < 2:
        return None
    half = _student(n - 1) * stdev(values) / math.sqrt(n)
    return fmean(values) - half, fmean(values) + half


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
    head = values[: max(1, len(values) // 10)]
    tail = last_quarter(values)
    return fmean(tail) - fmean(head), noise(values, 1 / len(head) + 1 / len(tail))


def rose_again(values: Sequence[float]) -> bool:
    """Return True if the last of at least FEWEST values is above the lowest by more than noise.

    The noise is that of second differences, which a slow bend hardly affects: sum d^2 / (6 (n - 2)), with
    18 (n - 2) / 35 degrees of freedom (Gasser et al. 1986, Biometrika 73(3)). Corrected for the search of the lowest.
    """
    bends = _differences(_differences(values))
    half = _student(18 * len(bends) / 35, searched=len(values) - 1)
    return values[-1] - min(values) > half * math.sqrt(2 * fmean(bend * bend for bend in bends) / 6)
