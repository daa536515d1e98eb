"""`output.report_to`: TensorBoard, wandb and trackio have the numbers of the run's logs, and change no run."""

import json
import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from canaries import SECRETS, leaks, run
from ppo_folder import PPO, PROMPTS, lines, must_succeed, rlhf, untimed, write
from read_trackers import (
    events,
    tensorboard_steps,
    trackio_database,
    trackio_rows,
    wandb_history,
    wandb_runs,
    wandb_table,
)
from run_cli import python

from rlhf_cli import jsonl

ALL = ["tensorboard", "wandb", "trackio"]
TRAINED = ("sft", "reward", "ppo")


def outputs(**more: Any) -> dict[str, Any]:
    return {"report_to": ALL, "project": "chain", "save_steps": 2, "snapshots": 2, **more}


def write_chain(folder: Path) -> None:
    answers = [f" It is {n} {'far' * (n % 3)}." for n in range(len(PROMPTS))]
    pairs = zip(PROMPTS, answers, strict=True)
    jsonl.write_jsonl(folder / "sft.jsonl", [{"prompt": p, "completion": a} for p, a in pairs])
    pairs = zip(PROMPTS, answers, strict=True)
    jsonl.write_jsonl(folder / "pairs.jsonl", [{"prompt": p, "chosen": a, "rejected": a + " no"} for p, a in pairs])
    quick = {"max_steps": 4, "logging_steps": 2, "eval_steps": 2, "per_device_train_batch_size": 4}
    data = {"train": "sft.jsonl", "eval": "sft.jsonl"}
    write(folder, "sft", {"model": {"path": "sft_model"}, "data": data, "sft": quick, "output": outputs()})
    write(folder, "reward", {"data": {"train": "pairs.jsonl"}, "reward": quick, "output": outputs()})
    write(folder, "ppo", {"data": PPO["data"], "ppo": PPO["ppo"], "output": outputs(run_name="mine")})
    asked = {"n": 6, "best_of": [2], "modes": ["sampled"], "interpolate": [], "per_device_batch_size": 6}
    judges = {"short": "judges:short"}
    write(folder, "eval", {"data": {"prompts": "heldout.jsonl"}, "judges": judges, "eval": asked, "output": outputs()})


@pytest.fixture(scope="module", autouse=True)
def _offline() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        yield


