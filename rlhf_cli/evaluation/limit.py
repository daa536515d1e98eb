"""The highest score at each KL from SFT, estimated from samples of SFT, and the KL that policies pay beyond it.

The policy that maximises E[score] - beta KL(policy || SFT) is SFT tilted by exp(score / beta) (Rafailov et al. 2023,
arXiv 2305.18290, section 4; Korbak et al. 2022, arXiv 2205.11275). It is estimated by self-normalised importance
sampling (Owen 2013, Monte Carlo theory, methods and examples, chapter 9), whose bias is corrected. Arrays are float64:
P prompts, N samples of SFT for each prompt, M values of 1 / beta.
"""

import math
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlhf_cli import statistics
from rlhf_cli.evaluation.responses import EvalResponses
from rlhf_cli.runs.report import KLLimit, LimitPoint
from rlhf_cli.statistics import Clusters

MIN_EFFECTIVE = 10.0  # mean effective sample size at the end of the curve, which may end before (`holding`)
MAX_BIAS = 0.1  # of the next order of the correction of a score, as a share of half its interval
REST = 3.0  # times the next order is what the correction leaves, at most; intervals are so much wider above
UNEVEN = 0.5  # deviation over prompts of the log of the scores' deviation: above it overheads are only bounded
POINTS = 16  # in the report, after SFT's
STEPS = 4  # values of 1 / beta from one point to the next
END = POINTS * STEPS  # index of the last point
MOST_WEIGHTS = 4_000_000  # in memory at a time
SATURATED = 0.999  # share of the highest KL
SHARPEST = 50.0  # 1 / beta times the deviation of the scores
Array = NDArray[np.float64]
Rows = Array | Sequence[float]  # a value of each prompt
Policies = Mapping[str, tuple[Rows, Rows]]  # name -> score and KL of each prompt


def tilt(scores: Array, inverse_betas: Array | float) -> Array:
    """Return KL, score and effective sample size, (3, P, ...), of SFT tilted by exp(score / beta), for scores (P, N).

    With w = softmax(s / beta) over the samples: sum w log(N w), at most log N; sum w s; and 1 / sum w^2 (Kish 1965,
    Survey sampling). Exact if the samples are all responses, each as often as SFT gives it.
    """
    inverse_betas = np.asarray(inverse_betas)
    logits = np.multiply.outer(scores - scores.max(axis=1, keepdims=True), inverse_betas)
    weights = np.exp(logits)
    log_mean = np.log(weights.mean(axis=1))  # exactly 0 for an infinite beta
    weights /= weights.sum(axis=1, keepdims=True)
    kl = np.maximum((weights * logits).sum(axis=1) - log_mean, 0.0)
    columns = scores.reshape(*scores.shape, *[1] * inverse_betas.ndim)
    return np.stack([kl, (weights * columns).sum(axis=1), 1 / (weights**2).sum(axis=1)])


