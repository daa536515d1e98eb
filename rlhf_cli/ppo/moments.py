"""Mean and deviation of numbers that come in portions."""

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Moments:
    """Mean and spread of all numbers so far."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # summed squared deviations from the mean

    @classmethod
    def of(cls, numbers: Tensor) -> "Moments":
        """Of the numbers (B,)."""
        wide = numbers.double()
        mean = float(wide.mean())
        return cls(len(wide), mean, float(((wide - mean) ** 2).sum()))

    def __add__(self, other: "Moments") -> "Moments":
        """Both together (Chan, Golub and LeVeque 1983, equations 2.1)."""
        total, apart = self.count + other.count, other.mean - self.mean
        return Moments(
            total,
            self.mean + apart * other.count / total,
            self.squares + other.squares + apart**2 * self.count * other.count / total,
        )

    def merged(self, numbers: Tensor) -> "Moments":
        """These and the given numbers (B,) together."""
        return self + Moments.of(numbers)

    @property
    def std(self) -> float:
        """Standard deviation, unbiased; 0 for fewer than two numbers."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0

    @property
    def error(self) -> float:
        """Standard error of the mean; infinite for fewer than two numbers, which tell nothing of their spread."""
        return self.std / math.sqrt(self.count) if self.count > 1 else math.inf
