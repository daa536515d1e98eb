"""`rlhf report`: the page follows the run's files, complete or not; and where it is written.

Modules: `runs/read.py`, `runs/settings.py`.
"""

import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from ppo_folder import lines, must_succeed, ppo, rlhf
from report_run import (
    CARD,
    answers,
    begin,
    change,
    configs,
    finish,
    metrics,
    report,
    text_of,
    win,
    words,
    write_report,
    write_run,
)

from rlhf_cli import terminal
from rlhf_cli.files import file_sha256
from rlhf_cli.jsonl import write_jsonl
from rlhf_cli.report import page, tables
from rlhf_cli.report.show import brief, write_beside
from rlhf_cli.runs.read import at_step, read_run

STAGES = ("sft", "reward", "ppo", "eval")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "demo")


def test_the_result_is_in_the_summary(run: Path) -> None:
    text = words(run)
    for part in (
        "PPO beats SFT: win rate 0.630 [0.570, 0.690] on 256 held-out prompts, judged by gold, at a KL of 12.30; "
        "by the reward model 0.950 [0.890, 1.010].",
        "PPO's answers have 21.5 tokens on average, SFT's 21.5; length-controlled win rate 0.610 [0.550, 0.670].",
        "PPO against SFT's best of 4 (chosen by the reward model), judged by gold: win rate 0.630 [0.570, 0.690].",
        "Recommended policy: update 10 (the highest mean of gold), at 4.3 nats; its win rate over the last one is 0.55",
        "PPO over SFT gold 0.630 [0.570, 0.690] 0.610 3 256",
        "SFT gold 0, reward 0, 12 tokens sft says 3",
        "PPO gold \N{MINUS SIGN}1, reward \N{MINUS SIGN}0.5, 13 tokens, KL 3 ppo says 3",
    ):
        assert part in text, part
    assert text.index("warning[R11]: politeness wins") < text.index("No stage is bad") < text.index("PPO beats SFT")


def test_each_number_of_the_page_follows_its_file(run: Path) -> None:
    text = words(run)
    for part in ("Training: 3 to 2.12. Held-out: 2.", "accuracy 75 % [69, 80]", "40 steps", "2 min 5 s"):
        assert part in text, part
    rows = lines(run / "sft/metrics.jsonl")
    rows = [rows[0] | {"loss": 7.5}, *rows[1:], rows[-1] | {"step": 80, "time_s": 250.0}]
    write_jsonl(run / "sft/metrics.jsonl", rows)
    accuracy = {"accuracy": 0.5, "accuracy_ci95": [0.44, 0.56]}
    change(run / "reward/manifest.json", metrics=accuracy, card=CARD | accuracy)
    changed = report(gold=0.2)
    changed["models"]["ppo"]["kl"] = 33.25
    (run / "eval/report.json").write_text(json.dumps(changed))
    config = configs()["ppo"]
    config["ppo"]["kl_coef"] = 0.375
    begin(run / "ppo", config)
    now = words(run)
    for part in (
        "Training: 7.5 to 2.12.", "80 steps", "4 min 10 s", "ppo.kl_coef 0.375 0.05", "at a KL of 33.25",
        "PPO loses to SFT: win rate 0.200", "PPO loses to SFT by gold", "bad damaged: report.json",
        "Accuracy 50 % [44, 56] on the held-out pairs", "it may be no better than chance",
    ):  # fmt: skip
        assert part in now and part not in text, part
    assert re.search(r"eval: report.json has \d+ bytes, \d+ were written", now)


def test_what_ran(run: Path) -> None:
    text = words(run)
    for part in (
        "rollout 20 s 20 % generating responses judge 10 s 10 %",  # 20 updates of 1, 0.5 and 2.5 in 100 seconds
        "update 50 s 50 %", "other 20 s 20 %", "250 tokens/s over 20,000 tokens.",
        "ppo models.reward reward stage of this run ../reward reward-model", "ppo ppo.kl_coef 0.2 0.05",
        "eval judges.gold judges:gold -", "rlhf 0.1.0, torch 2.13.0", "rlhf sft --config demo/sft/config.yaml --fresh",
    ):  # fmt: skip
        assert part in text, part
    assert "ppo.response_length" not in text, "53 is the default"


