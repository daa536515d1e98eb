"""The share of wrong labels of pairs, estimated from pairs that were labelled more than once."""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from rlhf_cli.statistics import share_interval

FEWEST = 20  # second labels; of fewer the interval says nothing


class LabelNoise(NamedTuple):
    """The share of wrong labels and its 95 % interval."""

    repeats: int  # labels of a pair that had one
    differ: float  # probability that two labels of a pair differ
    wrong: float
    wrong_ci95: tuple[float, float]

    def __str__(self) -> str:
        low, high = self.wrong_ci95
        return (
            f"two labels of a pair differ in {self.differ:.1%} of {self.repeats} repeats, so {self.wrong:.1%} "
            f"[{low:.1%}, {high:.1%}] of the labels are wrong, if repeats are independent labels and no copies"
        )


def label_noise(labels: Iterable[tuple[Any, Any]]) -> LabelNoise | None:
    """Return the share of wrong labels, each given as (label, the opposite label), of one type that can be ordered.

    Two labels that are each wrong with probability e, independently, differ with p = 2 e (1 - e), so that
    e = (1 - sqrt(1 - 2 p)) / 2: Dawid and Skene's model (1979, Applied Statistics 28(1), 20-28) with one error rate for
    all raters and pairs. A pair with n labels counts n - 1 times with the share of its n (n - 1) / 2 comparisons that
    differ. None with fewer than FEWEST repeats; if none differs: they may be copies; and if more than half differ by
    more than chance, which raters at random do not: equal labels were merged into one.
    """
    counts: dict[Any, list[int]] = defaultdict(lambda: [0, 0])
    for label, opposite in labels:
        counts[min(label, opposite)][label < opposite] += 1

    points: list[float] = []
    groups: list[int] = []
    for number, (first, second) in enumerate(counts.values()):
        total = first + second
        if total > 1:
            points += [2 * first * second / (total * (total - 1))] * (total - 1)
            groups += [number] * (total - 1)
    if len(points) < FEWEST or not any(points):
        return None

    differ = sum(points) / len(points)
    low, high = share_interval(points, groups)
    if low > 0.5:
        return None
    return LabelNoise(len(points), differ, _wrong(differ), (_wrong(low), _wrong(high)))


def _wrong(differ: float) -> float:
    """Return the error rate at which two labels differ with this probability; 1/2 if they are random."""
    return (1 - math.sqrt(max(0.0, 1 - 2 * differ))) / 2
