"""`rlhf report`: what the page says comes from the files, whatever there is of them; and where it is written."""

import json
import re
import shutil
import sys
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from ppo_folder import lines, ppo, rlhf
from report_run import (
    CARD,
    answers,
    begin,
    change,
    configs,
    draws_nothing,
    finish,
    metrics,
    report,
    win,
    words,
    write_run,
)

from rlhf_cli import runs, terminal
from rlhf_cli.commands.report import brief, page, run_tables, write_beside
from rlhf_cli.commands.report.runs import at_step, read_run
from rlhf_cli.jsonl import write_jsonl


@pytest.fixture(autouse=True)
def _unseen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("training") is None:
        draws_nothing(monkeypatch)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "demo")


def test_the_first_sentences_are_the_result(run: Path) -> None:
    said = words(run)
    assert "PPO beats SFT on 63 % [57, 69] of 256 held-out prompts by gold, at 12.3 nats from it." in said
    assert "it wins 95 % [89, 101]" in said
    assert "Its answers have 21.5 tokens on the mean, SFT's 21.5; at equal length it would win 61 % [55, 67]." in said
    assert "Against SFT's best of 4 by the reward model, which needs no training, PPO wins 63 % [57, 69]." in said
    assert "that of update 10, not its last, 20, at 4.25 nats, by the highest mean of gold" in said
    assert "by the highest mean of gold. The last one cannot be told from it." in said
    assert "PPO over SFT, gold 63 % [57, 69] 61 % 3 256" in said and "blue is surely more than half" in said
    assert "SFT reward 0, gold 0, 12 tokens sft says 3" in said, "its KL from itself is no news"
    assert "PPO reward \N{MINUS SIGN}0.5, gold \N{MINUS SIGN}1, 13 tokens, KL 3 ppo says 3" in said
    assert said.index("warning[R11]: politeness wins") < said.index("No stage") < said.index("PPO beats SFT")


def test_each_number_of_the_page_follows_its_file(run: Path) -> None:
    """A file is changed, and what it tells changes on the page."""
    said = words(run)
    for was in ("Training: 3 to 2.12. Held-out: 2.", "right on 75 % [69, 80]", "40 steps", "2 min 5 s"):
        assert was in said, was
    rows = lines(run / "sft/metrics.jsonl")
    write_jsonl(
        run / "sft/metrics.jsonl", [rows[0] | {"loss": 7.5}, *rows[1:], rows[-1] | {"step": 80, "time_s": 250.0}]
    )
    right = {"accuracy": 0.5, "accuracy_ci95": [0.44, 0.56]}
    change(run / "reward/manifest.json", metrics=right, card=CARD | right)
    told = report(gold=0.2)
    told["models"]["ppo"]["kl"] = 33.25
    (run / "eval/report.json").write_text(json.dumps(told))
    config = configs()["ppo"]
    config["ppo"]["kl_coef"] = 0.375
    begin(run / "ppo", config)
    now = words(run)
    for part in ("Training: 7.5 to 2.12.", "80 steps", "4 min 10 s", "ppo.kl_coef 0.375 0.05", "at 33.2 nats from it"):
        assert part in now and part not in said, part
    assert "PPO loses to SFT: it is better on 20 % [14, 26]" in now and "bad damaged: report.json" in now
    assert "PPO loses to SFT by gold" in now and "PPO beats SFT by gold" in said
    assert "Right on 50 % [44, 56] of the held-out pairs" in now and "that may be guessing" in now
    assert re.search(r"eval: report.json has \d+ bytes, \d+ were written", now)


def test_what_ran(run: Path) -> None:
    said = words(run)
    assert "rollout 20 s 20 % writing responses judge 10 s 10 %" in said  # 20 updates of 1, 0.5 and 2.5 in 100 seconds
    assert "update 50 s 50 %" in said and "the rest 20 s 20 %" in said
    assert "250 tokens/s over 20,000 tokens." in said
    assert "ppo models.reward the reward stage ../reward reward-model" in said
    assert "ppo ppo.kl_coef 0.2 0.05" in said and "ppo.response_length" not in said, "53 is the default"
    assert "eval judges.gold judges:gold -" in said
    assert "rlhf 0.1.0, torch 2.13.0" in said and "rlhf sft --config demo/sft/config.yaml --fresh" in said


