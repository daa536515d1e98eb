"""The highest score at each KL from SFT, estimated from samples of SFT, and the KL that policies pay beyond it.

The policy that maximises E[score] - beta KL(policy || SFT) is SFT tilted by exp(score / beta) (Rafailov et al. 2023,
arXiv 2305.18290, section 4; Korbak et al. 2022, arXiv 2205.11275). It is estimated by self-normalised importance
sampling (Owen 2013, Monte Carlo theory, methods and examples, chapter 9). Arrays are float64: P prompts, N samples of
SFT for each prompt, M values of 1 / beta.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_cli import statistics
from rlhf_cli.evaluation.summary import EvalResponses, Section

# Mean effective sample size at the end of the curve. The bias of the log of a mean weight is about 1 / (2 x this); it
# puts the curve below the limit, and overheads are understated: by 5 % at 10 for normal scores (docs/evaluation.md).
MIN_EFFECTIVE = 10.0
POINTS, STEPS = 16, 8  # points in the report after SFT's, and values of 1 / beta from one to the next
END, BEYOND = POINTS * STEPS, 32  # index of the last point, and further values that only resampled curves need
SATURATED, SHARPEST = 0.999, 50.0  # share of the highest KL; 1 / beta times the deviation of the scores
Policies = Mapping[str, tuple[Sequence[float], Sequence[float]]]  # name -> score and KL of each prompt


@dataclass(frozen=True)
class Tilted:
    """SFT tilted by exp(score / beta), for each prompt."""

    kl: Any  # (P,), or (P, M) for M values of beta
    score: Any
    effective: Any  # effective sample size (Kish 1965, section 8.2), 1 to N


def tilt(scores: Any, inverse_beta: float) -> Tilted:
    """Return sum w log(N w), sum w s and 1 / sum w^2 for scores s (P, N), with w = softmax(s / beta).

    The KL is at most log N. It is exact if the samples are all responses, each as often as SFT gives it.
    """
    import numpy as np

    logits = inverse_beta * (scores - scores.max(axis=1, keepdims=True))
    weights = np.exp(logits)
    log_mean = np.log(weights.mean(axis=1))  # exactly 0 for an infinite beta
    weights /= weights.sum(axis=1, keepdims=True)
    kl = np.maximum((weights * logits).sum(axis=1) - log_mean, 0.0)
    return Tilted(kl, (weights * scores).sum(axis=1), 1 / (weights**2).sum(axis=1))


def limit_curve(scores: Any) -> tuple[Any, Tilted]:
    """Return values of 1 / beta (M,) from 0 in equal steps, and SFT tilted by each.

    Number END is the highest with a mean effective sample size of `min_effective`, or that nearly reaches the highest
    KL.
    """
    import numpy as np

    spread = scores.std(axis=1).mean()
    low, high = 0.0, SHARPEST / spread if spread > 0 else 0.0
    bound, most = min_effective(scores.shape[1]), SATURATED * tilt(scores, high).kl.mean()
    for _ in range(50):  # bisection: the size falls and the KL rises with 1 / beta
        middle = (low + high) / 2
        tilted = tilt(scores, middle)
        inside = tilted.effective.mean() >= bound and tilted.kl.mean() <= most
        low, high = (middle, high) if inside else (low, middle)
    inverse_betas = low / END * np.arange(END + BEYOND + 1)
    each = [tilt(scores, inverse_beta) for inverse_beta in inverse_betas]
    columns = (np.stack([getattr(one, name) for one in each], axis=1) for name in ("kl", "score", "effective"))
    return inverse_betas, Tilted(*columns)


def min_effective(samples: int) -> float:
    """Return the mean effective sample size at which the curve ends."""
    return min(MIN_EFFECTIVE, samples / 2)


def expected_best_of_n(scores: Any, n: int) -> Any:
    """Return the expected maximum of n of the N scores of each prompt, (P,): unbiased for the best of n.

    The i-th lowest is the maximum of comb(i - 1, n - 1) of the comb(N, n) subsets.
    """
    import numpy as np

    size = scores.shape[1]
    return np.sort(scores, axis=1) @ [math.comb(i, n - 1) / math.comb(size, n) for i in range(size)]


def needed_kl(kl: Any, score: Any, target: float) -> float:
    """Return the KL at which a curve (M,) has a score; 0 at or below its start, infinite beyond its end.

    The square root of the KL, which is nearly linear in the score, is interpolated.
    """
    import numpy as np

    if target <= score[0]:
        return 0.0
    return math.inf if target > score[-1] else float(np.interp(target, score, np.sqrt(kl)) ** 2)


# report.json


def build_limit(
    draws: Sequence[EvalResponses], evaluated: Sequence[EvalResponses], penalty: float, seed: int
) -> Section:
    """Return the section `limit` of report.json, of the scores by `reward` less `penalty` where a response has no end.

    `draws`: SFT's responses, one to each prompt in each. Policies are all those with a KL, and best of n.
    """
    import numpy as np

    scores = np.array([penalized_scores(draw, penalty) for draw in draws]).T
    policies, steps, selections = {}, {}, {2**k for k in range(1, len(draws).bit_length())}
    for each in evaluated:
        if each.kl is not None and each.model != "sft":
            policies[each.model] = (penalized_scores(each, penalty), each.kl)
            steps |= {each.model: {"step": each.step}} if each.step is not None else {}
        elif each.model.startswith("best_of_"):
            selections.add(n := int(each.model.removeprefix("best_of_")))
            policies[each.model] = (expected_best_of_n(scores, n), [statistics.best_of_n_kl(n)] * len(scores))
    section = limit_section(scores, policies, sorted(selections), seed)
    section["policies"] = {name: steps.get(name, {}) | row for name, row in section["policies"].items()}
    return {"samples": len(draws), **({"missing_eos_penalty": penalty} if penalty else {}), **section}


def penalized_scores(responses: EvalResponses, penalty: float) -> list[float]:
    """Return the scores by `reward`, less `penalty` where a response does not end: PPO's objective has it too."""
    return [
        score if ended else score - penalty
        for score, ended in zip(responses.scores["reward"], responses.ended, strict=True)
    ]


