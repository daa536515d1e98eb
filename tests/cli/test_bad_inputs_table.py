"""Every code that a user may meet is put through the real command line by a test, and has the exit code of its table.

The table is BAD-INPUTS.md in ../shared, where that is there.
"""

import ast
import re
from pathlib import Path

import pytest
from conftest import SHARED

from rlhf_cli.errors import CODES

TESTS = Path(__file__).parents[1]
# What runs the command line, in this process or in another one.
RUNS_THE_COMMAND = {"rlhf", "check", "child", "CliRunner", "refused", "warned", "is_one_error", "run", "launch", "ppo"}
# S01 has no message: hostile texts are printed harmlessly. E05 is tested where a stage starts, without the command, and
# R14 by `stop_and_resume` of tests/helpers/group.py.
EXEMPT = {"S01", "E05", "R14"}


def codes_of_tests() -> set[str]:
    """The codes that tests which run the command line name, in themselves or in a table of their module."""
    codes: set[str] = set()
    for path in TESTS.rglob("test_*.py"):
        if path.samefile(__file__):
            continue
        module = ast.parse(path.read_text(encoding="utf-8"))
        tables = {ast.unparse(node.targets[0]): node for node in module.body if isinstance(node, ast.Assign)}
        for test in [
            node for node in module.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test")
        ]:
            names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
            if names & RUNS_THE_COMMAND:
                texts = [
                    test.name.upper().replace("_", " "),
                    *(ast.unparse(part) for part in (test, *(tables[name] for name in names & tables.keys()))),
                ]
                codes |= set(re.findall(r"\b[CDTMERS]\d\d\b", " ".join(texts)))
    return codes


def rows() -> dict[str, str]:
    """Code -> exit column, of BAD-INPUTS.md."""
    path = SHARED / "BAD-INPUTS.md"
    if not path.is_file():
        pytest.skip("../shared/BAD-INPUTS.md is not there")
    return dict(re.findall(r"(?m)^\| ([A-Z]\d\d) \|.*\| ([^|]+) \|$", path.read_text(encoding="utf-8")))


def test_every_code_is_put_through_the_command_line() -> None:
    assert sorted(CODES.keys() - codes_of_tests() - EXEMPT) == []


def test_exit_codes_are_those_of_the_shared_table() -> None:
    """Of several exit codes the worst one; a code that only warns has 0."""
    assert rows().keys() <= CODES.keys()
    for code, exits in rows().items():
        assert CODES[code].exit == max(map(int, re.findall(r"\b[012]\b", exits)), default=0) or code == "R02", code
    assert CODES["R02"].exit == 1  # "1 after 10"
