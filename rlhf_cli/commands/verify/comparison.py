"""The quantities of one update, and their differences between two computations."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_cli.commands.verify.trace import Quantities

TOLERANCE = 1e-6
FLOOR = 1e-3  # least denominator of a relative difference
ZERO = 1e-9  # smaller values are rounding errors
BY_COUNT = ("response tokens",)  # ids: the number that differ


@dataclass(frozen=True)
class Quantity:
    """A quantity of the update, with its largest absolute difference in three comparisons.

    A difference is None if that comparison does not have the quantity.
    """

    name: str
    count: int
    largest: float
    recorded: float | None  # the run's files against the trainer now
    float64: float | None  # the trainer against the reference, both in float64
    rounding: float | None  # the trainer in the run's dtype against the float64 reference

    def relative(self, difference: float | None) -> float:
        """Return a difference divided by the quantity's largest value, or by FLOOR if that is larger."""
        if not difference or self.name in BY_COUNT or "unexplained" in self.name:
            return difference or 0.0
        scale = self.largest if self.name.endswith(", change") else max(self.largest, FLOOR)
        return difference / scale if scale else math.inf

    @property
    def error(self) -> float:
        """Return the relative float64 difference, which decides if the quantity agrees."""
        return self.relative(self.float64)


def difference(name: str, values: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference, or the number of differing ids; inf for nan or different shapes."""
    if values.shape != expected.shape:
        return math.inf
    if name in BY_COUNT:
        return float((values != expected).sum())
    deviation = (values - expected).abs()
    return _largest(torch.where(torch.isnan(deviation), math.inf, deviation))


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if len(values) else 0.0


def compare(
    reference: Quantities, float64: Quantities, native: Quantities | None = None, recorded: Quantities | None = None
) -> list[Quantity]:
    """Return the comparison of each quantity, in the order in which an update computes them.

    `float64` is the trainer in float64, `native` the trainer in the run's dtype, `recorded` from the run's files.
    The quantities of `only_rounding` are not compared in float64.
    """
    native = native or {}
    recorded = recorded or {}
    not_compared = {*BY_COUNT, *only_rounding(reference)}

    def between(name: str, values: Quantities, expected: Quantities) -> float | None:
        if name not in values or name not in expected:
            return None
        return difference(name, values[name], expected[name])

    quantities = []
    for name, values in {**reference, **float64, **recorded, **native, **reference}.items():
        quantity = Quantity(
            name,
            count=len(values),
            largest=_largest(values),
            recorded=between(name, recorded, native),
            float64=None if name in not_compared else between(name, float64, reference),
            rounding=between(name, native, reference),
        )
        quantities.append(quantity)
    return quantities


def only_rounding(reference: Quantities) -> dict[str, str]:
    """Return the quantities determined only by rounding in this update, with the reason.

    Two correct implementations may differ in them.
    """
    reasons = {}
    returns = reference.get("returns")
    norms = reference.get("policy/grad_norm", torch.ones(1))
    if returns is not None and returns.std(unbiased=False) <= ZERO * _largest(returns):
        reasons["val/explained_variance"] = "all returns are equal"
    if _largest(reference["advantages"]) < ZERO:
        reason = "all advantages are 0"
        reasons |= {"policy/clipfrac_avg": reason, "policy/clipfrac_avg, each step": reason}
        if _largest(norms) < ZERO:  # no other term of the loss moves the policy either
            prefixes = ("policy", "average", "loss/policy", "val/ratio", "ratio_")
            reasons |= {name: reason for name in reference if name.startswith(prefixes)}
    return reasons


def worst(quantities: Sequence[Quantity]) -> Quantity:
    """Return the quantity with the largest relative float64 difference."""
    return max(quantities, key=lambda quantity: quantity.error)
