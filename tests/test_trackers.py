"""`output.report_to`: what TensorBoard, wandb and trackio hold is what the run's own logs hold, and they do no harm."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from canaries import SECRETS, leaks, run
from ppo_folder import PPO, PROMPTS, lines, rlhf, untimed, write
from read_trackers import (
    events,
    tensorboard_steps,
    trackio_database,
    trackio_rows,
    wandb_history,
    wandb_runs,
    wandb_table,
)
from stand_in_wandb import stand_in

from rlhf_cli import rows, trackers
from rlhf_cli.config import Config, load
from rlhf_cli.trackers import Trackers
from rlhf_cli.trackers.run import Run
from rlhf_cli.trackers.trackio import Trackio
from rlhf_cli.tracking import MetricsLog

ROOT = Path(__file__).parents[1]
ALL = ["tensorboard", "wandb", "trackio"]
TRAINED = ("sft", "reward", "ppo")


def outputs(**more: Any) -> dict[str, Any]:
    return {"report_to": ALL, "project": "chain", "save_steps": 2, "snapshots": 2, **more}


def write_chain(folder: Path) -> None:
    answers = [f" It is {n} {'far' * (n % 3)}." for n in range(len(PROMPTS))]
    pairs = zip(PROMPTS, answers, strict=True)
    rows.write_jsonl(folder / "sft.jsonl", [{"prompt": p, "completion": a} for p, a in pairs])
    pairs = zip(PROMPTS, answers, strict=True)
    rows.write_jsonl(folder / "pairs.jsonl", [{"prompt": p, "chosen": a, "rejected": a + " no"} for p, a in pairs])
    quick = {"max_steps": 4, "logging_steps": 2, "eval_steps": 2, "per_device_train_batch_size": 4}
    data = {"train": "sft.jsonl", "eval": "sft.jsonl"}
    write(folder, "sft", {"model": {"path": "sft_model"}, "data": data, "sft": quick, "output": outputs()})
    write(folder, "reward", {"data": {"train": "pairs.jsonl"}, "reward": quick, "output": outputs()})
    write(folder, "ppo", {"data": PPO["data"], "ppo": PPO["ppo"], "output": outputs(run_name="mine")})
    asked = {"n": 6, "best_of": [2], "modes": ["sampled"], "per_device_batch_size": 6}
    judges = {"short": "judges:short"}
    write(folder, "eval", {"data": {"prompts": "heldout.jsonl"}, "judges": judges, "eval": asked, "output": outputs()})


@pytest.fixture(scope="module", autouse=True)
def _offline() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        yield


@pytest.fixture(scope="module")
def chain(origin: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of all four stages, each told to all three trackers, started from another folder."""
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


def told(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != "step"}


# What they hold


@pytest.mark.training
@pytest.mark.parametrize("stage", TRAINED)
def test_every_line_of_the_log_is_told_with_its_step(chain: Path, stage: str) -> None:
    logged = lines(chain / stage / "metrics.jsonl")
    by_step = {step: [told(line) for line in some] for step, some in itertools.groupby(logged, lambda x: x["step"])}
    assert len(by_step) == (4 if stage == "ppo" else 2) and (stage != "sft" or len(logged) == 4)

    in_tensorboard = tensorboard_steps(chain / stage)
    assert in_tensorboard.keys() == by_step.keys()
    for step, some in by_step.items():
        merged = {name: value for line in some for name, value in line.items()}
        assert in_tensorboard[step][0].keys() == merged.keys()
        assert [row["time_s"] for row in in_tensorboard[step]] == pytest.approx([line["time_s"] for line in some])
        last = {name: value for row in in_tensorboard[step] for name, value in row.items()}
        assert last == pytest.approx(merged, rel=1e-6)  # float32

    history = wandb_history(chain / stage)
    assert [row["_step"] for row in history] == list(by_step)
    for row in history:
        merged = {name: value for line in by_step[row["_step"]] for name, value in line.items()}
        assert merged.items() <= row.items()

    name = "mine" if stage == "ppo" else f"demo-{stage}"
    numbers = [(step, values) for step, values in trackio_rows("chain", name) if "time_s" in values]
    assert numbers == [(line["step"], told(line)) for line in logged]