def test_how_to_make_it_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the configs of its folder, unless --set said something else at the time."""
    monkeypatch.setattr(run_tables, "load", lambda stage, file: SimpleNamespace(dump=lambda relative_to: written(file)))
    for name in ("sft", "reward", "ppo", "eval"):
        shutil.copy(run / name / "config.yaml", run / f"{name}.yaml")
    assert run_tables.commands(read_run(run)) == ["rlhf run demo"]
    assert "In the folder that holds demo : rlhf run demo" in words(run)
    assert run_tables.commands(at_step(read_run(run), "10")) == ["rlhf run demo"], (
        "its name says more than its folder's"
    )
    now = written(run / "ppo.yaml")
    now["output"] = {"newer_than_the_run": 1}
    (run / "ppo.yaml").write_text(yaml.safe_dump(now))
    assert run_tables.commands(read_run(run)) == ["rlhf run demo"]
    now["ppo"]["kl_coef"] = 0.125
    (run / "ppo.yaml").write_text(yaml.safe_dump(now))
    assert run_tables.commands(read_run(run))[2] == "rlhf ppo --config demo/ppo/config.yaml --fresh"


def written(file: Path) -> Any:
    return yaml.safe_load(file.read_text())


def test_rows_of_data_are_counted_where_it_is_what_was_read(run: Path) -> None:
    sha256 = runs.file_sha256(run / "data.jsonl")
    begin(run / "sft", configs()["sft"] | {"data": {"train": "../data.jsonl", "eval": "../gone.jsonl"}})
    change(run / "sft/manifest.json", data={"data.train": sha256, "data.eval": "0" * 64})
    assert f"sft data.train ../data.jsonl 3 {sha256[:12]} sft data.eval ../gone.jsonl 000000000000" in words(run)
    (run / "data.jsonl").write_text("{}\n")
    assert f"sft data.train ../data.jsonl changed since {sha256[:12]}" in words(run)


def test_the_report_card_marks_what_is_flagged(run: Path) -> None:
    said = words(run)
    assert "beaten by an empty answer 0.500 [0.410, 0.590]; mean gap +0.10 0.25 flagged" in said
    assert "calibration error (ECE) 0.050; 0.74 claimed right, 0.75 are 0.10 score with length" in said, (
        "within its limit"
    )
    assert "50 of 200 lie below 0: there the rejected answer scores higher." in said
    probes = {"n": 128, "probes": {"empty": {"beats": 0.1, "ci95": [0.05, 0.2], "margin": -1.0}}}
    change(run / "reward/manifest.json", card=CARD | {"adversarial": probes})
    assert "flagged " not in words(run).replace("is flagged where", "")


def test_the_report_card_says_what_its_limits_are(run: Path) -> None:
    said = words(run)
    assert "beyond its limit by more than chance: of 200 pairs and 128 probed prompts a value may be off" in said
    assert "since there are 1 of them, and a limit that was estimated is off as well." in said
    assert "a chance of 74 % on the mean, and 75 % are;" in said  # (90 x 0.53 + 110 x 0.92) / 200
    assert "Its limit is 0.1; with few pairs, what chance alone comes to." in said
    assert "the share of pairs that this model gets wrong, 25 % here, and 10 % at least." in said
    assert "Longer answer preferred:" not in said, "the card does not tell of it"
    longer = {"preferred": 0.625, "ci95": [0.5, 0.7], "chosen": 0.5, "n": 100}
    change(run / "reward/manifest.json", card=CARD | {"ece_by_chance": 0.19, "longer_answer": longer})
    now = words(run)
    assert "Its limit is 0.1; here it is 0.19, since with so few pairs chance alone comes to that." in now
    assert "by the reward model in 62 % of the pairs whose answers differ in length, by those who chose in 50 %" in now


@pytest.mark.parametrize("there", [("sft",), ("sft", "reward"), ("ppo",), ("sft", "reward", "ppo")])
def test_a_run_without_all_stages_is_told_as_far_as_it_is_there(run: Path, there: tuple[str, ...]) -> None:
    for stage in {"sft", "reward", "ppo", "eval"} - set(there):
        shutil.rmtree(run / stage)
    said = words(run)
    for stage in ("sft", "reward", "ppo", "eval"):
        assert (f"{stage} not there yet not there yet" in said) == (stage not in there)
    assert "whether PPO is better than SFT is not known" in said
    assert ("Not there yet: no update was made." in said) == ("ppo" not in there)
    assert said.count("Not there yet: no line of metrics.jsonl.") == 2 - len({"sft", "reward"} & set(there))
    assert "PPO beats" not in said and "256 held-out prompts" not in said


def test_a_run_that_runs(run: Path) -> None:
    """No manifest yet, and a last line that is being written."""
    shutil.rmtree(run / "eval")
    (run / "ppo/manifest.json").unlink()
    write_jsonl(run / "ppo/metrics.jsonl", metrics(7))
    with (run / "ppo/metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "objective/scores": 99')
    said = words(run)
    assert "begun, not finished: 7 steps so far" in said and "ppo not finished 7 updates 35 s" in said
    assert "PPO has made 7 updates." in said and "99" not in said
    assert "highest 0.6 at update 7" in said


def test_a_stage_that_has_only_begun(run: Path) -> None:
    for stage in ("reward", "ppo", "eval"):
        shutil.rmtree(run / stage)
    for name in ("metrics.jsonl", "manifest.json"):
        (run / "sft" / name).unlink()
    said = words(run)
    assert "begun, not finished" in said and "Nothing can be told yet." in said


@pytest.mark.parametrize(
    ("damaged", "told"),
    [
        (("ppo/manifest.json", "{"), "ppo: manifest.json is missing or not readable"),
        (
            ("ppo/manifest.json", '{"schema": 2, "stage": "ppo"}'),
            "ppo: manifest.json: its content is not what was written",
        ),
        (("reward/config.yaml", "a: [\n"), "reward: config.yaml is missing or not readable"),
        (("eval/report.json", "[]"), "eval: report.json is missing or not readable"),
        (("eval/samples.jsonl", "{"), "eval: samples.jsonl is damaged"),
        (("eval/samples.jsonl", '{"index": 1}\n'), "eval: samples.jsonl has 1 rows that are no answers"),
    ],
)
def test_what_is_damaged_is_said_and_the_rest_is_shown(run: Path, damaged: tuple[str, str], told: str) -> None:
    (run / damaged[0]).write_text(damaged[1])
    said = words(run)
    assert told in said and "Training: 3 to 2.12." in said
    stage = damaged[0].partition("/")[0]
    assert bool(re.search("(?<!is )damaged: ", said)) == (
        stage in ("ppo", "reward") or damaged[0] == "eval/report.json"
    )


def test_stages_elsewhere_are_found_by_the_manifest_or_by_the_config(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    begin(other / "eval", configs()["eval"])
    for name in ("report.json", "samples.jsonl"):
        shutil.copy(run / "eval" / name, other / "eval")
    told = {name: {"path": f"../../demo/{name}", "stage": name, "sha256": f"{name}-model"} for name in ("sft", "ppo")}
    finish(other / "eval")
    change(other / "eval/manifest.json", parents=told)
    said = words(other)
    assert "sft finished (from ../../demo/sft)" in said and "ppo finished (from ../../demo/ppo)" in said
    assert "reward finished (from ../reward)" in said, "PPO's own parent, as PPO names it"
    begun = tmp_path / "begun"
    begin(begun / "ppo", configs()["ppo"] | {"models": {"sft": "../../demo/sft"}})
    assert "sft finished (from ../../demo/sft)" in words(begun)


def test_the_page_says_what_its_scores_are_of(run: Path) -> None:
    config = configs()["ppo"]
    config["ppo"]["temperature"] = 0.7
    begin(run / "ppo", config)
    said = words(run)
    assert "responses that it learned from, sampled from prompts of the training at temperature 0.7." in said
    judged = "256 held-out prompts, an answer each, sampled at temperature 1, cut off at 53 tokens"
    assert f"Of {judged}; near-greedy" in said and f"means over {judged}." in said


# Another of PPO's policies


@pytest.fixture
def snapshot(run: Path) -> Path:
    """The run with what its evaluation says of the policy after update 10."""
    told = report()
    told["frontier"][1]["win_rate"] = {"reward": win(0.8), "gold": win(0.74)}
    (run / "eval/report.json").write_text(json.dumps(told))
    of_it = [{**row, "model": "ppo_step_000010", "response": "halfway"} for row in answers() if row["model"] == "ppo"]
    write_jsonl(run / "eval/samples.jsonl", [*answers(), *of_it])
    finish(run / "eval", parents=("sft", "reward", "ppo"))
    return run


@pytest.mark.parametrize("step", ["10", "selected"])
def test_a_policy_on_the_way_is_told_of_as_the_last_one_is(snapshot: Path, step: str) -> None:
    result = rlhf("report", snapshot, "--step", step)
    assert (result.exit_code, result.stdout) == (0, f"{snapshot}/eval/report-{step}.html\n"), result.stderr
    said = unescape(re.sub("<[^>]*>", " ", (snapshot / f"eval/report-{step}.html").read_text()))
    assert "PPO beats SFT on 74 % [68, 80] of 256 held-out prompts by gold, at 4.25 nats from it." in said
    assert "halfway" in said and "ppo says" not in said and "Run demo at update 10" in said
    assert "Against SFT's best of 4" not in said, "that was compared with the last policy alone"
    for last in ("last", "20"):
        rlhf("report", snapshot, "--step", last, "--out", snapshot / f"{last}.html")
        assert (snapshot / f"{last}.html").read_text() == page.of_run(read_run(snapshot))


def test_a_policy_that_is_later_than_that_of_a_stopped_run_is_not_taken_for_it(snapshot: Path) -> None:
    """RUN/ppo/model is the best one, of update 10; the snapshot of update 20 has numbers of its own."""
    change(snapshot / "ppo/manifest.json", step=10, model_is="the best step", stopped="step 20: KL")
    told = json.loads((snapshot / "eval/report.json").read_text())
    told["frontier"][2]["win_rate"] = {"reward": win(0.9), "gold": win(0.31)}
    (snapshot / "eval/report.json").write_text(json.dumps(told))
    finish(snapshot / "eval", parents=("sft", "reward", "ppo"))
    for step, share in (("10", "63 % [57, 69]"), ("last", "63 % [57, 69]"), ("20", "31 % [25, 37]")):
        rlhf("report", snapshot, "--step", step, "--out", snapshot / f"{step}.html")
        assert f"{share} of 256 held-out prompts by gold" in (snapshot / f"{step}.html").read_text(), step


def test_a_policy_that_no_evaluation_tells_of_is_refused(snapshot: Path) -> None:
    for step, code, told in (
        ("7", "M10", "tells nothing of the policy after update 7; it knows 5, 10, 20"),
        ("first", "C07", "--step first: not last, selected or a number"),
    ):
        result = rlhf("report", snapshot, "--step", step)
        assert result.exit_code == 2 and f"error[{code}]" in result.stderr and told in result.stderr
    change(snapshot / "eval/report.json", selected_step=None)
    assert "has selected no policy" in rlhf("report", snapshot, "--step", "selected").stderr


# Where it is written


def test_the_page_is_written_beside_the_evaluation_and_its_path_is_printed(run: Path) -> None:
    result = rlhf("report", run)
    assert (result.exit_code, result.stdout) == (0, f"{run}/eval/report.html\n"), "the path alone: a script can take it"
    assert result.stderr == "report   No stage looks bad.\nnext: open it in a browser\n"
    assert (run / "eval/report.html").read_text().startswith("<!DOCTYPE html>")
    shutil.rmtree(run / "eval")
    assert rlhf("report", run).stdout == f"{run}/report.html\n"
    assert rlhf("report", run / "ppo").stdout == f"{run}/report.html\n", "a stage's folder stands for its run"


def test_the_headline_is_what_the_page_says_first_and_draws_nothing(run: Path) -> None:
    told = rlhf("report", run).stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        said = brief(run).headline
    assert said == brief(run / "eval").headline == "No stage looks bad." and f"report   {said}\n" in told


def test_out_and_several_runs(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert rlhf("report", "demo", "--out", "new/page.html").stdout == "new/page.html\n"
    write_run(tmp_path / "second")
    result = rlhf("report", "demo", "second")
    assert result.stdout == "report.html\n"
    assert result.stderr == "report   2 runs are compared: demo, second\nnext: open it in a browser\n"
    assert "<title>2 runs</title>" in (tmp_path / "report.html").read_text()


def test_a_file_of_somebody_elses_is_never_replaced_and_a_page_of_ours_is(run: Path) -> None:
    target = run / "eval/report.html"
    target.write_text("my notes")
    result = rlhf("report", run)
    assert result.exit_code == 2 and target.read_text() == "my notes"
    text = f"error[C15]: {target} is no page of ours; nothing is overwritten\nhint: give another place: --out FILE\n"
    assert result.stderr == text
    target.unlink()
    assert rlhf("report", run).exit_code == 0
    before = target.read_bytes()
    write_jsonl(run / "ppo/metrics.jsonl", metrics(5))
    assert rlhf("report", run).exit_code == 0 and target.read_bytes() != before
    assert sorted(path.name for path in (run / "eval").iterdir() if path.name.startswith(".tmp")) == []


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("gone",), 2, "error[M01]: gone holds none of the stages sft, reward, ppo, eval"),
        (("demo", "gone", "other"), 2, "error[M01]: other holds none"),
        (("demo", "--out", "demo"), 2, "error[C15]: demo is a folder"),
        (("demo", "--out", "demo/data.jsonl/page.html"), 2, "error[E03]: demo/data.jsonl cannot be written"),
    ],
)
def test_what_is_wrong_is_one_line(run: Path, monkeypatch: pytest.MonkeyPatch, arguments, code: int, told: str) -> None:
    monkeypatch.chdir(run.parent)
    result = rlhf("report", *arguments)
    assert result.exit_code == code and told in result.stderr and "Traceback" not in result.stderr
    assert result.stderr.count("error[") == (2 if "other" in arguments else 1), "all at once"
    assert not Path("report.html").exists()


def test_the_same_files_are_the_same_page(run: Path, tmp_path: Path) -> None:
    first = page.of_run(read_run(run))
    shutil.copytree(run, tmp_path / "elsewhere/demo")
    assert page.of_run(read_run(tmp_path / "elsewhere/demo")) == first, "and it tells nothing of where they lie"
    assert str(tmp_path) not in first


# At the end of an evaluation


@pytest.mark.training
def test_an_evaluation_leaves_its_page_outside_its_manifest(run_folder: Path) -> None:
    assert ppo(run_folder).exit_code == 0
    result = rlhf("eval", "-c", run_folder / "eval.yaml", "-s", "eval.best_of=[]")
    assert result.exit_code == 0, result.output
    target = run_folder / "eval/report.html"
    assert f"page: {target}" in result.stdout
    assert "report.html" not in json.loads((run_folder / "eval/manifest.json").read_text())["files"]
    made = target.read_text()
    rate = json.loads((run_folder / "eval/report.json").read_text())["win_rate"]["ppo_vs_sft"]["short"]["value"]
    assert f"{100 * rate:.0f} % [" in made and made.count('<article class="pair"') >= 3
    assert 'id="tokens"' in made, "PPO tells one response's tokens"
    again = rlhf("eval", "-c", run_folder / "eval.yaml", "-s", "eval.best_of=[]")
    assert "finished already" in again.stderr and again.exit_code == 0, "the page is no part of what is held to hashes"
    target.write_text("my notes")
    third = rlhf("eval", "-c", run_folder / "eval.yaml", "-s", "eval.best_of=[]")
    assert third.exit_code == 0 and "warning[R15]: the page of the evaluation could not be made" in third.stderr
    assert target.read_text() == "my notes"


def test_a_page_that_cannot_be_drawn_is_a_warning_with_its_reason(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> str:
        raise ValueError("no such\nfont")

    monkeypatch.setattr(page, "of_run", fail)
    assert write_beside(run / "eval") is None and not (run / "eval/report.html").exists()
    (said,) = terminal.emitted_warnings()
    assert said == "warning[R15]: the page of the evaluation could not be made: ValueError: no such font"


def test_a_page_alone_makes_no_stage_stale(run: Path) -> None:
    """What `rlhf report` wrote into eval/ before there was an evaluation does not stand in its way."""
    from rlhf_cli.runs.stage_folder import stage_status

    shutil.rmtree(run / "eval")
    (run / "eval").mkdir()
    (run / "eval/report.html").touch()
    config = type("Config", (), {"folder": run / "eval"})
    assert stage_status(config, {}).state == "new"
