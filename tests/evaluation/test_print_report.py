"""Terminal output of an evaluation.

Modules: `config/eval.py`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from report_run import report, win, with_policies

from rlhf_cli import terminal
from rlhf_cli.errors import RLHFError
from rlhf_cli.evaluation.print_report import print_report

REPORT = report() | {"warnings": ["warning[R03]: no response ends"]}
REPORT["models"]["ppo"]["kl_ci95"] = [12.0, 12.5]
del REPORT["greedy"]["models"]["sft"]["kl"]


def sample(index: int, model: str, gold: float, text: str, mode: str = "sampled") -> dict[str, Any]:
    row = {"index": index, "prompt": f"prompt {index}", "model": model, "mode": mode, "response": text}
    return {**row, "scores": {"reward": -gold, "gold": gold}}


@pytest.fixture
def printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Print an evaluation and return its output."""

    def show(report: dict[str, Any], *samples: dict[str, Any]) -> str:
        (tmp_path / "report.json").write_text(json.dumps(report))
        (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
        print_report(tmp_path)
        output = capsys.readouterr()
        assert output.err == ""
        return output.out

    return show


def cells(output: str) -> list[list[str]]:
    """The cells of each line; columns are at least two spaces apart."""
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in output.splitlines()]


def test_policies_and_win_rates_with_intervals(printed: Any, tmp_path: Path) -> None:
    rows = cells(printed(REPORT))
    for row in (
        ["model", "KL", "length", "ended", "reward", "gold"],
        ["SFT", "0.00", "21.5", "97%", "0.000 [-0.100, 0.100]", "0.300 [0.200, 0.400]"],
        ["PPO", "12.30 [12.00, 12.50]", "21.5", "97%", "1.500 [1.400, 1.600]", "0.600 [0.500, 0.700]"],
        ["SFT, near-greedy", "-", "21.5", "97%", "0.100 [0.000, 0.200]", "0.310 [0.210, 0.410]"],
        ["SFT, best of 4", "<= 0.64", "21.5", "97%", "0.700 [0.600, 0.800]", "0.500 [0.400, 0.600]"],
        ["PPO over SFT", "reward", "0.950 [0.890, 1.010]", "0.930", "3", "256"],
        ["PPO over SFT", "gold", "0.630 [0.570, 0.690]", "0.610", "3", "256"],
        ["PPO over SFT, near-greedy", "gold", "0.700 [0.640, 0.760]", "0.680", "3", "256"],
        ["PPO over SFT's best of 4", "gold", "0.630 [0.570, 0.690]", "0.610", "3", "256"],
        ["update", "KL", "reward", "gold", "win rate, gold", "length-controlled"],
        ["5", "1.50", "0.500", "0.400 [0.300, 0.500]", "0.630 [0.570, 0.690]", "0.610"],
        ["10", "4.25", "1.000", "0.800 [0.700, 0.900]", "0.630 [0.570, 0.690]", "0.610", "*"],
        ["best of 4", "<= 0.64", "0.700", "0.500 [0.400, 0.600]", "0.630 [0.570, 0.690]", "0.610"],
        ["recommended: update 10 (the highest mean of gold)"],
        ["in report.json: warning[R03]: no response ends"],
    ):
        assert row in rows, row
    assert rows[-2] == [f"report: {tmp_path}/report.json"] and rows[-1][0].startswith("result: PPO beats SFT: win rate")


def test_policies_beside_and_between_sft_and_ppo(printed: Any) -> None:
    evaluation = with_policies()
    rows = cells(printed(evaluation))
    for row in (
        ["dpo", "4.00", "21.5", "97%", "0.900 [0.800, 1.000]", "0.400 [0.300, 0.500]"],
        ["PPO over dpo", "gold", "0.630 [0.570, 0.690]", "0.610", "3", "256"],
        ["dpo over SFT", "gold", "0.630 [0.570, 0.690]", "0.610", "3", "256"],
        ["share 0.3", "2.00", "0.300", "0.500 [0.400, 0.600]", "0.630 [0.570, 0.690]", "0.610"],
        ["dpo", "4.00", "0.900", "0.400 [0.300, 0.500]", "0.630 [0.570, 0.690]", "0.610"],
        ["PPO over dpo by judge gold: 0.630 [0.570, 0.690] at 12.30 nats against 4.00 nats: PPO is better"],
    ):
        assert row in rows, row
    for value, text in ((0.53, "nats, not distinguishable\n"), (0.4, "nats: PPO is worse\n")):
        evaluation["win_rate"]["ppo_vs_dpo"] = {"gold": win(value)}
        assert text in printed(evaluation)
    del evaluation["frontier"]
    rows = cells(printed(evaluation))
    assert ["Policies by their KL from SFT"] in rows
    assert ["PPO", "12.30", "1.500", "0.600 [0.500, 0.700]", "0.630 [0.570, 0.690]", "0.610"] in rows