def test_commands_that_reproduce_the_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder's own configs, unless --set changed a value."""

    def load(_: str, file: Path) -> Any:
        return SimpleNamespace(dump=lambda relative_to: yaml.safe_load(file.read_text()))

    monkeypatch.setattr(tables, "load", load)
    for name in STAGES:
        shutil.copy(run / name / "config.yaml", run / f"{name}.yaml")
    assert tables.commands(read_run(run)) == ["rlhf run demo"]
    assert "as rlhf init or you wrote them: rlhf run demo" in words(run)
    assert tables.commands(at_step(read_run(run), "10")) == ["rlhf run demo"]
    config = yaml.safe_load((run / "ppo.yaml").read_text()) | {"output": {"newer_than_the_run": 1}}
    (run / "ppo.yaml").write_text(yaml.safe_dump(config))
    assert tables.commands(read_run(run)) == ["rlhf run demo"]
    config["ppo"]["kl_coef"] = 0.125
    (run / "ppo.yaml").write_text(yaml.safe_dump(config))
    assert tables.commands(read_run(run))[2] == "rlhf ppo --config demo/ppo/config.yaml --fresh"


def test_rows_of_unchanged_data_are_counted(run: Path) -> None:
    sha256 = file_sha256(run / "data.jsonl")
    begin(run / "sft", configs()["sft"] | {"data": {"train": "../data.jsonl", "eval": "../gone.jsonl"}})
    change(run / "sft/manifest.json", data={"data.train": sha256, "data.eval": "0" * 64})
    assert f"sft data.train ../data.jsonl 3 {sha256[:12]} sft data.eval ../gone.jsonl 000000000000" in words(run)
    (run / "data.jsonl").write_text("{}\n")
    assert f"sft data.train ../data.jsonl changed since {sha256[:12]}" in words(run)


def test_the_head_says_how_many_of_the_prompts_were_used(run: Path) -> None:
    (run / "data.jsonl").write_text('{"prompt": "a"}\n' * 300)
    begin(run / "eval", configs()["eval"] | {"data": {"prompts": "../data.jsonl"}})
    change(run / "eval/manifest.json", data={"data.prompts": file_sha256(run / "data.jsonl")})
    assert "eval prompts 256 of 300 rows" in words(run)


def test_the_report_card_has_flags_and_limits(run: Path) -> None:
    text = words(run)
    for part in (
        "beaten by an empty answer 0.500 [0.410, 0.590]; mean gap +0.10 0.25 flagged",
        "calibration error (ECE) 0.050; confidence 0.74, accuracy 0.75 0.10 within rank correlation",
        "50 of 200 are below 0: the rejected answer scores higher.",
        "over 200 pairs and 128 probed prompts",
        "mean probability of 74.5 %; the accuracy is 75 %.",  # (90 x 0.53 + 110 x 0.92) / 200
        "Its limit is 0.1, or more if there are too few pairs.",
        "the limit is 1 - accuracy, 25 % here, and at least 10 %.",
    ):
        assert part in text, part
    assert "Longer answer preferred:" not in text, "the card lacks it"
    longer = {"preferred": 0.625, "ci95": [0.5, 0.7], "chosen": 0.5, "n": 100}
    probes = {"n": 128, "probes": {"empty": {"beats": 0.1, "ci95": [0.05, 0.2], "margin": -1.0}}}
    card = CARD | {"ece_by_chance": 0.19, "longer_answer": longer, "adversarial": probes}
    change(run / "reward/manifest.json", card=card)
    now = words(run)
    assert "Its limit is 0.1; here 0.19, which chance explains with so few pairs." in now
    assert "by the reward model in 62.5 % of the pairs with different lengths, by the labels in 50 %" in now
    assert "flagged " not in now and "0.25 within" in now
    probes["probes"]["empty"] |= {"beats": 0.3, "ci95": [0.2, 0.42]}
    change(run / "reward/manifest.json", card=card)
    assert "mean gap -1.00 0.25 over, within noise" in words(run)


