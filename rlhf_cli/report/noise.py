"""What chance alone does to a series of numbers, from one update or evaluation to the next."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

FEWEST = 8  # values from which on noise can be told from a course
ERROR = 0.025  # on each side: two-sided 95 % intervals


@dataclass(frozen=True)
class Spread:
    """The standard deviation of one value by chance, and the degrees of freedom that it was estimated with."""

    sd: float
    freedom: float

    def bound(self, share: float, searched: int = 1) -> float:
        """How far from 0 chance brings a sum of values whose variance is `share` times that of one.

        One side of a 95 % interval; of `searched` such sums together (Bonferroni).
        """
        from scipy.special import stdtrit

        return float(stdtrit(self.freedom, 1 - ERROR / searched)) * self.sd * math.sqrt(share)


def spread(values: Sequence[float]) -> Spread:
    """By the differences of neighbours, which a slow course hardly touches: sum d^2 / (2 (n - 1)).

    Its variance has 2 (n - 1)^2 / (3 n - 4) degrees of freedom (von Neumann et al. 1941, Annals of Mathematical
    Statistics 12(2)).
    """
    n = len(values)
    steps = [after - before for before, after in itertools.pairwise(values)]
    return Spread(math.sqrt(fmean(step * step for step in steps) / 2), 2 * (n - 1) ** 2 / (3 * n - 4))


def smooth_spread(values: Sequence[float]) -> Spread:
    """By second differences, which a course that bends slowly hardly touches: sum d^2 / (6 (n - 2)).

    18 (n - 2) / 35 degrees of freedom (Gasser et al. 1986, Biometrika 73(3)).
    """
    steps = [after - before for before, after in itertools.pairwise(values)]
    bends = [after - before for before, after in itertools.pairwise(steps)]
    return Spread(math.sqrt(fmean(bend * bend for bend in bends) / 6), 18 * len(bends) / 35)


def last_quarter(values: Sequence[float]) -> Sequence[float]:
    """The values that stand for a run's end: one update is of few responses."""
    return values[-max(1, len(values) // 4) :]


def at_the_end(values: Sequence[float], of_the_first: float = 0.0) -> float:
    """How far chance alone may bring the mean of the last quarter, half of its 95 % interval. At least FEWEST values.

    The noise is that of the last half. `of_the_first`: what it is held against is so many times the first value, and
    has that value's noise.
    """
    half = spread(values[len(values) // 2 :])
    return half.bound(1 / len(last_quarter(values)) + of_the_first**2)


def gained(values: Sequence[float]) -> tuple[float, float]:
    """By how much the last quarter is above the first tenth, and half the 95 % interval of that. At least FEWEST."""
    head, tail = values[: max(1, len(values) // 10)], last_quarter(values)
    return fmean(tail) - fmean(head), spread(values).bound(1 / len(head) + 1 / len(tail))


def rose_again(values: Sequence[float]) -> bool:
    """Whether the last of at least FEWEST values is surely above the lowest, which any before it might have been."""
    return values[-1] - min(values) > smooth_spread(values).bound(2, searched=len(values) - 1)
