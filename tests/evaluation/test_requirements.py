"""`eval.require`: which conditions are met, and all that are not."""

import pytest

from rlhf_cli.errors import RLHFError
from rlhf_cli.evaluation.requirements import check_requirements
from rlhf_cli.runs.report import Report
from tests.evaluation.test_print_report import REPORT

GOLD = "win_rate.ppo_vs_sft.gold.value"  # 0.63


def unmet(**require: str) -> list[str]:
    """The problems of requirements, each on GOLD unless its key has dots."""
    try:
        check_requirements(Report.model_validate(REPORT), require, where=lambda key: "eval.yaml:9")
    except RLHFError as error:
        assert error.exit_code == 1 and str(error).startswith("error[R06]: eval.yaml:9: ")
        return [problem.text + (f"; {problem.hint}" if problem.hint else "") for problem in error.problems]
    return []


@pytest.mark.parametrize(
    ("met", "condition"),
    [(">= 0.63", ">= 0.631"), ("<=0.63", "<= 0.629"), ("> 0.62", "> 0.63"), ("< 0.64", "< 0.63"),
     ("== 0.63", "== 0.6"), (" >= 6.3e-1 ", ">= 7e-1")],
)  # fmt: skip
def test_requirements(met: str, condition: str) -> None:
    assert unmet(**{GOLD: met}) == []
    assert unmet(**{GOLD: condition}) == [f"{GOLD} is 0.63, required {condition}"]


def test_all_unmet_requirements_are_reported() -> None:
    require = {GOLD: ">= 0.9", "models.ppo.kl": "<= 13", "models.nobody.kl": "<= 6", "models.ppo": "> 0"}
    assert unmet(**require) == [
        f"{GOLD} is 0.63, required >= 0.9",
        "models.nobody.kl is not a number in report.json; models has the keys sft, ppo",
        f"models.ppo is not a number in report.json; models.ppo has the keys {', '.join(REPORT['models']['ppo'])}",
    ]
