"""Verifier `numeric`: the response's number is the answer."""

import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Annotated, Any

from pydantic import Field

from rlhf_cli.rewards.answers import Column, by_column, extraction, last_match, texts
from rlhf_cli.rewards.signature import RewardFn

# 1,234.5, -$3, 3/4, 2 1/2, 6e-3; a sign after a digit, letter or bracket is a minus between two numbers.
NUMBER = re.compile(
    r"(?<![\w./])(?P<sign>(?<![)\]])[-+])?[$€£]?((?P<whole>\d+) (?=\d+\s?/\s?\d))?"
    r"(?P<value>(\d{1,3}(,\d{3})+(?!\d)|\d+)(\.\d+)?|\.\d+)"
    r"(?P<exponent>[eE][-+]?\d{1,3}\b)?(\s?/\s?(?P<below>\d+)(?!\d|/|[.,]\d))?"
)
MAX_DIGITS = 1000  # a longer number is none


def numeric(
    *,
    column: Column = "answer",
    extract: str | None = None,
    tolerance: Annotated[float, Field(ge=0)] = 0.0,
    latex: bool = False,
) -> RewardFn:
    r"""Return 1 if the response's last number, or the last in what `extract` finds, is that of the column; else 0.

    Numbers are compared exactly, or may differ by `tolerance`. Units, currency and percent signs around them are
    ignored. A column with text has its last number as the answer, as GSM8K's `#### 72`. With `latex`, math_verify reads
    both and decides: formulas, \boxed{}, sets, intervals; `tolerance` does not apply.
    """
    if latex and tolerance:
        raise ValueError("tolerance has no effect with latex")
    find = extraction(extract)
    same = _same_formula() if latex else _same_number(tolerance)

    def score(response: str, value: Any) -> float:
        found = find(response)
        matches = [same(answer, found or "") for answer in texts(value)]  # all: each answer must be read
        return float(found is not None and any(matches))

    return by_column(column, score)


def last_number(text: str) -> Fraction | None:
    """Return the last number in a text, None if there is none or its divisor is 0."""
    last = last_match(NUMBER, re.sub("[\N{MINUS SIGN}\N{EN DASH}]", "-", text))
    if last is None or len(last[0]) > MAX_DIGITS:
        return None
    digits = last["value"].replace(",", "")
    number = Fraction(f"{digits}{last['exponent'] or ''}")
    if last["below"]:
        below = Fraction(last["below"])
        if below == 0:
            return None
        number = Fraction(last["whole"] or 0) + number / below
    return -number if last["sign"] == "-" else number


def _same_number(tolerance: float) -> Callable[[str, str], bool]:
    def same(answer: str, found: str) -> bool:
        expected = last_number(answer)
        if expected is None:
            raise ValueError(f"the answer {answer[:60]!r} has no number")
        number = last_number(found)
        return number is not None and abs(number - expected) <= Fraction(str(tolerance))  # 0.3 is 3/10

    return same


def _same_formula() -> Callable[[str, str], bool]:
    """Raises ModuleNotFoundError without math_verify."""
    import math_verify

    @lru_cache(maxsize=65536)  # milliseconds, in `rlhf check` and for each response to a prompt
    def expected(answer: str) -> list[Any]:
        formula = answer if "$" in answer or "\\boxed" in answer else f"${answer}$"
        parsed: list[Any] = math_verify.parse(formula, fallback_mode="no_fallback")
        if not parsed:
            raise ValueError(f"math_verify cannot read the answer {answer[:60]!r}")
        return parsed

    def same(answer: str, found: str) -> bool:
        return bool(math_verify.verify(expected(answer), math_verify.parse(found)))

    return same