@pytest.mark.training
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


@pytest.mark.training
def test_histograms_have_the_means_that_are_logged(chain: Path) -> None:
    logged = {line["step"]: line for line in lines(chain / "ppo/metrics.jsonl")}
    read = events(chain / "ppo")
    means = {"scores": "scores", "kl_k1": "kl_k1", "response_length": "response_length", "score/reward": "score/reward"}
    for name, scalar in means.items():
        found = {event.step: event.histogram_value for event in read.Histograms(f"rollout/{name}")}
        assert found.keys() == logged.keys()
        for step, told_of in found.items():
            assert told_of.num == 8  # episodes of an update
            assert told_of.sum / told_of.num == pytest.approx(logged[step][f"objective/{scalar}"], abs=1e-5)
    advantages = read.Histograms("rollout/advantages")[0].histogram_value
    assert advantages.num == 8 * logged[1]["objective/response_length"]
    assert advantages.sum == pytest.approx(0, abs=1e-3)  # whitened
    for row in wandb_history(chain / "ppo"):
        assert row["rollout/scores/_type"] == "histogram" and sum(row["rollout/scores/values"]) == 8
    found = [values for _, values in trackio_rows("chain", "mine") if "rollout/scores" in values]
    assert len(found) == 4 and sum(found[0]["rollout/advantages"]["values"]) == advantages.num