# Incomplete and damaged runs


@pytest.mark.parametrize("existing", [("sft",), ("sft", "reward"), ("ppo",), ("sft", "reward", "ppo")])
def test_a_run_without_all_stages(run: Path, existing: tuple[str, ...]) -> None:
    for stage in set(STAGES) - set(existing):
        shutil.rmtree(run / stage)
    text = words(run)
    for stage in STAGES:
        assert (f"{stage} incomplete not run yet" in text) == (stage not in existing)
    assert "PPO and SFT are not compared" in text and "PPO beats" not in text and "256 held-out prompts" not in text
    assert ("No update has been made yet." in text) == ("ppo" not in existing)


def test_a_run_in_progress(run: Path) -> None:
    """There is no manifest, and the last line of the log is incomplete."""
    shutil.rmtree(run / "eval")
    (run / "ppo/manifest.json").unlink()
    write_jsonl(run / "ppo/metrics.jsonl", metrics(7))
    with (run / "ppo/metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "objective/scores": 99')
    text = words(run)
    assert "not finished: 7 steps so far" in text and "ppo not finished 7 updates 35 s" in text
    assert "PPO has made 7 updates." in text and "99" not in text and "maximum 0.6 at update 7" in text
    for stage in ("reward", "ppo"):
        shutil.rmtree(run / stage)
    for name in ("metrics.jsonl", "manifest.json"):
        (run / "sft" / name).unlink()
    text = words(run)
    assert "sft incomplete not finished" in text and "No results yet." in text


@pytest.mark.full
@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("ppo/manifest.json", "{", "ppo: manifest.json is missing or not readable"),
        ("ppo/manifest.json", '{"schema": 2, "stage": "ppo"}', "ppo: manifest.json: "),
        ("reward/config.yaml", "a: [\n", "reward: config.yaml is missing or not readable"),
        ("eval/report.json", "[]", "eval: report.json is missing or not readable"),
        ("eval/samples.jsonl", "{", "eval: samples.jsonl is damaged"),
        ("eval/samples.jsonl", '{"index": 1}\n', "eval: samples.jsonl has 1 rows"),
    ],
)
def test_damage_is_reported_and_the_rest_is_shown(run: Path, file: str, content: str, message: str) -> None:
    (run / file).write_text(content)
    text = words(run)
    assert message in text and "Training: 3 to 2.12." in text
    assert bool(re.search("(?<!is )damaged: ", text)) == (not file.endswith("samples.jsonl"))