def test_samples_are_at_the_quartiles_of_the_gain(printed: Any) -> None:
    samples = []
    for index in range(9):  # the gain of prompt i is (i - 2) / 10 by gold; the reward has the opposite order
        samples += [sample(index, "sft", 0.2, f"old {index}"), sample(index, "ppo", index / 10, f"new {index}")]
        samples += [sample(index, "ppo", 0, "near-greedy", mode="greedy"), sample(index, "best_of_4", 1, "best")]
    rows = cells(printed(REPORT, *samples))
    start = rows.index(["Sample responses at the quartiles of PPO's gain by gold"])
    expected = []
    for index in (2, 4, 6):
        expected += [["prompt", f"prompt {index}"], ["SFT", "reward -0.20, gold 0.20", f"old {index}"]]
        expected += [["PPO", f"reward -{index / 10:.2f}, gold {index / 10:.2f}", f"new {index}"]]
    assert rows[start + 2 : start + 11] == expected
    greedy = [sample(0, "sft", 0.1, "old", mode="greedy"), sample(0, "ppo", 0.9, "new", mode="greedy")]
    assert ["PPO", "reward -0.90, gold 0.90", "new"] in cells(printed({**REPORT, "greedy": {}, "best_of": []}, *greedy))


def test_responses_cannot_control_the_terminal(printed: Any) -> None:
    output = printed(
        REPORT, sample(0, "sft", 0.1, "\x1b[31m[link=file:///etc/passwd]red"), sample(0, "ppo", 0.9, "two\nlines")
    )
    assert "\x1b" not in output
    assert "[link=file:///etc/passwd]red" in output and "two\\nlines" in output


def test_estimates_below_zero_have_no_sign_and_the_frontier_fits_the_terminal(printed: Any) -> None:
    first, *others = REPORT["frontier"]
    output = printed({**REPORT, "frontier": [{**first, "kl": -0.001, "kl_ci95": [-0.002, 0.001]}, *others]})
    assert ["5", "0.00"] in [row[:2] for row in cells(output)]
    rates = "0.400 [0.340, 0.460] by reward; 0.550 [0.490, 0.610], undecided by gold"
    assert "win rate over SFT 0.600 [0.540, 0.660], 4.30 nats" in output
    assert f"  win rate over the last policy: {rates}\n" in output
    start = output.index("Frontier: ")
    assert max(map(len, output[start : output.index("over the last")].splitlines())) <= 120


def test_a_damaged_report_is_an_error(tmp_path: Path) -> None:
    for content in (None, '{"n": 1'):
        if content:
            (tmp_path / "report.json").write_text(content)
        with pytest.raises(RLHFError, match="M05"):
            print_report(tmp_path)


def test_an_interval_with_one_half_is_undecided(printed: Any) -> None:
    intervals = (("a", [0.5, 0.7]), ("b", [0.51, 0.7]))
    rates = {name: {**win(0.6), "ci95": interval} for name, interval in intervals}
    output = printed({**REPORT, "win_rate": {"ppo_vs_sft": rates}, "greedy": {}})
    assert "0.600 [0.500, 0.700], undecided" in output and "0.600 [0.510, 0.700]  " in output


def test_a_warning_is_printed_once_per_command(printed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    terminal.warn("R03", "no response ends")
    capsys.readouterr()
    other = "warning[D13]: eval.yaml:3: shared"
    lines = printed({**REPORT, "warnings": [*REPORT["warnings"], other]}).splitlines()
    expected = [f"in report.json: {other}", "in report.json, printed above: R03"]
    assert [line for line in lines if line.startswith("in report.json")] == expected


def test_without_a_comparison_there_is_no_summary(printed: Any) -> None:
    assert "result:" not in printed({**REPORT, "win_rate": {}})


@pytest.mark.parametrize(("low", "chance"), [(0.51, False), (0.5, True), (0.45, True)])
def test_the_accuracy_of_the_reward_model(printed: Any, low: float, chance: bool) -> None:
    output = printed({**REPORT, "reward_model": {"accuracy": 0.6, "ci95": [low, 0.7]}})
    (line,) = [line for line in output.splitlines() if line.startswith("reward model")]
    assert line.startswith(f"reward model: accuracy 0.600 [{low:.3f}, 0.700] on the held-out pairs")
    assert ("no better than chance" in line) == chance