@pytest.fixture(scope="module")
def chain(origin: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of all four stages, logged to all three trackers, started from another folder."""
    folder = tmp_path_factory.mktemp("runs") / "demo"
    shutil.copytree(origin, folder)
    write_chain(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("elsewhere"))
        for stage in (*TRAINED, "eval"):
            done = rlhf(stage, "-c", folder / f"{stage}.yaml")
            assert done.exit_code == 0 and "R16" not in done.stderr, done.output
            assert not [line for line in done.output.splitlines() if line.startswith(("wandb", "*", "[INFO]"))]
            assert all(f"\n{stage:<8} {name}: " in done.stderr for name in ALL)
        assert not list(Path.cwd().iterdir()), "a tracker wrote into the working directory"
    return folder


def sent_values(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != "step"}


# Contents


@pytest.mark.full
@pytest.mark.parametrize("stage", TRAINED)
def test_every_line_of_the_log_is_sent_with_its_step(chain: Path, stage: str) -> None:
    logged, merged, times = lines(chain / stage / "metrics.jsonl"), {}, {}
    for line in logged:
        merged.setdefault(line["step"], {}).update(sent_values(line))
        times.setdefault(line["step"], []).append(line["time_s"])
    assert len(merged) == (4 if stage == "ppo" else 2) and (stage != "sft" or len(logged) == 4)
    for step, rows in tensorboard_steps(chain / stage).items():
        assert rows[0].keys() == merged[step].keys() and [row["time_s"] for row in rows] == pytest.approx(times[step])
        last = {name: value for row in rows for name, value in row.items()}
        assert last == pytest.approx(merged[step], rel=1e-6)  # float32
    assert tensorboard_steps(chain / stage).keys() == merged.keys()
    history = wandb_history(chain / stage)
    assert [row["_step"] for row in history] == list(merged)
    assert all(merged[row["_step"]].items() <= row.items() for row in history)
    name = "mine" if stage == "ppo" else f"demo-{stage}"
    numbers = [(step, values) for step, values in trackio_rows("chain", name) if "time_s" in values]
    assert numbers == [(line["step"], sent_values(line)) for line in logged]


@pytest.mark.full
def test_samples_are_tables(chain: Path) -> None:
    samples = [row for row in lines(chain / "ppo/samples.jsonl") if row["step"] == 4]
    texts = [row["response"] for row in samples]
    assert texts and {row["step"] for row in lines(chain / "ppo/samples.jsonl")} == {2, 4}

    shown = events(chain / "ppo").Tensors("samples/text_summary")
    assert [event.step for event in shown] == [2, 4]
    text = shown[1].tensor_proto.string_val[0].decode()
    assert all(f"    response: {response.splitlines()[0]}" in text for response in texts if response.strip())
    assert all(not line or line.startswith("    ") for line in text.split("\n")), "no Markdown of a model's"

    history = {row["_step"]: row for row in wandb_history(chain / "ppo")}
    assert {step for step, row in history.items() if "samples/path" in row} == {2, 4}
    table = wandb_table(chain / "ppo", history[4], "samples")
    of = {name: [row[place] for row in table["data"]] for place, name in enumerate(table["columns"])}
    assert of["response"] == texts and of["scores/reward"] == [row["scores"]["reward"] for row in samples]
    assert "tokens" not in of and of["kl"] == [row["kl"] for row in samples]

    tables = {step: values["samples"] for step, values in trackio_rows("chain", "mine") if "samples" in values}
    assert tables.keys() == {2, 4} and tables[4]["_type"] == "trackio.table"
    assert [row["response"] for row in tables[4]["_value"]] == texts


@pytest.mark.full
def test_histograms_have_the_means_that_are_logged(chain: Path) -> None:
    logged = {line["step"]: line for line in lines(chain / "ppo/metrics.jsonl")}
    read = events(chain / "ppo")
    means = {"scores": "scores", "kl_k1": "kl_k1", "response_length": "response_length", "score/reward": "score/reward"}
    for name, scalar in means.items():
        found = {event.step: event.histogram_value for event in read.Histograms(f"rollout/{name}")}
        assert found.keys() == logged.keys()
        for step, histogram in found.items():
            assert histogram.num == 8  # episodes of an update
            assert histogram.sum / histogram.num == pytest.approx(logged[step][f"objective/{scalar}"], abs=1e-5)
    advantages = read.Histograms("rollout/advantages")[0].histogram_value
    assert advantages.num == 8 * logged[1]["objective/response_length"]
    assert advantages.sum == pytest.approx(0, abs=1e-3)  # whitened
    for row in wandb_history(chain / "ppo"):
        assert row["rollout/scores/_type"] == "histogram" and sum(row["rollout/scores/values"]) == 8
    found = [values for _, values in trackio_rows("chain", "mine") if "rollout/scores" in values]
    assert len(found) == 4 and sum(found[0]["rollout/advantages"]["values"]) == advantages.num


@pytest.mark.full
def test_an_evaluation_sends_the_numbers_of_the_report(chain: Path) -> None:
    report = json.loads((chain / "eval/report.json").read_text())
    won, reward = report["win_rate"]["ppo_vs_sft"]["short"], report["models"]["ppo"]["reward_mean"]
    expected = {
        "win_rate/ppo_vs_sft/short/value": won["value"],
        "win_rate/ppo_vs_sft/short/ci95/low": won["ci95"][0],
        "models/ppo/reward_mean": reward,
        "models/ppo/judges/short/mean": report["models"]["ppo"]["judges"]["short"]["mean"],
        "best_of/2/kl_bound": report["best_of"][0]["kl_bound"],
    }
    curve = {point["step"]: point["kl"] for point in report["frontier"]}
    history = {row["_step"]: row for row in wandb_history(chain / "eval")}
    numbers = [(step, values) for step, values in trackio_rows("chain", "demo-eval") if "samples" not in values]
    in_tensorboard = {step: some for step, (some,) in tensorboard_steps(chain / "eval").items()}
    assert expected.items() <= history[0].items() and expected.items() <= numbers[0][1].items()
    assert {name: in_tensorboard[0][name] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert {2, 4} <= curve.keys()
    for name, found in (("wandb", history), ("trackio", dict(numbers[1:])), ("tensorboard", in_tensorboard)):
        along = {step: row["frontier/kl"] for step, row in found.items() if "frontier/kl" in row}
        assert along == pytest.approx(curve, rel=1e-6 if name == "tensorboard" else 0), name
    table = wandb_table(chain / "eval", history[0], "samples")
    of = {name: [row[place] for row in table["data"]] for place, name in enumerate(table["columns"])}
    kept = [row for row in lines(chain / "eval/samples.jsonl") if row["model"] in ("sft", "ppo")]
    assert list(zip(of["model"], of["response"], strict=True)) == [(row["model"], row["response"]) for row in kept]


@pytest.mark.full
def test_the_config_is_sent_under_names_and_projects(chain: Path) -> None:
    names = {"sft": "demo-sft", "reward": "demo-reward", "ppo": "mine", "eval": "demo-eval"}
    for stage, name in names.items():
        (run,) = wandb_runs(chain / stage)
        assert (run.display_name, run.project, run.run_group, run.job_type) == (name, "chain", "demo", stage)
    config = {item.key: json.loads(item.value_json) for item in wandb_runs(chain / "ppo")[0].config.update}
    asked = "SELECT run_name, config FROM configs"
    in_trackio = {name: json.loads(text) for name, text in trackio_database("chain").execute(asked)}
    assert in_trackio.keys() == set(names.values())
    for each in (config, in_trackio["mine"]):
        assert each["ppo"]["learning_rate"] == 1e-3 and each["models"]["sft"] == "../sft", "no path of this machine"
    read = events(chain / "ppo")
    assert '"learning_rate": 0.001' in read.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    session = read.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"ppo.learning_rate" in session and b"output.report_to" in session
    assert str(chain) not in json.dumps([config, in_trackio])


# Effect on a run


@pytest.mark.full
def test_trackers_change_no_byte_of_a_run(chain: Path, tmp_path: Path) -> None:
    for name in ("sft", "reward"):
        shutil.copytree(chain / name, tmp_path / name, symlinks=True)
    shutil.copy(chain / "prompts.jsonl", tmp_path)
    shutil.copy(chain / "ppo.yaml", tmp_path)
    must_succeed(rlhf("ppo", "-c", tmp_path / "ppo.yaml", "-s", "output.report_to=[]", "-s", "output.project=other"))
    assert not any((tmp_path / "ppo" / name).exists() for name in ALL)
    with_them, without = (json.loads((folder / "ppo/manifest.json").read_text()) for folder in (chain, tmp_path))
    assert with_them["model_sha256"] == without["model_sha256"]
    assert with_them["files"].keys() == without["files"].keys() and with_them["metrics"] == without["metrics"]
    for log in ("metrics", "samples"):
        assert untimed(chain / f"ppo/{log}.jsonl") == untimed(tmp_path / f"ppo/{log}.jsonl")
    again = rlhf("ppo", "-c", chain / "ppo.yaml", "-s", "output.report_to=[]", "-s", "output.run_name=x")
    assert (again.exit_code, "finished already" in again.stderr) == (0, True), again.output


KILLED = """
import os, signal, time
from rlhf_cli.tracking.logs import MetricsLog
real = MetricsLog.log
def log(self, step, metrics):
    real(self, step, metrics)
    if step == 3:
        time.sleep(2)  # the libraries write within a second
        os.kill(os.getpid(), signal.SIGKILL)
MetricsLog.log = log
from rlhf_cli.cli import app
app()
"""


@pytest.mark.slow
@pytest.mark.full
def test_a_killed_run_resumes_as_the_same_run_and_sends_nothing_twice(run_folder: Path) -> None:
    write(run_folder, "ppo", {**PPO, "output": outputs(project="killed", run_name="one")})
    environment = {key: value for key, value in os.environ.items() if key != "WANDB_SERVICE"}  # of this process
    killed = python("-P", "-c", KILLED, "ppo", "-c", run_folder / "ppo.yaml", env=environment)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    stage = run_folder / "ppo"
    assert [line["step"] for line in lines(stage / "metrics.jsonl")] == [1, 2, 3]
    done = rlhf("ppo", "-c", run_folder / "ppo.yaml")
    assert done.exit_code == 0 and "resumes at step 2 of 4" in done.stderr and "R16" not in done.stderr, done.output
    logged = {line["step"]: sent_values(line) for line in untimed(stage / "metrics.jsonl")}
    assert list(logged) == [1, 2, 3, 4]

    in_tensorboard = tensorboard_steps(stage)
    assert {step: len(some) for step, some in in_tensorboard.items()} == {1: 1, 2: 1, 3: 1, 4: 1}
    assert [event.step for event in events(stage).Histograms("rollout/scores")] == [1, 2, 3, 4]
    first, second = wandb_runs(stage)
    assert first.run_id == second.run_id and len(list((stage / "wandb").glob("offline-run-*"))) == 2
    history = wandb_history(stage)
    assert [row["_step"] for row in history] == [1, 2, 3, 4]
    in_trackio = [(step, values) for step, values in trackio_rows("killed", "one") if "time_s" in values]
    assert [step for step, _ in in_trackio] == [1, 2, 3, 4]
    assert len(trackio_database("killed").execute("SELECT DISTINCT run_id FROM metrics").fetchall()) == 1
    for step, line in logged.items():
        assert line.items() <= history[step - 1].items() and line.items() <= in_trackio[step - 1][1].items()
        assert {name: in_tensorboard[step][0][name] for name in line} == pytest.approx(line, rel=1e-6)
    fresh = rlhf("ppo", "-c", run_folder / "ppo.yaml", "--fresh", "-s", "output.report_to=[trackio]")
    assert fresh.exit_code == 0 and "run one-2 of project killed" in fresh.stderr
    assert all((run_folder / ".old/ppo-1" / name).is_dir() for name in ALL)


@pytest.mark.full
def test_no_secret_is_sent(origin: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    shutil.copytree(origin, folder)
    write_chain(folder)
    done = run(tmp_path / "home", "-m", "rlhf_cli", "sft", "-c", str(folder / "sft.yaml"))
    assert done.returncode == 0 and "R16" not in done.stderr, done.stderr
    assert list((folder / "sft/wandb").glob("offline-run-*")) and leaks(tmp_path, Path(os.environ["TRACKIO_DIR"])) == []
    assert SECRETS["WANDB_API_KEY"] not in done.stdout + done.stderr
