"""Verifier `regex`: a pattern, the same for all rows or each row's own, is found in the response."""

import re
from functools import lru_cache

from rlhf_cli.rewards.answers import Column, by_column, compiled, pattern_time_limit
from rlhf_cli.rewards.signature import RewardFn


def regex(
    *, pattern: str | None = None, column: Column | None = None, whole: bool = False, ignore_case: bool = False
) -> RewardFn:
    """Return 1 if the pattern (Python's re) occurs in the response, or with `whole` matches all of it; else 0.

    `.` matches line breaks too. White space around the response is stripped. With `column`, each row has its pattern.
    """
    if (pattern is None) == (column is None):
        raise ValueError("give pattern or column, not both")
    compile_once = lru_cache(maxsize=1024)(lambda text: compiled(text, re.IGNORECASE if ignore_case else 0))

    def score(response: str, text: str) -> float:
        if not isinstance(text, str):
            raise ValueError(f"a pattern must be text, not {text!r:.60}")
        expression = compile_once(text)
        with pattern_time_limit(text, response):
            return float((expression.fullmatch if whole else expression.search)(response.strip()) is not None)

    if pattern is None:
        assert column is not None
        return by_column(column, score)
    compile_once(pattern)
    return lambda prompts, responses: [score(response, pattern) for response in responses]
