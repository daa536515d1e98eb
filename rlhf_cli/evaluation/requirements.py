"""Requirements of eval.yaml on the results of an evaluation. Torch-free: `rlhf run` and `rlhf status` check them."""

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from rlhf_cli.config.eval import COMPARISON
from rlhf_cli.errors import Problem, RLHFError
from rlhf_cli.jsonl import is_number
from rlhf_cli.runs.layout import REPORT
from rlhf_cli.runs.report import Report
from rlhf_cli.trees import at

OPERATORS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "==": operator.eq}


class Requirement(NamedTuple):
    """A requirement as text, whether the report meets it, and the keys that there are if it has no number."""

    text: str
    is_met: bool
    hint: str | None = None


def requirements(report: Report, require: Mapping[str, str]) -> Iterator[Requirement]:
    """Yield each of `eval.require`, beside what the report has."""
    contents = report.to_json()
    for key, condition in require.items():
        value = at(contents, key)
        if is_number(value):
            yield Requirement(f"{key} is {value:.4g}, required {condition.strip()}", _holds(value, condition))
        else:
            yield Requirement(f"{key} is not a number in {REPORT}", False, hint=_known_keys(contents, key))


def check_requirements(report: Report, require: Mapping[str, str], *, where: Callable[[str], str]) -> None:
    """Compare a report with `eval.require`: {dotted key of report.json: comparison, such as ">= 0.6"}.

    `where` gives the location of a config key. Raises R06 with a problem per requirement that fails or has no number in
    the report.
    """
    location = where("eval.require")
    problems = []
    for each in requirements(report, require):
        if not each.is_met:
            problems.append(Problem("R06", each.text, location, each.hint))
    if problems:
        raise RLHFError.from_problems(problems)


def _holds(value: float, condition: str) -> bool:
    match = COMPARISON.fullmatch(condition.strip())
    assert match, "the config checks the form of a requirement"
    return bool(OPERATORS[match[1]](value, float(match[2])))


def _known_keys(contents: Mapping[str, Any], key: str) -> str:
    """Return the keys of the innermost table on the way to a key."""
    while key and not isinstance(at(contents, key), Mapping):
        key = key.rpartition(".")[0]
    table = at(contents, key) if key else contents
    return f"{key or REPORT} has the keys {', '.join(table)}"
