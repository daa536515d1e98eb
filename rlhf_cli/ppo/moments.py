"""Running mean and deviation of scores."""

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Moments:
    """Mean and spread of all scores of the run so far."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # summed squared deviations from the mean

    def merged(self, scores: Tensor) -> "Moments":
        """These and the given scores (B,) together (Chan, Golub and LeVeque 1983, equations 2.1)."""
        count, wide = len(scores), scores.double()
        mean = float(wide.mean())
        total, apart = self.count + count, mean - self.mean
        squares = float(((wide - mean) ** 2).sum())
        return Moments(
            total,
            self.mean + apart * count / total,
            self.squares + squares + apart**2 * self.count * count / total,
        )

    @property
    def std(self) -> float:
        """Standard deviation, unbiased; 0 for fewer than two scores."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0
