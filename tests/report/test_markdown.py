"""The summary of runs as Markdown."""

import re
from pathlib import Path

import pytest
from report_run import report, write_run
from run_cli import is_one_error, rlhf

from rlhf_cli.report import markdown


def columns_of(text: str) -> list[set[int]]:
    """Return the numbers of cells in the rows of each table."""
    tables = re.findall(r"(?m)(?:^\|.*\n?)+", text)
    return [{len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()} for table in tables]


def test_a_run_is_a_conclusion_and_tables(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(here / "my_run", evaluation=report(gold=0.63))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(here / "summary.md"))
    Path("summary.md").write_text("before\n")
    result = rlhf("report", "my_run", "--markdown")
    assert result.exit_code == 0 and result.stderr.startswith("my_run/eval/report.html\n"), result.output
    assert result.stdout.startswith("### my\\_run\n\n**") and "PPO beats SFT: win rate 0.630" in result.stdout
    assert "| PPO over SFT | gold | 0.630 " in result.stdout and "| ppo | " in result.stdout
    assert [len(widths) for widths in columns_of(result.stdout)] == [1, 1, 1], "every row has all columns"
    assert Path("summary.md").read_text() == f"before\n{result.stdout}\n"


def test_a_comparison_has_the_mean_and_spread(here: Path) -> None:
    for name, gold in (("a", 0.6), ("b", 0.7)):
        write_run(here / name, evaluation=report(gold=gold))
    text = rlhf("report", "a", "b", "--markdown").stdout
    assert text.startswith("### 2 runs\n\n- **a**: ") and "By gold b (70 %" in text
    assert "| PPO over SFT, gold | 60 % \\[54, 66\\] | 70 % \\[64, 76\\] | 65 % | 7.1 % | 2 |" in text
    assert is_one_error(
        rlhf("report", "a", "--markdown", "--json"), "C11", "--json and --markdown contradict each other"
    )


def test_names_are_shown_as_they_are() -> None:
    assert markdown.escape("a|b\n<img> *x* @me") == r"a\|b \<img\> \*x\* @<!-- -->me"