def thinned(scores: Array, inverse_betas: Array, parts: int) -> Array:
    """Return the mean of `tilt` over as many parts of the samples, (3, P, M); some prompts at a time."""
    prompts, samples = scores.shape
    chunk = max(1, MOST_WEIGHTS // (samples * len(inverse_betas)))
    chunks = [scores[start : start + chunk] for start in range(0, prompts, chunk)]
    total = np.zeros((3, prompts, len(inverse_betas)))
    for part in range(parts):
        share = len(range(part, samples, parts)) / samples
        tilted = [tilt(each[:, part::parts], inverse_betas) for each in chunks]
        total += share * np.concatenate(tilted, axis=1)
    return total


def limit_curve(scores: Array, clusters: Clusters) -> tuple[Array, Array, Array]:
    """Return values of 1 / beta (M,) from 0 in equal steps, KL, score and size, (3, P, M), by each, and a rest (M,).

    The rest is by how much the mean score at a KL may be too low.

    KL and score are without the first order of their bias. The last one is where the curve ends: the highest with a
    mean effective sample size of `min_effective`, or nearly with the highest KL, if the curve holds there.
    """
    spread = float(scores.std(axis=1).mean())
    low = 0.0
    high = SHARPEST / spread if spread > 0 else 0.0
    most = SATURATED * tilt(scores, high)[0].mean()
    for _ in range(50):  # bisection: KL and score rise with 1 / beta, and the size falls
        middle = (low + high) / 2
        kl, _, size = tilt(scores, middle).mean(axis=1)
        if size >= min_effective(scores.shape[1]) and kl <= most:
            low = middle
        else:
            high = middle
    inverse_betas = _equal_steps(low)
    table, rest, holds = _corrected(scores, inverse_betas, clusters)
    if not holds.all():
        inverse_betas = _equal_steps(inverse_betas[np.argmin(holds) - 1])
        table, rest, _ = _corrected(scores, inverse_betas, clusters)
    return inverse_betas, table, rest


def _equal_steps(end: float) -> Array:
    return end / END * np.arange(END + 1, dtype=np.float64)


def _corrected(scores: Array, inverse_betas: Array, clusters: Clusters) -> tuple[Array, Array, NDArray[np.bool_]]:
    """Return KL and score, both corrected, and size by each 1 / beta, (3, P, M), the rest, and what holds, (M,).

    The bias is one half as large with twice the samples, to first order, so it is the difference to the mean over both
    halves of the samples (Quenouille 1956, Biometrika 43). Where prompts differ in spread, the weights of some are on
    few answers, and the correction is too small. The next order, from quarters, shows where: it must change the score
    at a KL by less than MAX_BIAS of half the interval.
    """
    whole = thinned(scores, inverse_betas, 1)
    halves = thinned(scores, inverse_betas, 2)
    quarters = thinned(scores, inverse_betas, 4)
    table = np.concatenate([(2 * whole - halves)[:2], whole[2:]])
    change = 2 * whole - 3 * halves + quarters

    low, high = statistics.mean_intervals(_scores_at(table[0].mean(axis=0), table, inverse_betas), clusters)
    shift = np.abs(_scores_at(0.0, change, inverse_betas).mean(axis=0))
    shift = np.maximum.accumulate(shift)
    holds = shift <= MAX_BIAS * (high - low) / 2 + 1e-9 * scores.std()  # equal prompts have intervals without width
    holds[0] = True
    return table, REST * shift, holds


def min_effective(samples: int) -> float:
    """Return the mean effective sample size at which the curve ends."""
    return min(MIN_EFFECTIVE, samples / 2)


def expected_best_of_n(scores: Array, n: int) -> Array:
    """Return the expected maximum of n of the N scores of each prompt, (P,): unbiased for the best of n.

    The i-th lowest is the maximum of comb(i - 1, n - 1) of the comb(N, n) subsets.
    """
    size = scores.shape[1]
    return np.sort(scores, axis=1) @ [math.comb(i, n - 1) / math.comb(size, n) for i in range(size)]


def needed_kl(
    kl: Array, paths: Array, own: Rows, clusters: Clusters, rest: Array | float = 0.0
) -> tuple[float, tuple[float, float]]:
    """Return the KL at which a path has the mean of `own`, and its 95 % interval; 0 at its start, inf beyond its end.

    `paths`: the score of each prompt at each KL, (P, M), whose mean may be too low by `rest` (M,); `own`: that of the
    policy, (P,). The square root of the KL, which is nearly linear in the score, is interpolated. The interval has each
    KL at which the interval of the mean difference includes 0.
    """
    gaps = paths - np.asarray(own)[:, None]
    low, high = statistics.mean_intervals(gaps, clusters)
    root = np.sqrt(kl)
    return crossing(root, gaps.mean(axis=0)), (crossing(root, high + rest), crossing(root, low))


def crossing(root: Array, gaps: Array) -> float:
    """Return the KL (its `root` is given) from which on gaps (M,) are at least 0."""
    gaps = np.maximum.accumulate(gaps)
    if gaps[-1] < 0:
        return math.inf
    after = int(np.argmax(gaps >= 0))
    if after == 0:
        return 0.0
    part = slice(after - 1, after + 1)
    return float(np.interp(0.0, gaps[part], root[part]) ** 2)


def _scores_at(kl: Array | float, table: Array, inverse_betas: Array) -> Array:
    """Return what each prompt adds to the highest score at a mean KL (M,), (P, M).

    By the envelope theorem it is score - beta (KL of the prompt - mean KL): what one prompt does not use, others can.
    """
    betas = np.divide(1.0, inverse_betas, out=np.zeros_like(inverse_betas), where=inverse_betas > 0)
    scores: Array = table[1] - betas * (table[0] - kl)
    return scores


# report.json


def build_limit(draws: Sequence[EvalResponses], evaluated: Sequence[EvalResponses], penalty: float) -> KLLimit:
    """Return the limit of the scores by `reward` less `penalty` where a response has no end.

    `draws`: SFT's responses, one to each prompt in each. Policies are all those with a KL, and best of n.
    """
    scores = np.array([penalized_scores(draw, penalty) for draw in draws]).T
    selections = {2**k for k in range(1, len(draws).bit_length())}
    policies: dict[str, tuple[Rows, Rows]] = {}
    steps = {}
    for each in evaluated:
        best_of = re.fullmatch(r"best_of_(\d+)", each.model)
        if each.kl is not None and each.model != "sft":
            policies[each.model] = (penalized_scores(each, penalty), each.kl)
            steps[each.model] = each.step
        elif best_of:
            n = int(best_of[1])
            selections.add(n)
            policies[each.model] = (expected_best_of_n(scores, n), [statistics.best_of_n_kl(n)] * len(scores))

    limit = make_limit(scores, policies, sorted(selections), evaluated[0].prompts)
    points = {name: point.with_changes(step=steps.get(name)) for name, point in limit.policies.items()}
    return limit.with_changes(missing_eos_penalty=penalty or None, policies=points)


def penalized_scores(responses: EvalResponses, penalty: float) -> list[float]:
    """Return the scores by `reward`, less `penalty` where a response does not end, as in PPO's objective."""
    rows = zip(responses.scores["reward"], responses.ended, strict=True)
    return [score if ended else score - penalty for score, ended in rows]


def make_limit(
    scores: Array, policies: Policies, selections: Sequence[int], groups: Sequence[Hashable] | None = None
) -> KLLimit:
    """Return the limit for SFT's scores (P, N), best of each n, and what policies pay.

    Intervals are over prompts, those of one of the `groups` together. `score_ci95` of a point is at its KL. With one
    prompt there are no intervals, and so no overheads.
    """
    clusters = Clusters.of(len(scores), groups)
    inverse_betas, table, rest = limit_curve(scores, clusters)
    kl = np.maximum.accumulate(np.maximum(table.mean(axis=1)[0], 0.0))
    paths = _scores_at(table[0].mean(axis=0), table, inverse_betas)
    chosen = {n: expected_best_of_n(scores, n) for n in selections}

    curve = Curve(kl, paths, rest, _mixtures(chosen, table[1, :, 0]), clusters, _is_uneven(scores))
    return KLLimit(
        samples=scores.shape[1],
        min_effective_samples=min_effective(scores.shape[1]),
        points=_curve_points(curve, inverse_betas, table),
        best_of=[_best_of_point(n, rows, clusters) for n, rows in chosen.items()],
        policies={name: curve.place(own_scores, own_kl) for name, (own_scores, own_kl) in policies.items()},
    )


def _best_of_point(n: int, scores: Array, clusters: Clusters) -> LimitPoint:
    score, interval = _mean(scores, clusters)
    return LimitPoint(n=n, kl=statistics.best_of_n_kl(n), score=score, score_ci95=interval)


class Curve(NamedTuple):
    """The limit, at which the KL that a policy needs for its score is looked up."""

    kl: Array  # (M,), rising
    paths: Array  # the highest score of each prompt at each KL, (P, M)
    rest: Array  # (M,), by how much the mean of `paths` may be too low
    mixtures: tuple[Array, Array]  # KL and scores of mixtures of SFT's best of n, which bound it where it has ended
    clusters: Clusters
    is_uneven: bool  # prompts differ so much in the deviation of their scores that the curve is too low

    def place(self, own_scores: Rows, own_kl: Rows) -> LimitPoint:
        """Return KL and score of a policy, and its overhead or a bound of it."""
        kl, kl_interval = _mean(own_kl, self.clusters)
        score, score_interval = _mean(own_scores, self.clusters)
        point = LimitPoint(kl=kl, kl_ci95=kl_interval, score=score, score_ci95=score_interval)

        needed, (low, high) = needed_kl(self.kl, self.paths, own_scores, self.clusters, self.rest)
        _, (_, at_most) = needed_kl(*self.mixtures, own_scores, self.clusters)
        if not math.isfinite(needed):
            reason = "its score is above the end of the curve"
            at_least = min(low, float(self.kl[-1]))
            return _bounded(point.with_changes(no_overhead=reason, needed_kl_at_least=at_least), at_most)

        bounds = [bound if math.isfinite(bound) else None for bound in (low, high)]
        point = point.with_changes(needed_kl=needed, needed_kl_ci95=bounds)
        if low == 0:
            return point.with_changes(no_overhead="its score is not above SFT's by more than noise")
        if self.is_uneven:
            reason = "the deviation of SFT's scores differs too much between prompts"
            return _bounded(point.with_changes(no_overhead=reason), min(high, at_most))
        return point.with_changes(overhead=kl / needed)


def _bounded(point: LimitPoint, at_most: float) -> LimitPoint:
    """Add the bounds of the needed KL and of the overhead, if there are any."""
    if not math.isfinite(at_most):
        return point
    return point.with_changes(needed_kl_at_most=at_most, overhead_at_least=point.kl / at_most)


def _curve_points(curve: Curve, inverse_betas: Array, table: Array) -> list[LimitPoint]:
    """Return SFT's point and POINTS after it; of a curve that has ended at once only SFT's."""
    _, score, size = table.mean(axis=1)
    end = END if inverse_betas[END] > 0 else 0
    points = []
    for m in range(0, end + 1, STEPS):
        low, high = _interval(curve.paths[:, m], curve.clusters)
        points.append(
            LimitPoint(
                beta=1 / float(inverse_betas[m]) if m else None,
                kl=float(curve.kl[m]),
                kl_ci95=_interval(table[0, :, m], curve.clusters),
                score=float(score[m]),
                score_ci95=[low, high + float(curve.rest[m])],
                effective_samples=float(size[m]),
            )
        )
    return points


def _mixtures(chosen: Mapping[int, Array], sft_scores: Array) -> tuple[Array, Array]:
    """Return KL bounds and scores (P, M) of mixtures of SFT's best of two n: at most the KL on a line between them.

    `chosen`: the scores (P,) of best of each n.
    """
    kl = [0.0, *(statistics.best_of_n_kl(n) for n in chosen)]
    scores = np.stack([sft_scores, *chosen.values()], axis=1)
    grid = np.unique(np.concatenate([np.linspace(0.0, kl[-1], 1 + END), kl]))
    return grid, np.stack([np.interp(grid, kl, row) for row in scores])


def _is_uneven(scores: Array) -> bool:
    """Return whether the prompts' deviations of the scores (P, N) differ too much; equal scores have none."""
    deviations = scores.std(axis=1)
    positive = deviations[deviations > 0]
    return len(positive) > 0 and float(np.log(positive).std()) > UNEVEN


def _mean(rows: Rows, clusters: Clusters) -> tuple[float, list[float]]:
    """Return the mean over prompts (P,) and its interval."""
    first = rows[0]
    gains = np.asarray(rows, dtype=np.float64) - first  # exactly 0 if all rows are equal
    return float(first + gains.mean()), [float(first + end) for end in _interval(gains, clusters)]


def _interval(rows: Array, clusters: Clusters) -> list[float]:
    """Return the 95 % interval of the mean over prompts (P,)."""
    return [float(end) for end in statistics.mean_intervals(rows, clusters)]
