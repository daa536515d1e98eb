"""Two ways to the same numbers: how far they are apart, quantity by quantity."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

TOLERANCE = 1e-6
FLOOR = 1e-3  # numbers smaller than this are compared as if they were as large
NOTHING = 1e-9
BY_COUNT = ("response tokens",)  # ids: how many differ


@dataclass(frozen=True)
class Quantity:
    """How many numbers, how large the largest, and the largest absolute difference in three comparisons.

    None where a comparison does not have the quantity.
    """

    name: str
    count: int
    largest: float
    recorded: float | None  # the run's own files, against the trainer now
    float64: float | None  # the trainer, against the naive update, both in float64
    rounding: float | None  # the trainer in the run's number format, against the naive update

    def relative(self, difference: float) -> float:
        """A difference as a share of the quantity's largest number, or of FLOOR where that is smaller."""
        if self.name in BY_COUNT or "unexplained" in self.name:
            return difference
        scale = self.largest if self.name.endswith(", change") else max(self.largest, FLOOR)
        return difference / scale if scale else math.inf if difference else 0.0

    @property
    def error(self) -> float:
        """What the quantity is judged by: the float64 difference, relative."""
        return 0.0 if self.float64 is None else self.relative(self.float64)


def difference(name: str, ours: Tensor, theirs: Tensor) -> float:
    """The largest absolute difference, or how many differ; inf where they are not as many, or not numbers."""
    if ours.shape != theirs.shape:
        return math.inf
    if name in BY_COUNT:
        return float((ours != theirs).sum())
    apart = (ours - theirs).abs()
    return float(torch.where(torch.isnan(apart), math.inf, apart).max()) if len(apart) else 0.0


def largest(values: Tensor) -> float:
    return float(values.abs().max()) if len(values) else 0.0


def side_by_side(
    naive: Mapping[str, Tensor],
    wide: Mapping[str, Tensor],
    now: Mapping[str, Tensor] | None = None,
    recorded: Mapping[str, Tensor] | None = None,
) -> list[Quantity]:
    """Quantity by quantity, in the order in which an update makes them.

    `wide` is the trainer in float64, `now` the trainer in the run's number format, `recorded` what the run left.
    What `only_rounding` names is not compared in float64.
    """
    now, recorded = now or {}, recorded or {}
    unjudged = only_rounding(naive)
    found = []
    for name in dict.fromkeys([*naive, *wide, *now, *recorded]):
        shown = next(side[name] for side in (naive, now, wide, recorded) if name in side)
        found.append(
            Quantity(
                name,
                len(shown),
                largest(shown),
                _between(name, recorded, now),
                _between(name, wide, naive) if name not in {*BY_COUNT, *unjudged} else None,
                _between(name, now, naive),
            )
        )
    return found


def only_rounding(naive: Mapping[str, Tensor]) -> dict[str, str]:
    """Quantities that rounding alone decides in this update, and why: two right ways need not agree on them."""
    found = {}
    returns, norms = naive["returns"], naive.get("policy/grad_norm", torch.ones(1))
    if returns.std(unbiased=False) <= NOTHING * largest(returns):
        found["val/explained_variance"] = "all returns are equal"
    if largest(naive["advantages"]) < NOTHING:
        why = "all advantages are 0"
        found |= {"policy/clipfrac_avg": why, "policy/clipfrac_avg, each step": why}
        if largest(norms) < NOTHING:  # nor does anything else move the policy
            found |= {name: why for name in naive if name.startswith(("policy", "loss/policy", "val/ratio", "ratio_"))}
    return found


def _between(name: str, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float | None:
    return difference(name, ours[name], theirs[name]) if name in ours and name in theirs else None


def worst(quantities: list[Quantity]) -> Quantity:
    """The quantity with the largest relative float64 difference."""
    return max(quantities, key=lambda quantity: quantity.error)
