"""What a learning curve says: pure arithmetic, no models.

A curve is a list of (score, KL), one an update, as the update's own episodes had them.
"""

import json
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

WINDOW = 5  # updates in a mean
T975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}  # Student's t

Curve = list[tuple[float, float]]


class AtKL(NamedTuple):
    score: float
    reached: bool  # False: the curve ends, or starts, on the other side of that KL, and this is its end or start


def moving_means(curve: Curve, window: int = WINDOW) -> Curve:
    """Means over each `window` updates in a row; of the whole curve where it is shorter."""
    window = min(window, len(curve))
    spans = [curve[start : start + window] for start in range(len(curve) - window + 1)] if curve else []
    return [(mean(score for score, _ in span), mean(kl for _, kl in span)) for span in spans]


def score_at(curve: Curve, kl: float, window: int = WINDOW) -> AtKL:
    """The score at `kl`: on the moving means, by a straight line across the first step that gets from below to `kl`.

    A curve that never gets there counts with its end (it had a lower KL), one that starts beyond with its start.
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


class Paired(NamedTuple):
    mean: float
    low: float
    high: float
    differences: list[float]


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Paired:
    """Mean of ours - theirs over the seeds, and its 95 % t interval with n - 1 degrees of freedom."""
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    centre, n = mean(differences), len(differences)
    half = T975[n - 1] * stdev(differences) / math.sqrt(n) if n > 1 else math.inf
    return Paired(centre, centre - half, centre + half, differences)


def best_of(scores: Sequence[float], n: int) -> float:
    """Expected highest of n draws without return from `scores`: unbiased for the best of n of their source.

    The i-th smallest of m is the highest of a draw in C(i - 1, n - 1) of C(m, n) cases.
    """
    ordered, m = sorted(scores), len(scores)
    if not 1 <= n <= m:
        raise ValueError(f"best of {n} of {m} scores")
    return sum(math.comb(i, n - 1) * score for i, score in enumerate(ordered)) / math.comb(m, n)


def read_lines(path: Path) -> list[dict]:
    """The whole lines of a JSON-lines file; a last line that was cut off is left out, and a missing file is empty."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def cut_back(path: Path, updates: int) -> list[dict]:
    """Keep the lines of the first `updates` updates of a curve's file, once each; returns them."""
    kept = {line["update"]: line for line in read_lines(path) if line["update"] <= updates}
    lines = [kept[update] for update in sorted(kept)]
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    temporary.replace(path)
    return lines


def ours(lines: Iterable[dict]) -> Curve:
    return [(line["objective/scores"], line["objective/kl_k1"]) for line in lines]


def recorded(path: Path) -> dict[int, Curve]:
    """TRL's curves by seed, from lines as trl_curves.jsonl has them, or as trl_ppo.py prints them (`seed` added)."""
    found = {}
    for line in read_lines(path):
        if "seed" not in line:
            raise ValueError(f'{path}: a line without "seed"')
        found[line["seed"]] = [(step["objective/scores"], step["objective/kl"]) for step in line["curve"]]
    return found
