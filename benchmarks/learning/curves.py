"""Statistics of learning curves, without models.

A curve is a list of (score, KL) per update, means of the episodes of the update.
"""

import json
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

WINDOW = 5  # updates averaged
GAIN_EVERY = 20  # updates
T975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}  # Student's t

Curve = list[tuple[float, float]]


class AtKL(NamedTuple):
    score: float
    reached: bool  # False if the curve does not cross the KL: `score` is then its end or start


def moving_means(curve: Curve, window: int = WINDOW) -> Curve:
    """Return the means over each `window` consecutive updates, or over the full curve if it is shorter."""
    window = min(window, len(curve))
    spans = [curve[start : start + window] for start in range(len(curve) - window + 1)] if curve else []
    return [(mean(score for score, _ in span), mean(kl for _, kl in span)) for span in spans]


def score_at(curve: Curve, kl: float, window: int = WINDOW) -> AtKL:
    """Return the score at `kl`, interpolated linearly on the moving means where they first cross it from below.

    If they never reach `kl`, it is the score at the end (at a lower KL); if they start above, that at the start. Raises
    ValueError if the curve is empty.
    """
    points = moving_means(curve, window)
    if not points:
        raise ValueError("the curve is empty")
    for (low, before), (high, after) in pairwise(points):
        if before < kl <= after:
            return AtKL(low + (high - low) * (kl - before) / (after - before), True)
    if points[0][1] >= kl:
        return AtKL(points[0][0], points[0][1] == kl)
    return AtKL(points[-1][0], False)


def gains(curve: Curve, sft_score: float, window: int = 10) -> list[float]:
    """Return (score - SFT's) / root of KL after every GAIN_EVERY updates, of the means of the last `window` of them.

    The highest possible score rises about like the root of KL, so this compares policies at different KL.
    """
    result = []
    for end in range(GAIN_EVERY, len(curve) + 1, GAIN_EVERY):
        score, kl = (mean(values) for values in zip(*curve[end - window : end], strict=True))
        result.append((score - sft_score) / math.sqrt(kl))
    return result


class Paired(NamedTuple):
    mean: float
    low: float
    high: float
    differences: list[float]


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Paired:
    """Return the mean of ours - theirs over n seeds, and its 95 % t interval with n - 1 degrees of freedom."""
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    centre, n = mean(differences), len(differences)
    half = T975[n - 1] * stdev(differences) / math.sqrt(n) if n > 1 else math.inf
    return Paired(centre, centre - half, centre + half, differences)


def best_of(scores: Sequence[float], n: int) -> float:
    """Return the expected maximum of n of the m scores, drawn without replacement: an unbiased best of n.

    The i-th smallest score is the maximum in C(i - 1, n - 1) of C(m, n) draws.
    """
    ordered, m = sorted(scores), len(scores)
    if not 1 <= n <= m:
        raise ValueError(f"best of {n} of {m} scores")
    return sum(math.comb(i, n - 1) * score for i, score in enumerate(ordered)) / math.comb(m, n)


def read_lines(path: Path) -> list[dict]:
    """Return the lines of a JSON Lines file without an incomplete last line; none if the file is missing."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def truncate(path: Path, updates: int) -> list[dict]:
    """Keep one line for each of the first `updates` updates of a curve's file, and return these lines."""
    by_update = {line["update"]: line for line in read_lines(path) if line["update"] <= updates}
    lines = [by_update[update] for update in sorted(by_update)]
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    temporary.replace(path)
    return lines


def ours(lines: Iterable[dict]) -> Curve:
    return [(line["objective/scores"], line["objective/kl_k1"]) for line in lines]


def recorded(path: Path) -> dict[int, Curve]:
    """Return TRL's curves by seed, from the lines of trl_curves.jsonl or of trl_ppo.py with `seed` added.

    Raises ValueError if a line has no seed.
    """
    curves = {}
    for line in read_lines(path):
        if "seed" not in line:
            raise ValueError(f'{path}: a line without "seed"')
        curves[line["seed"]] = [(step["objective/scores"], step["objective/kl"]) for step in line["curve"]]
    return curves
