"""The highest score at each KL from SFT, estimated from samples of SFT, and the KL that policies pay beyond it.

The policy that maximises E[score] - beta KL(policy || SFT) is SFT tilted by exp(score / beta) (Rafailov et al. 2023,
arXiv 2305.18290, section 4; Korbak et al. 2022, arXiv 2205.11275). It is estimated by self-normalised importance
sampling (Owen 2013, Monte Carlo theory, methods and examples, chapter 9). Arrays are float64: P prompts, N samples of
SFT for each prompt, M values of 1 / beta, R resamples.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlhf_cli import statistics
from rlhf_cli.evaluation.summary import EvalResponses, Section

# Mean effective sample size at the end of the curve. The bias of the log of a mean weight is about 1 / (2 x this); it
# puts the curve below the limit, and overheads are understated: by 5 % at 10 for normal scores (docs/evaluation.md).
MIN_EFFECTIVE = 10.0
POINTS, STEPS = 16, 8  # points in the report after SFT's, and values of 1 / beta from one to the next
END, BEYOND = POINTS * STEPS, 32  # index of the last point, and further values that only resampled curves need
SATURATED, SHARPEST = 0.999, 50.0  # share of the highest KL; 1 / beta times the deviation of the scores
Policies = Mapping[str, tuple[Sequence[float], Sequence[float]]]  # name -> score and KL of each prompt


def tilt(scores: Any, inverse_beta: float) -> Any:
    """Return KL, score and effective sample size, (3, P), of SFT tilted by exp(score / beta), for scores (P, N).

    With w = softmax(s / beta) over the samples: sum w log(N w), at most log N; sum w s; and 1 / sum w^2 (Kish 1965,
    Survey sampling). Exact if the samples are all responses, each as often as SFT gives it.
    """
    logits = inverse_beta * (scores - scores.max(axis=1, keepdims=True))
    weights = np.exp(logits)
    log_mean = np.log(weights.mean(axis=1))  # exactly 0 for an infinite beta
    weights /= weights.sum(axis=1, keepdims=True)
    kl = np.maximum((weights * logits).sum(axis=1) - log_mean, 0.0)
    return np.stack([kl, (weights * scores).sum(axis=1), 1 / (weights**2).sum(axis=1)])


def limit_curve(scores: Any) -> tuple[Any, Any]:
    """Return values of 1 / beta (M,) from 0 in equal steps, and the results (3, P, M) of `tilt` by each.

    Number END is the highest with a mean effective sample size of `min_effective`, or nearly with the highest KL.
    """
    spread = scores.std(axis=1).mean()
    low, high = 0.0, SHARPEST / spread if spread > 0 else 0.0
    most = SATURATED * tilt(scores, high)[0].mean()
    for _ in range(50):  # bisection: KL and score rise with 1 / beta, and the size falls
        middle = (low + high) / 2
        kl, _, size = tilt(scores, middle).mean(axis=1)
        low, high = (middle, high) if size >= min_effective(scores.shape[1]) and kl <= most else (low, middle)
    inverse_betas = low / END * np.arange(END + BEYOND + 1)
    return inverse_betas, np.stack([tilt(scores, inverse_beta) for inverse_beta in inverse_betas], axis=2)


def min_effective(samples: int) -> float:
    """Return the mean effective sample size at which the curve ends."""
    return min(MIN_EFFECTIVE, samples / 2)


def expected_best_of_n(scores: Any, n: int) -> Any:
    """Return the expected maximum of n of the N scores of each prompt, (P,): unbiased for the best of n.

    The i-th lowest is the maximum of comb(i - 1, n - 1) of the comb(N, n) subsets.
    """
    size = scores.shape[1]
    return np.sort(scores, axis=1) @ [math.comb(i, n - 1) / math.comb(size, n) for i in range(size)]


def needed_kl(kl: Any, score: Any, target: float) -> float:
    """Return the KL at which a curve (M,) has a score; 0 at or below its start, infinite beyond its end.

    The square root of the KL, which is nearly linear in the score, is interpolated.
    """
    if target <= score[0] or target > score[-1]:
        return 0.0 if target <= score[0] else math.inf
    return float(np.interp(target, score, np.sqrt(kl)) ** 2)


# report.json


def build_limit(
    draws: Sequence[EvalResponses], evaluated: Sequence[EvalResponses], penalty: float, seed: int
) -> Section:
    """Return the section `limit` of report.json, of the scores by `reward` less `penalty` where a response has no end.

    `draws`: SFT's responses, one to each prompt in each. Policies are all those with a KL, and best of n.
    """
    scores = np.array([penalized_scores(draw, penalty) for draw in draws]).T
    policies, steps, selections = {}, {}, {2**k for k in range(1, len(draws).bit_length())}
    for each in evaluated:
        if each.kl is not None and each.model != "sft":
            policies[each.model] = (penalized_scores(each, penalty), each.kl)
            steps[each.model] = {} if each.step is None else {"step": each.step}
        elif match := re.fullmatch(r"best_of_(\d+)", each.model):
            selections.add(n := int(match[1]))
            policies[each.model] = (expected_best_of_n(scores, n), [statistics.best_of_n_kl(n)] * len(scores))
    section = limit_section(scores, policies, sorted(selections), seed)
    section["policies"] = {name: steps.get(name, {}) | row for name, row in section["policies"].items()}
    return {"samples": len(draws), **({"missing_eos_penalty": penalty} if penalty else {}), **section}


def penalized_scores(responses: EvalResponses, penalty: float) -> list[float]:
    """Return the scores by `reward`, less `penalty` where a response does not end, as in PPO's objective."""
    rows = zip(responses.scores["reward"], responses.ended, strict=True)
    return [score if ended else score - penalty for score, ended in rows]