def limit_section(scores: Any, policies: Policies, selections: Sequence[int], seed: int) -> Section:
    """Return {min_effective_samples, points, best_of, policies} for SFT's scores (P, N) and best of each n.

    Intervals are percentile bootstraps over prompts, the same ones for curve and policies. `score_ci95` of a point is
    at its KL.
    """
    import numpy as np

    prompts, samples = scores.shape
    inverse_betas, tilted = limit_curve(scores)
    shares = np.random.default_rng(seed).multinomial(prompts, [1 / prompts] * prompts, statistics.RESAMPLES) / prompts
    kl, score, effective = (table.mean(axis=0)[: END + 1] for table in (tilted.kl, tilted.score, tilted.effective))
    curves = [*zip(shares @ tilted.kl, shares @ tilted.score, strict=True)]
    kl_bounds = _interval(np.array([curve[0] for curve in curves]))
    score_bounds = _interval(np.array([np.interp(kl, *curve) for curve in curves]))
    points = []
    for m in range(0, len(kl) if inverse_betas[END] > 0 else 1, STEPS):
        beta = {"beta": float(1 / inverse_betas[m])} if m else {}
        point = {"kl": kl[m], "kl_ci95": kl_bounds[m], "score": score[m], "score_ci95": score_bounds[m]}
        points.append({**beta, **_plain(point), "effective_samples": float(effective[m])})
    best_of = []
    for n in selections:
        rows = expected_best_of_n(scores, n)
        mean = {"score": rows.mean(), "score_ci95": _interval(shares @ rows)}
        best_of.append({"n": n, "kl": statistics.best_of_n_kl(n), **_plain(mean)})
    found = {}
    for name, (own_scores, own_kl) in policies.items():
        resampled = shares @ np.asarray(own_scores)
        row = {"kl": np.mean(own_kl), "kl_ci95": _interval(shares @ np.asarray(own_kl))}
        row = _plain(row | {"score": np.mean(own_scores), "score_ci95": _interval(resampled)})
        needs = [needed_kl(*curve, target) for curve, target in zip(curves, resampled, strict=True)]
        needed = needed_kl(kl, score, row["score"])
        if math.isfinite(needed):
            found[name] = row | _overhead(row["kl"], needed, _interval(np.array(needs)))
        else:
            found[name] = row | _beyond(row, points, best_of)
    return {"min_effective_samples": min_effective(samples), "points": points, "best_of": best_of, "policies": found}


def _overhead(paid: float, needed: float, bounds: Any) -> Section:
    """Return {needed_kl, needed_kl_ci95}, and the overhead or the reason why there is none."""
    low, high = (float(bound) if math.isfinite(bound) else None for bound in bounds)
    section: Section = {"needed_kl": needed, "needed_kl_ci95": [low, high]}
    if low == 0:
        return section | {"no_overhead": "its score is not above SFT's by more than noise"}
    return section | {"overhead": paid / needed}


def _beyond(row: Section, points: list[Section], best_of: list[Section]) -> Section:
    """Return bounds of the needed KL of a policy whose score is above the end of the curve.

    Best of n gives the upper one: a mixture of two of them has at most the KL on the line between them.
    """
    import numpy as np

    section: Section = {"no_overhead": "its score is above the end of the curve"}
    section["needed_kl_at_least"], line = points[-1]["kl"], [points[0], *best_of]
    if row["score"] <= line[-1]["score"]:
        at_most = float(np.interp(row["score"], [each["score"] for each in line], [each["kl"] for each in line]))
        section |= {"needed_kl_at_most": at_most, "overhead_at_least": row["kl"] / at_most}
    return section


def _interval(resampled: Any) -> Any:
    """Return the 95 % percentile interval over the first axis (R, ...), as (..., 2); infinite values are kept."""
    import numpy as np

    ordered, cut = np.sort(resampled, axis=0), int(0.025 * len(resampled))
    return np.stack([ordered[cut], ordered[-1 - cut]], axis=-1)


def _plain(section: Section) -> Section:
    """Return a section with Python floats and lists in place of arrays."""
    return {key: value.tolist() for key, value in section.items()}
