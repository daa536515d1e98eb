"""Requirements of eval.yaml on the results of an evaluation. Torch-free: `rlhf run` and `rlhf status` check them."""

import operator
from collections.abc import Callable, Mapping
from typing import Any

from rlhf_cli.config.eval import COMPARISON
from rlhf_cli.errors import Problem, RLHFError
from rlhf_cli.jsonl import at, is_number

OPERATORS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "==": operator.eq}


def check_requirements(report: Mapping[str, Any], require: Mapping[str, str], *, where: Callable[[str], str]) -> None:
    """Compare a report with `eval.require`: {dotted key: comparison, such as ">= 0.6"}.

    `where` gives the location of a config key. Raises R06 with a problem per requirement that fails or has no number in
    the report, and if `eval.select` found no policy within its bound.
    """
    problems = []
    if "selected" in report and "selected_step" not in report:
        nearest = min(point["kl"] for point in report["frontier"])
        text = f"eval.select selects no policy: {report['selected']['rule']}; the lowest KL is {nearest:.4g} nats"
        hint = "raise kl_max, keep more snapshots (output.snapshots in ppo.yaml), or raise ppo.kl_coef"
        problems.append(Problem("R06", text, where("eval.select"), hint))
    location = where("eval.require")
    for key, condition in require.items():
        match = COMPARISON.fullmatch(condition.strip())
        assert match, "the config checks the form of a requirement"
        value = at(report, key)
        if not is_number(value):
            there = key
            while there and not isinstance(at(report, there), Mapping):
                there = there.rpartition(".")[0]
            hint = f"{there or 'report.json'} has the keys {', '.join(at(report, there) if there else report)}"
            problems.append(Problem("R06", f"{key} is not a number in report.json", location, hint))
        elif not OPERATORS[match[1]](value, float(match[2])):
            problems.append(Problem("R06", f"{key} is {value:.4g}, required {condition.strip()}", location))
    if problems:
        raise RLHFError.from_problems(problems)
