"""What the verifiers share: columns with right answers, users' patterns, and the answer in a response."""

import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import Parameter, Signature
from typing import Annotated, Any

from pydantic import AfterValidator

from rlhf_cli.errors import RLHFError
from rlhf_cli.rewards.signature import RewardFn
from rlhf_cli.system import CPUTimeExceeded, cpu_time_limit

Call = Callable[..., Any]
MAX_PATTERN_SECONDS = 10.0  # CPU time of a pattern on one response: some patterns take years


def _check_column(name: str) -> str:
    if not name.isidentifier() or name in ("prompts", "responses", "completions", "completion_ids"):
        raise ValueError("must be a name of letters, digits and _, and none that every function gets")
    return name


Column = Annotated[str, AfterValidator(_check_column)]


def by_column(
    column: str, score: Callable[[str, Any], float | None], *, call: Call = map, check: Call | None = None
) -> RewardFn:
    """Return a reward function that calls `score(response, value of the column)` for each row that has a value.

    `score` raises ValueError for a value that it cannot read. `rlhf check` calls `check(value)`, by default `score` of
    an empty response, for each row of the data. `call` is used as `map`.
    """

    def score_row(response: str, value: Any) -> float | None:
        return None if value is None else score(response, value)

    def reward(responses: list[str], **columns: list[Any]) -> list[float | None]:
        return list(call(score_row, responses, columns[column]))

    names = [Parameter(name, Parameter.KEYWORD_ONLY) for name in ("responses", column)]
    reward.__signature__ = Signature(names)  # type: ignore[attr-defined]
    reward.check_value = check or partial(score, "")  # type: ignore[attr-defined]
    return reward


def compiled(pattern: str, flags: int = 0) -> re.Pattern[str]:
    """Compile a user's pattern, where `.` matches line breaks. Raises ValueError."""
    if not pattern:
        raise ValueError("an empty pattern matches everything")
    try:
        return re.compile(pattern, re.DOTALL | flags)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"the pattern {pattern!r} is not a regular expression: {error}") from None


@contextmanager
def pattern_time_limit(pattern: str, text: str) -> Iterator[None]:
    """Context manager for matching a user's pattern: RLHFError R05 after MAX_PATTERN_SECONDS of CPU time."""
    try:
        with cpu_time_limit(MAX_PATTERN_SECONDS):
            yield
    except CPUTimeExceeded:
        problem = f"the pattern {pattern!r} took more than {MAX_PATTERN_SECONDS:g} s on {len(text)} characters"
        raise RLHFError("R05", problem, hint="repeat nothing that repeats itself, as in (a+)+") from None


def extraction(pattern: str | None) -> Callable[[str], str | None]:
    """Return a function that finds the answer in a response: the last match of the pattern, or its first group.

    Without a pattern it is the whole response. None: the pattern does not match.
    """
    if pattern is None:
        return lambda text: text
    expression = compiled(pattern)

    def extract(text: str) -> str | None:
        with pattern_time_limit(pattern, text):
            match = last_match(expression, text)
        return None if match is None else match[min(1, expression.groups)]

    return extract


def last_match(expression: re.Pattern[str], text: str) -> re.Match[str] | None:
    last = deque(expression.finditer(text), maxlen=1)
    return last[0] if last else None


def texts(value: Any) -> list[str]:
    """Return a column's value, or the values of its list, as texts. Raises ValueError for objects."""
    values = value if isinstance(value, list) else [value]
    if any(isinstance(each, dict | list) for each in values):
        raise ValueError(f"a column must have a text, a number or a list of them, not {value!r:.60}")
    return [str(each) for each in values]


def last_code_block(text: str, language: str) -> str:
    """Return the content of the last fenced block in a language, else of the last without one, else the whole text."""
    block = r"^[ \t]*+```[ \t]*+(\w*+)[^\n`]*+\n(.*?)^[ \t]*+```"  # possessive: linear in whatever the response is
    found = re.findall(block, text, re.DOTALL | re.MULTILINE)
    named = [body for name, body in found if re.fullmatch(language, name, re.IGNORECASE)]
    blocks = named or [body for name, body in found if not name]
    return blocks[-1] if blocks else text