def test_stages_in_other_folders_are_found_by_manifest_or_config(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    begin(other / "eval", configs()["eval"])
    for name in ("report.json", "samples.jsonl"):
        shutil.copy(run / "eval" / name, other / "eval")
    parents = {
        name: {"path": f"../../demo/{name}", "stage": name, "sha256": f"{name}-model"} for name in ("sft", "ppo")
    }
    finish(other / "eval")
    change(other / "eval/manifest.json", parents=parents)
    text = words(other)
    assert "sft finished (from ../../demo/sft)" in text and "ppo finished (from ../../demo/ppo)" in text
    assert "reward finished (from ../reward)" in text, "PPO's parent, as its manifest names it"
    begun = tmp_path / "begun"
    begin(begun / "ppo", configs()["ppo"] | {"models": {"sft": "../../demo/sft"}})
    assert "sft finished (from ../../demo/sft)" in words(begun)


# --step: another of PPO's policies


@pytest.fixture
def snapshot(run: Path) -> Path:
    """The run with an evaluation of the policy after update 10."""
    evaluation = report()
    evaluation["frontier"][1]["win_rate"] = {"reward": win(0.8), "gold": win(0.74)}
    rows = [{**row, "model": "ppo_step_000010", "response": "halfway"} for row in answers() if row["model"] == "ppo"]
    write_jsonl(run / "eval/samples.jsonl", [*answers(), *rows])
    return write_report(run, evaluation)


@pytest.mark.full
@pytest.mark.parametrize("step", ["10", "recommended"])
def test_a_snapshot_has_its_own_page(snapshot: Path, step: str) -> None:
    result = rlhf("report", snapshot, "--step", step)
    assert (result.exit_code, result.stdout) == (0, f"{snapshot}/eval/report-{step}.html\n"), result.stderr
    text = text_of((snapshot / f"eval/report-{step}.html").read_text())
    assert "PPO beats SFT: win rate 0.600 [0.540, 0.660] on 128 held-out prompts, judged by gold" in text
    assert (
        "at a KL of 4.30" in text and "halfway" in text and "ppo says" not in text and "Run demo at update 10" in text
    )
    assert "over SFT's best of 4" not in text, "only the last policy was compared with it"
    for last in ("last", "20"):
        rlhf("report", snapshot, "--step", last, "--out", snapshot / f"{last}.html")
        assert (snapshot / f"{last}.html").read_text() == page.of_run(read_run(snapshot))


def test_a_snapshot_later_than_the_best_policy_of_a_stopped_run_is_separate(snapshot: Path) -> None:
    """RUN/ppo/model is the best policy, of update 10; the snapshot of update 20 has other results."""
    change(snapshot / "ppo/manifest.json", step=10, model_is="the best step", stopped="step 20: KL")
    evaluation = json.loads((snapshot / "eval/report.json").read_text())
    evaluation["frontier"][2]["win_rate"] = {"reward": win(0.9), "gold": win(0.31)}
    write_report(snapshot, evaluation)
    for step, rate in (("10", "0.630 [0.570"), ("last", "0.630 [0.570"), ("20", "0.310 [0.250")):
        rlhf("report", snapshot, "--step", step, "--out", snapshot / f"{step}.html")
        assert f"SFT: win rate {rate}" in (snapshot / f"{step}.html").read_text().replace("&#39;", "'"), step


def test_a_policy_that_was_not_evaluated_is_rejected(snapshot: Path) -> None:
    for step, code, message in (
        ("7", "M10", "after update 7"),
        ("first", "C07", "--step first: not last, recommended"),
    ):
        result = rlhf("report", snapshot, "--step", step)
        assert result.exit_code == 2 and f"error[{code}]" in result.stderr and message in result.stderr
    evaluation = json.loads((snapshot / "eval/report.json").read_text())
    sft = {"judge": "gold", "rule": "none of 9 policies", "policy": "sft"}
    write_report(snapshot, {**evaluation, "selected_step": None, "selected": sft})
    assert "recommends the SFT model (none of 9" in rlhf("report", snapshot, "--step", "selected").stderr
    change(snapshot / "eval/report.json", selected=None)
    assert "error[M10]" in rlhf("report", snapshot, "--step", "selected").stderr


# Where it is written


def test_the_page_is_written_into_eval_and_its_path_is_printed(run: Path) -> None:
    result = rlhf("report", run)
    assert (result.exit_code, result.stdout) == (0, f"{run}/eval/report.html\n"), "only the path, for scripts"
    assert result.stderr == "report   No stage is bad.\nnext: open it in a browser\n"
    assert (run / "eval/report.html").read_text().startswith("<!DOCTYPE html>")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        assert brief(run)[0] == brief(run / "eval")[0] == "No stage is bad."
    shutil.rmtree(run / "eval")
    assert rlhf("report", run).stdout == f"{run}/report.html\n"
    assert rlhf("report", run / "ppo").stdout == f"{run}/report.html\n", "a stage's folder stands for its run"


def test_out_and_several_runs(run: Path, here: Path) -> None:
    assert rlhf("report", "demo", "--out", "new/page.html").stdout == "new/page.html\n"
    write_run(here / "second")
    result = rlhf("report", "demo", "second")
    assert result.stdout == "report.html\n"
    assert result.stderr == "report   comparison of 2 runs: demo, second\nnext: open it in a browser\n"
    assert "<title>2 runs</title>" in (here / "report.html").read_text()


def test_only_an_own_report_is_replaced(run: Path) -> None:
    target = run / "eval/report.html"
    target.write_text("my notes")
    result = rlhf("report", run)
    assert result.exit_code == 2 and target.read_text() == "my notes"
    text = f"error[C15]: {target} exists and is not a report of rlhf; it is not overwritten\n"
    assert result.stderr == f"{text}hint: choose another path: --out FILE\n"
    target.unlink()
    assert rlhf("report", run).exit_code == 0
    before = target.read_bytes()
    write_jsonl(run / "ppo/metrics.jsonl", metrics(5))
    assert rlhf("report", run).exit_code == 0 and target.read_bytes() != before
    assert not list((run / "eval").glob(".tmp*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gone",), "error[M01]: no such folder gone"),
        (("demo", "gone", "other"), "error[M01]: no such folder other"),
        (("demo", "--out", "demo"), "error[C15]: demo is a folder"),
        (("demo", "--out", "demo/data.jsonl/page.html"), "error[E03]: demo/data.jsonl cannot be written"),
    ],
)
def test_errors_are_one_line_each(
    run: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(run.parent)
    result = rlhf("report", *arguments)
    assert result.exit_code == 2 and message in result.stderr and "Traceback" not in result.stderr
    assert result.stderr.count("error[") == (2 if "other" in arguments else 1), "all are reported together"
    assert not Path("report.html").exists()


def test_equal_files_give_equal_pages(run: Path, tmp_path: Path) -> None:
    first = page.of_run(read_run(run))
    shutil.copytree(run, tmp_path / "elsewhere/demo")
    assert page.of_run(read_run(tmp_path / "elsewhere/demo")) == first and str(tmp_path) not in first


# At the end of an evaluation


@pytest.mark.full
def test_an_evaluation_writes_its_page_outside_its_manifest(run_folder: Path) -> None:
    assert ppo(run_folder).exit_code == 0
    command = ("eval", "-c", run_folder / "eval.yaml", "-s", "eval.best_of=[]")
    result = must_succeed(rlhf(*command))
    target = run_folder / "eval/report.html"
    assert f"page: {target}" in result.stdout
    assert "report.html" not in json.loads((run_folder / "eval/manifest.json").read_text())["files"]
    html = target.read_text()
    rate = json.loads((run_folder / "eval/report.json").read_text())["win_rate"]["ppo_vs_sft"]["short"]["value"]
    assert f"win rate {rate:.3f} [" in html and html.count('<article class="pair"') >= 3 and 'id="tokens"' in html
    must_succeed(rlhf(*command), "finished already")
    target.write_text("my notes")
    must_succeed(rlhf(*command), "warning[R15]: the report of the evaluation could not be written")
    assert target.read_text() == "my notes"


def test_a_page_that_cannot_be_drawn_is_a_warning(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> str:
        raise ValueError("no such\nfont")

    monkeypatch.setattr(page, "of_run", fail)
    write_beside(run / "eval")
    assert not (run / "eval/report.html").exists()
    text = "warning[R15]: the report of the evaluation could not be written: ValueError: no such font"
    assert terminal.emitted_warnings() == [text]


def test_a_page_in_eval_does_not_make_the_stage_stale(run: Path) -> None:
    from rlhf_cli.runs.identity import stage_status

    shutil.rmtree(run / "eval")
    (run / "eval").mkdir()
    (run / "eval/report.html").touch()
    assert stage_status(type("Config", (), {"folder": run / "eval"}), {}).state == "new"
