"""What a reward function returned, as a list of one value per row."""

import math
import reprlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from numbers import Real
from typing import Any

from rlhf_cli.errors import RLHFError

PER_ROW = "return a list of one number per response"
ALL_ROWS = "it is called once for all rows: take lists, loop over them, and return a list of one number per row"


class RewardFormError(RLHFError):
    """R05 for a function that is called or answers in another form, which no other response would change."""

    def __init__(self, text: str, hint: str) -> None:
        super().__init__("R05", text, hint=hint)


def as_list(result: Any) -> list[Any]:
    """Return the scores of all rows: numbers as Python has them, and whatever else stands in their place.

    Takes what TRL's GRPOTrainer takes, an iterable of numbers, bools, scalars of numpy or tensors, or one tensor or
    array (B,) or (B, 1); and OpenRLHF's dict, of which `rewards` is read. Raises RewardFormError for anything else.
    """
    if isinstance(result, Mapping):
        if "rewards" not in result:
            text = f"returned a dict without `rewards`; its keys: {', '.join(map(str, list(result)[:5])) or 'none'}"
            raise RewardFormError(text, f"{PER_ROW}, or OpenRLHF's dict with `rewards`")
        result = result["rewards"]
    if is_number(result):
        number = reprlib.repr(_python_value(result))
        raise RewardFormError(f"returned {number}, one number for all rows, as a function of one sample does", ALL_ROWS)
    if isinstance(result, str | bytes | set | frozenset) or not isinstance(result, Iterable):
        raise RewardFormError(f"returned {reprlib.repr(result)}", PER_ROW)
    return list(map(_python_value, result))


def is_number(value: Any) -> bool:
    """Return True for a number or bool, also of numpy or in a tensor without dimensions."""
    return isinstance(value, Real) or getattr(value, "ndim", 1) == 0


def is_finite_number(value: Any) -> bool:
    """Return True if a Python value is a real number that fits a float."""
    with suppress(OverflowError):  # an integer above 1.8e308
        return isinstance(value, Real) and math.isfinite(value)
    return False


def _python_value(score: Any) -> Any:
    """Return a scalar of numpy, or the only number of a tensor, as a Python value; all else unchanged."""
    if not hasattr(score, "tolist"):
        return score
    value = score.tolist()
    return value[0] if isinstance(value, list) and len(value) == 1 else value
