"""Comparison of runs: their results, whether win rates differ, curves and settings."""

import re
from pathlib import Path

import pytest
from report_run import begin, change, configs, metrics, report, write_run

from rlhf_cli.jsonl import write_jsonl
from rlhf_cli.report import compare, formats
from rlhf_cli.report.compare import Result
from rlhf_cli.runs.read import read_run
from tests.report.test_page import Reader


def test_results_have_mean_and_spread(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / name, evaluation=report(gold)) for name, gold in zip("abc", (0.6, 0.7, 0.9), strict=True)
    ]
    (folders[2] / "sft/manifest.json").unlink()
    change(folders[0] / "sft/manifest.json", metrics={"eval_loss": 2.0})
    change(folders[1] / "sft/manifest.json", metrics={"eval_loss": 5.0})
    change(folders[2] / "eval/manifest.json", parents={})  # else it is out of date: its SFT is not finished
    rows = {title: cells for title, *cells in compare.results([read_run(folder) for folder in folders])}
    rates = ["60 % [54, 66]", "70 % [64, 76]", "90 % [84, 96]"]
    assert rows["PPO over SFT, gold"] == [*rates, "73.3 %", "15.3 %", 3]  # sqrt((0.1333^2 + 0.0333^2 + 0.1667^2) / 2)
    assert rows["SFT, held-out loss"] == ["2", "5", "-", "3.5", "2.12", 2]
    assert compare.result_row("", [Result(2.0), Result()]) == ["", "2", "-", "2", "-", 1]
    assert rows["reward model, accuracy"][0] == "75 % [69, 80]" and rows["SFT, answers that end"][0] == "97 %"
    assert rows["recommended update"] == ["10", "10", "10", "", "", 3], "a mean of updates is meaningless"
    assert rows["PPO, KL from SFT in nats"][0] == "12.3" and rows["PPO, seconds"][0] == "100"
    assert [formats.number(value) for value in (999.4, 1234, 9999.6)] == ["999", "1,234", "10,000"]


def test_a_comparison_states_if_win_rates_differ(tmp_path: Path) -> None:
    """256 prompts each: a standard error of the difference is 0.042. Of four runs it is the outermost of six pairs."""
    for name, gold in (("a", 0.60), ("b", 0.67), ("c", 0.70), ("d", 0.65)):
        write_run(tmp_path / name, evaluation=report(gold))

    def sentences(*names: str) -> list[str]:
        return list(compare.win_rate_differences(list(names), [read_run(tmp_path / name) for name in names]))

    assert sentences("a", "b")[1] == (
        "By gold b (67 % [61, 73]) and a (60 % [54, 66]) are not distinguishable: "
        "the interval of their difference includes 0."
    )
    assert sentences("c", "a")[1].startswith(
        "By gold c (70 % [64, 76]) and a (60 % [54, 66]) differ by more than chance"
    )
    assert "not distinguishable" in sentences("a", "b", "c", "d")[1], "the same two runs of four"
    begin(tmp_path / "a/eval", configs()["eval"] | {"judges": {"gold": "other:gold"}})
    assert sentences("a", "c")[1].startswith("gold is a different judge in these runs")
    change(tmp_path / "b/ppo/manifest.json", model_sha256="trained again")
    assert sentences("a", "b") == [], "an outdated evaluation is ignored"


@pytest.mark.full
@pytest.mark.usefixtures("figures")
def test_a_comparison_has_curves_and_settings(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name / "demo") for name in ("one", "two")]
    begin(folders[1] / "ppo", configs()["ppo"] | {"seed": 3, "ppo": {"kl_coef": 0.5, "response_length": 53}})
    disagreement = {"objective__disagreement__mine": [0.1 * step for step in range(20)]}
    write_jsonl(folders[1] / "ppo/metrics.jsonl", metrics(objective__scores=[9.0] * 20, **disagreement))
    html = compare.of_runs([read_run(folder) for folder in folders]).page()
    assert Reader(html).tags["script"] == 1
    figure = re.findall(r'<svg [^>]*aria-label="Reward score[^"]*">(.*?)</svg>', html, re.S)[0]
    assert figure.count('-series-one-demo"') == figure.count('-series-two-demo"') == 1
    rows = re.findall(r"<tr data-row>(.*?)</tr>", html.replace("</td>", "|"))
    assert sorted(re.sub(r"<[^>]*>", "", row) for row in rows) == ["ppo|ppo.kl_coef|0.2|0.5|", "ppo|seed|0|3|"]
    assert "At the end: one/demo 1.7; two/demo 9." in html
    assert "Disagreement of the reward models, mine" in html and "At the end: two/demo 1.7." in html
    assert "The runs differ in more than their seed" in html and "<td>finished: good</td>" in html
    assert "<strong>one/demo</strong>: No stage is bad." in html


def test_a_comparison_of_runs_that_have_only_started_and_the_names_of_runs(tmp_path: Path) -> None:
    for name in ("one", "two"):
        begin(tmp_path / name / "sft", configs()["sft"])
    html = compare.of_runs([read_run(tmp_path / name) for name in ("one", "two")]).page()
    assert "No run has made an update yet." in html and "Their configs have the same values." in html
    assert "The runs have the same settings, so the spread is noise" in html
    begin(tmp_path / "two/sft", configs()["sft"] | {"seed": 1})
    assert (
        "The runs differ only in their seed, so"
        in compare.of_runs([read_run(tmp_path / n) for n in ("one", "two")]).page()
    )
    assert compare.short_names([Path("/x/a"), Path("/x/b")]) == ["a", "b"]
    assert compare.short_names([Path("/x/a/demo"), Path("/x/b/demo")]) == ["a/demo", "b/demo"]
    assert compare.short_names([Path("/x/a"), Path("/x/a")]) == ["a (1)", "a (2)"]