@pytest.mark.training
def test_an_evaluation_is_told_in_the_reports_numbers(chain: Path) -> None:
    report = json.loads((chain / "eval/report.json").read_text())
    won, reward = report["win_rate"]["ppo_vs_sft"]["short"], report["models"]["ppo"]["reward_mean"]
    wanted = {
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
    assert wanted.items() <= history[0].items() and wanted.items() <= numbers[0][1].items()
    assert {name: in_tensorboard[0][name] for name in wanted} == pytest.approx(wanted, rel=1e-6)
    assert {2, 4} <= curve.keys()
    for name, found in (("wandb", history), ("trackio", dict(numbers[1:])), ("tensorboard", in_tensorboard)):
        along = {step: row["frontier/kl"] for step, row in found.items() if "frontier/kl" in row}
        assert along == pytest.approx(curve, rel=1e-6 if name == "tensorboard" else 0), name
    table = wandb_table(chain / "eval", history[0], "samples")
    of = {name: [row[place] for row in table["data"]] for place, name in enumerate(table["columns"])}
    kept = [row for row in lines(chain / "eval/samples.jsonl") if row["model"] in ("sft", "ppo")]
    assert list(zip(of["model"], of["response"], strict=True)) == [(row["model"], row["response"]) for row in kept]


@pytest.mark.training
def test_the_config_is_told_under_names_and_projects(chain: Path) -> None:
    names = {"sft": "demo-sft", "reward": "demo-reward", "ppo": "mine", "eval": "demo-eval"}
    for stage, name in names.items():
        (begun,) = wandb_runs(chain / stage)
        assert (begun.display_name, begun.project, begun.run_group, begun.job_type) == (name, "chain", "demo", stage)
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


# What they do to a run


@pytest.mark.training
def test_trackers_change_no_byte_of_a_run(chain: Path, tmp_path: Path) -> None:
    for name in ("sft", "reward"):
        shutil.copytree(chain / name, tmp_path / name, symlinks=True)
    shutil.copy(chain / "prompts.jsonl", tmp_path)
    shutil.copy(chain / "ppo.yaml", tmp_path)
    done = rlhf("ppo", "-c", tmp_path / "ppo.yaml", "-s", "output.report_to=[]", "-s", "output.project=other")
    assert done.exit_code == 0, done.output
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
from rlhf_cli.tracking import MetricsLog
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


@pytest.mark.training
def test_a_killed_run_goes_on_as_the_same_run_and_tells_nothing_twice(run_folder: Path) -> None:
    write(run_folder, "ppo", {**PPO, "output": outputs(project="killed", run_name="one")})
    command = [sys.executable, "-P", "-c", KILLED, "ppo", "-c", str(run_folder / "ppo.yaml")]
    environment = {key: value for key, value in os.environ.items() if key != "WANDB_SERVICE"}  # of this process
    environment["PYTHONPATH"] = str(ROOT)
    killed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    stage = run_folder / "ppo"
    assert [line["step"] for line in lines(stage / "metrics.jsonl")] == [1, 2, 3]
    done = rlhf("ppo", "-c", run_folder / "ppo.yaml")
    assert done.exit_code == 0 and "resumes at step 2 of 4" in done.stderr and "R16" not in done.stderr, done.output
    logged = {line["step"]: told(line) for line in untimed(stage / "metrics.jsonl")}
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


# The rules, with trackers that only listen


class Listener:
    """Notes what it is told; of an earlier start it holds the steps up to `held`."""

    place, held = "here", -1
    said: list[tuple[str, int]]

    def __init__(self, run: Run) -> None:
        self.last, self.run = self.held, run
        type(self).said = []
        type(self).begun = run

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.said.append(("eval" if "eval_loss" in values else "line", step))

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self.said.append((name, step))
        type(self).rows = rows

    def histograms(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        self.said += [(name, step) for name in values]

    def close(self, exit_code: int) -> None:
        self.said.append(("closed", exit_code))


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Of a run whose one tracker only listens."""
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Listener)
    monkeypatch.setattr(Listener, "held", -1)
    (tmp_path / "sft.yaml").write_text("model: {path: m}\ndata: {train: t}\noutput: {report_to: [wandb, wandb]}\n")
    return load("sft", tmp_path / "sft.yaml")


def began(config: Config) -> tuple[Path, Any]:
    """A log of steps 1 to 4, of which a state was saved after step 2."""
    path = config.folder / "metrics.jsonl"
    path.parent.mkdir()
    log, marks = MetricsLog(path), []
    for step in range(1, 5):
        log.log(step, {"loss": 1.0})
        marks.append(log.mark(step))
    return path, marks[1]


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        (-1, [1, 2, 3, 4, 5]),  # named only now: all so far
        (1, [2, 3, 4, 5]),  # the last line before the state was lost on the way
        (2, [3, 4, 5]),
        (4, [5]),
    ],
)
def test_a_tracker_is_told_what_it_does_not_hold(
    config: Config, held: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, mark = began(config)
    monkeypatch.setattr(Listener, "held", held)
    with Trackers(config) as nobody:
        log = MetricsLog(path, mark, tracked := Trackers(config))
        assert nobody and not tracked
        with tracked:
            assert (tracked.config, Listener.begun.saved, Listener.begun.told) == (config, 2, 4)
            for step in (3, 4, 5):
                log.log(step, {"loss": 1.0})
                tracked.table(step, "samples", [{"a": 1}])
    assert [step for what, step in Listener.said if what == "line"] == expected
    assert [step for what, step in Listener.said if what == "samples"] == [step for step in (3, 4, 5) if step > held]
    assert Listener.said[-1] == ("closed", 0)


def test_a_line_of_a_step_that_was_cut_short_is_told(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in an evaluation: the step's own line was told, the evaluation's was not."""
    path, mark = began(config)
    monkeypatch.setattr(Listener, "held", 4)
    log = MetricsLog(path, mark, tracked := Trackers(config))
    with tracked:
        for step in (3, 4):
            log.log(step, {"loss": 1.0})
        log.log(4, {"eval_loss": 1.0})
    assert Listener.said == [("eval", 4), ("closed", 0)]


def test_a_run_that_ends_badly_is_told_to_have(config: Config) -> None:
    for error, code in ((ValueError("no"), 1), (SystemExit(143), 143)):
        with pytest.raises(type(error)), Trackers(config):
            raise error
        assert Listener.said == [("closed", code)]


def test_the_first_of_several_processes_alone_talks(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    Listener.said = []
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with Trackers(config) as tracked:
        assert not tracked
        MetricsLog(config.folder / "metrics.jsonl", None, tracked).log(1, {"loss": 1.0})
    assert Listener.said == []


def test_a_table_holds_text_and_numbers_and_no_secret(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "a-secret-of-the-environment")
    row = {"response": "it is a-secret-of-the-environment", "scores": {"a": 1.5}, "ended": True, "tokens": [1, 2]}
    with Trackers(config) as tracked:
        tracked.table(1, "samples", [row])
        tracked.table(1, "none", [])
        tracked.histograms(1, {"some": [1.0], "none": []})
    assert Listener.rows == [{"response": "it is [secret]", "scores/a": 1.5, "ended": True}]
    assert Listener.said == [("samples", 1), ("some", 1), ("closed", 0)]


@pytest.mark.parametrize("moment", ["__init__", "metrics", "table", "histograms", "close"])
def test_r16_a_tracker_that_fails_is_left_alone(
    config: Config, moment: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*arguments: Any) -> None:
        raise OSError(f"no server\nfor {moment}")

    monkeypatch.setattr(Listener, moment, fails)
    with Trackers(config) as tracked:
        log = MetricsLog(config.folder / "metrics.jsonl", None, tracked)
        config.folder.mkdir()
        for step in (1, 2):
            log.log(step, {"loss": 1.0})
            tracked.table(step, "samples", [{"a": 1}])
            tracked.histograms(step, {"a": [1.0]})
    assert [line["step"] for line in lines(log.path)] == [1, 2]
    warned = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert warned == [f"warning[R16]: wandb: OSError: no server for {moment}"]


# Before a run


@pytest.mark.training
def test_e06_a_library_that_is_missing(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    write(run_folder, "ppo", {**PPO, "output": {"report_to": ["tensorboard", "trackio"]}})
    for command in (["check", run_folder / "ppo.yaml"], ["ppo", "-c", run_folder / "ppo.yaml"]):
        done = rlhf(*command)
        (error,) = (line for line in done.stderr.splitlines() if line.startswith("error"))
        assert done.exit_code == 2 and error.endswith(": output.report_to names what is not installed: trackio")
        assert error.startswith("error[E06]: ") and "ppo.yaml:" in error
        assert "hint: pip install 'rlhf-cli[trackers]', or take it out" in done.stderr
    write(run_folder, "ppo", {**PPO, "output": {"report_to": ["tensorboard"]}})
    assert rlhf("check", run_folder / "ppo.yaml").exit_code == 0


NAMELESS = """
import sys
from pathlib import Path
from rlhf_cli import cli, tracking
from rlhf_cli.config import load
from rlhf_cli.trackers import Trackers
with Trackers(load("sft", Path(sys.argv[1]), sys.argv[2:])) as trackers:
    tracking.MetricsLog(Path("metrics.jsonl"), None, trackers)
print(sorted({name.partition(".")[0] for name in sys.modules} & {"wandb", "trackio", "tensorboard", "torch"}))
"""


def test_no_library_is_imported_unless_they_are_named(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text("model: {path: m}\ndata: {train: t}\n")
    for override, imported in ((), []), (("output.report_to=[trackio]",), ["trackio"]):
        command = [sys.executable, "-P", "-c", NAMELESS, "sft.yaml", *override]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout == f"{imported}\n" and "R16" not in done.stderr


# wandb with a server, and without one

ONLINE = """
import sys
from pathlib import Path
from rlhf_cli.config import load
from rlhf_cli.tracking import MetricsLog
from rlhf_cli.trackers import Trackers
Path("sft").mkdir(exist_ok=True)
trackers = Trackers(load("sft", Path("sft.yaml")))
log = MetricsLog(Path("sft/metrics.jsonl"), None, trackers)
with trackers:
    print(bool(trackers), flush=True)
    sys.stdin.readline()
    for step in map(int, sys.argv[1:]):
        log.log(step, {"loss": step / 10})
"""


def online(folder: Path, url: str, *steps: int, **variables: str) -> subprocess.Popen[str]:
    """A process that logs these steps, the first ones maybe again, once it is told to."""
    (folder / "sft.yaml").write_text("model: {path: m}\ndata: {train: t}\noutput: {report_to: [wandb]}\n")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    environment |= {"PYTHONPATH": str(ROOT), "HOME": str(folder), "NETRC": str(folder / "netrc")}
    environment |= {"WANDB_BASE_URL": url, "WANDB_INIT_TIMEOUT": "2", "WANDB_FINISH_TIMEOUT": "2", **variables}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-P", "-c", ONLINE, *map(str, steps)]
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes)


def test_an_online_run_goes_on_from_what_the_server_has(tmp_path: Path) -> None:
    with stand_in() as server:
        for steps in ((1, 2, 3), (1, 2, 3, 4, 5)):
            out, err = online(tmp_path, server.url, *steps, WANDB_API_KEY="ab" * 20).communicate("\n", timeout=60)
            assert out == "True\n" and err.startswith(f"sft      wandb: {server.url}/me/rlhf/runs/")
            assert "R16" not in err
    assert [(line["_step"], line["loss"]) for line in server.history] == [(n, n / 10) for n in range(1, 6)]
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"ab" * 20 in path.read_bytes()]


def test_r16_a_server_that_goes_away(tmp_path: Path) -> None:
    with stand_in() as server:
        child = online(tmp_path, server.url, 1, 2, WANDB_API_KEY="ab" * 20)
        assert child.stdout and child.stdout.readline() == "True\n"
    _, err = child.communicate("\n", timeout=60)
    assert child.returncode == 0 and err.splitlines()[1].startswith("warning[R16]: wandb: TimeoutError: ")
    assert [line["step"] for line in lines(tmp_path / "sft/metrics.jsonl")] == [1, 2]
    out, err = online(tmp_path, server.url, 1, WANDB_API_KEY="ab" * 20).communicate("\n", timeout=60)
    assert out == "False\n" and err.startswith("warning[R16]: wandb: CommError: ") and len(err.splitlines()) == 2


def test_without_a_key_wandb_neither_asks_nor_waits(tmp_path: Path) -> None:
    out, err = online(tmp_path, "http://127.0.0.1:9").communicate("\n", timeout=60)
    assert out == "False\n" and err.startswith("warning[R16]: wandb: RuntimeError: there is no API key: ")


def test_what_trackio_only_warns_of_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import warnings

    monkeypatch.setenv("TRACKIO_SERVER_URL", "http://127.0.0.1:9?write_token=x")  # where nobody listens
    with warnings.catch_warnings(), pytest.raises(RuntimeError, match="could not create a remote client"):
        warnings.simplefilter("default")
        Trackio(Run("sft", tmp_path, None, "x", "g", {}))


def test_the_names_of_a_project_are_taken_once(tmp_path: Path) -> None:
    places = []
    for folder in ("a", "b", "a"):
        (tmp_path / folder).mkdir(exist_ok=True)
        tracker = Trackio(Run("sft", tmp_path / folder, "taken", "x", "g", {}, saved=0, told=0))
        tracker.metrics(len(places), {"loss": 1.0})
        places.append((tracker.place.split()[1], tracker.last))
        tracker.close(0)
    assert places == [("x", -1), ("x-2", -1), ("x", 0)]


@pytest.mark.training
def test_no_secret_is_told_to_anybody(origin: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    shutil.copytree(origin, folder)
    write_chain(folder)
    done = run(tmp_path / "home", "-m", "rlhf_cli", "sft", "-c", str(folder / "sft.yaml"))
    assert done.returncode == 0 and "R16" not in done.stderr, done.stderr
    assert list((folder / "sft/wandb").glob("offline-run-*")) and leaks(tmp_path, Path(os.environ["TRACKIO_DIR"])) == []
    assert SECRETS["WANDB_API_KEY"] not in done.stdout + done.stderr