def limit_section(scores: Any, policies: Policies, selections: Sequence[int], seed: int) -> Section:
    """Return {min_effective_samples, points, best_of, policies} for SFT's scores (P, N) and best of each n.

    Intervals are percentile bootstraps over prompts, the same ones for curve and policies. `score_ci95` of a point is
    at its KL.
    """
    prompts, samples = scores.shape
    inverse_betas, tables = limit_curve(scores)
    shares = np.random.default_rng(seed).multinomial(prompts, [1 / prompts] * prompts, statistics.RESAMPLES) / prompts
    kl, score, size = tables.mean(axis=1)[:, : END + 1]
    curves = [*zip(shares @ tables[0], shares @ tables[1], strict=True)]
    kl_bounds = _interval([curve[0][: END + 1] for curve in curves])
    score_bounds = _interval([np.interp(kl, *curve) for curve in curves])
    points = []
    for m in range(0, END + 1 if inverse_betas[END] > 0 else 1, STEPS):
        point = {"beta": 1 / float(inverse_betas[m])} if m else {}
        point |= {"kl": float(kl[m]), "kl_ci95": kl_bounds[m], "score": float(score[m]), "score_ci95": score_bounds[m]}
        points.append({**point, "effective_samples": float(size[m])})
    best_of = []
    for n in selections:
        rows = expected_best_of_n(scores, n)
        best_of.append({"n": n, "kl": statistics.best_of_n_kl(n), **_mean("score", rows, shares)})
    found = {}
    for name, (own_scores, own_kl) in policies.items():
        row = _mean("kl", own_kl, shares) | _mean("score", own_scores, shares)
        targets = zip(curves, shares @ np.asarray(own_scores), strict=True)
        bounds = _interval([needed_kl(*curve, target) for curve, target in targets])
        found[name] = row | _overhead(
            row, needed_kl(kl, score, row["score"]), bounds, points[-1], [points[0], *best_of]
        )
    return {"min_effective_samples": min_effective(samples), "points": points, "best_of": best_of, "policies": found}


def _overhead(row: Section, needed: float, bounds: Sequence[float], end: Section, best_of: list[Section]) -> Section:
    """Return the needed KL and the overhead of a policy, or bounds of them, or the reason why there is no overhead.

    Beyond the end of the curve best of n bounds them: a mixture of two has at most the KL on the line between them.
    """
    if math.isfinite(needed):
        section = {"needed_kl": needed, "needed_kl_ci95": [bound if math.isfinite(bound) else None for bound in bounds]}
        if bounds[0] == 0:
            return section | {"no_overhead": "its score is not above SFT's by more than noise"}
        return section | {"overhead": row["kl"] / needed}
    section = {"no_overhead": "its score is above the end of the curve", "needed_kl_at_least": end["kl"]}
    if row["score"] > best_of[-1]["score"]:
        return section
    at_most = np.interp(row["score"], [each["score"] for each in best_of], [each["kl"] for each in best_of])
    return section | {"needed_kl_at_most": float(at_most), "overhead_at_least": float(row["kl"] / at_most)}


def _mean(name: str, rows: Any, shares: Any) -> Section:
    """Return the mean over prompts (P,) and its interval by resampled shares (R, P) of the prompts."""
    first = rows[0]
    gains = np.asarray(rows) - first  # exactly 0 if all rows are equal
    return {name: float(first + gains.mean()), f"{name}_ci95": _interval(first + shares @ gains)}


def _interval(resampled: Any) -> list[Any]:
    """Return the 95 % percentile interval over the first axis (R, ...), as (..., 2); infinite values are kept."""
    ordered, cut = np.sort(resampled, axis=0), int(0.025 * len(resampled))
    return np.stack([ordered[cut], ordered[-1 - cut]], axis=-1).tolist()
