"""Verifier `unit_tests`: the response is Python code that passes the tests of its row."""

import ast
import warnings
from itertools import chain
from typing import Annotated, Any

from pydantic import Field

from rlhf_cli import terminal
from rlhf_cli.rewards.answers import Column, by_column, last_code_block, texts
from rlhf_cli.rewards.sandbox import SandboxError, hides_files, on_all_cpus, passed_tests
from rlhf_cli.rewards.signature import RewardFn


def unit_tests(
    *,
    column: Column = "tests",
    partial: bool = False,
    seconds: Annotated[float, Field(gt=0, le=600)] = 5.0,
    megabytes: Annotated[int, Field(ge=64, le=65536)] = 256,
) -> RewardFn:
    """Return 1 if the response's code passes all tests in the column, a text or a list of them; else 0.

    With `partial`, the share of the list that passes. The code is the response's `last_code_block`. It runs in a
    separate process, as `sandbox.passed_tests` says. Raises ValueError if this machine cannot limit it, and warns
    E01 if it cannot hide files from it.
    """
    try:
        if not hides_files(seconds=seconds, megabytes=megabytes):
            text = "Linux before 5.13, or without Landlock, cannot hide files from the code of a response"
            terminal.warn("E01", f"builtin unit_tests: {text}: it can read all that you can")
    except SandboxError as error:
        raise ValueError(f"this machine cannot limit what the code does: {error}") from None

    def score(response: str, value: Any) -> float | None:
        tests = texts(value)
        passed = passed_tests(last_code_block(response, "py(?:thon)?3?"), tests, seconds=seconds, megabytes=megabytes)
        share = sum(passed) / len(passed) if passed else None
        return share if partial or share is None else float(share == 1)

    return by_column(column, score, call=on_all_cpus, check=_check_tests)


def _check_tests(value: Any) -> None:
    """Check that tests are Python, and do not only define functions or classes. Raises ValueError."""
    body: list[ast.stmt] = []
    try:
        with warnings.catch_warnings(action="ignore"):
            for test in texts(value):
                compile(test, "test", "exec")
                body += ast.parse(test).body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"a test is not Python: {error}") from None
    others = [each for each in body if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    runs = any(isinstance(node, ast.Assert | ast.Call) for node in chain.from_iterable(map(ast.walk, others)))
    if len(others) < len(body) and not runs:
        raise ValueError("the tests only define functions, which nothing calls: all code would pass")
