"""The rules for all trackers, with ones that only listen; those that fail, are missing or are not named; servers."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ppo_folder import PPO, lines, rlhf, write
from run_cli import ROOT, must_succeed, python
from stand_in_wandb import stand_in

from rlhf_cli.config.base import Config
from rlhf_cli.config.loading import load
from rlhf_cli.tracking import trackers
from rlhf_cli.tracking.backends import TrackerRun, Trackio, WandB
from rlhf_cli.tracking.logs import MetricsLog
from rlhf_cli.tracking.trackers import Trackers


class Listener:
    """A tracker that records its calls; `logged` is the last step that an earlier start logged."""

    place, logged = "here", -1
    calls: list[tuple[str, int]]

    def __init__(self, run: TrackerRun) -> None:
        self.last, self.run = self.logged, run
        type(self).calls = []
        type(self).started = run

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.calls.append(("eval" if "eval_loss" in values else "line", step))

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self.calls.append((name, step))
        type(self).rows = rows

    def histograms(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        self.calls += [(name, step) for name in values]

    def close(self, exit_code: int) -> None:
        self.calls.append(("closed", exit_code))


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A config whose only tracker is a Listener."""
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Listener)
    monkeypatch.setattr(Listener, "logged", -1)
    (tmp_path / "sft.yaml").write_text("model: {path: m}\ndata: {train: t}\noutput: {report_to: [wandb, wandb]}\n")
    return load("sft", tmp_path / "sft.yaml")


def began(config: Config) -> tuple[Path, Any]:
    """A log of steps 1 to 4, of which a state was saved after step 2."""
    path = config.folder / "metrics.jsonl"
    path.parent.mkdir()
    log, marks = MetricsLog(path), []
    for step in range(1, 5):
        log.log(step, {"loss": 1.0})
        marks.append(log.position(step))
    return path, marks[1]


@pytest.mark.parametrize(
    ("logged", "expected"),
    [
        (-1, [1, 2, 3, 4, 5]),  # named only now: all so far
        (1, [2, 3, 4, 5]),  # the last line before the state was lost on the way
        (2, [3, 4, 5]),
        (4, [5]),
    ],
)
def test_a_tracker_gets_only_what_it_lacks(
    config: Config, logged: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, mark = began(config)
    monkeypatch.setattr(Listener, "logged", logged)
    with Trackers(config) as unused:
        log = MetricsLog(path, mark, tracked := Trackers(config))
        assert unused and not tracked
        with tracked:
            assert (tracked.config, Listener.started.saved_step, Listener.started.logged_step) == (config, 2, 4)
            for step in (3, 4, 5):
                log.log(step, {"loss": 1.0})
                tracked.table(step, "samples", [{"a": 1}])
    assert [step for what, step in Listener.calls if what == "line"] == expected
    assert [step for what, step in Listener.calls if what == "samples"] == [step for step in (3, 4, 5) if step > logged]
    assert Listener.calls[-1] == ("closed", 0)


def test_a_line_of_an_interrupted_step_is_sent(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in an evaluation: the step's own line was sent, the evaluation's was not."""
    path, mark = began(config)
    monkeypatch.setattr(Listener, "logged", 4)
    log = MetricsLog(path, mark, tracked := Trackers(config))
    with tracked:
        for step in (3, 4):
            log.log(step, {"loss": 1.0})
        log.log(4, {"eval_loss": 1.0})
    assert Listener.calls == [("eval", 4), ("closed", 0)]


def test_a_failed_run_is_marked_and_only_the_main_process_logs(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    for error, code in ((ValueError("no"), 1), (SystemExit(143), 143)):
        with pytest.raises(type(error)), Trackers(config):
            raise error
        assert Listener.calls == [("closed", code)]
    Listener.calls = []
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with Trackers(config) as tracked:
        assert not tracked
        MetricsLog(config.folder / "metrics.jsonl", None, tracked).log(1, {"loss": 1.0})
    assert Listener.calls == []


def test_a_table_has_text_and_numbers_and_no_secret(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "a-secret-of-the-environment")
    row = {"response": "it is a-secret-of-the-environment", "scores": {"a": 1.5}, "ended": True, "tokens": [1, 2]}
    with Trackers(config) as tracked:
        tracked.table(1, "samples", [row])
        tracked.table(1, "none", [])
        tracked.histograms(1, {"some": [1.0], "none": []})
    assert Listener.rows == [{"response": "it is [secret]", "scores/a": 1.5, "ended": True}]
    assert Listener.calls == [("samples", 1), ("some", 1), ("closed", 0)]
    logged: list[Any] = []  # a row without a score, as a verifier returns
    library = SimpleNamespace(Table=lambda *arguments: arguments)
    WandB.table(SimpleNamespace(library=library, _log=lambda *each: logged.append(each)), 1, "t", [{"a": 1}, {"b": 2}])
    assert logged == [(1, {"t": (["a", "b"], [[1, None], [None, 2]])})]


@pytest.mark.parametrize("moment", ["__init__", "metrics", "table", "histograms", "close"])
def test_r16_a_tracker_that_fails_is_closed(
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


@pytest.mark.full
def test_e06_a_library_that_is_missing(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    write(run_folder, "ppo", {**PPO, "output": {"report_to": ["tensorboard", "trackio"]}})
    for command in (["check", run_folder / "ppo.yaml"], ["ppo", "-c", run_folder / "ppo.yaml"]):
        done = rlhf(*command)
        (error,) = (line for line in done.stderr.splitlines() if line.startswith("error"))
        assert done.exit_code == 2 and error.endswith(
            ": output.report_to names trackers that are not installed: trackio"
        )
        assert error.startswith("error[E06]: ") and "ppo.yaml:" in error
        assert "hint: pip install trackio, or remove it" in done.stderr
    write(run_folder, "ppo", {**PPO, "output": {"report_to": ["tensorboard"]}})
    assert rlhf("check", run_folder / "ppo.yaml").exit_code == 0


NAMELESS = """
import sys
from pathlib import Path
from rlhf_cli import cli
from rlhf_cli.config import load
from rlhf_cli.tracking.logs import MetricsLog
from rlhf_cli.tracking.trackers import Trackers
with Trackers(load("sft", Path(sys.argv[1]), sys.argv[2:])) as trackers:
    MetricsLog(Path("metrics.jsonl"), None, trackers)
print(sorted({name.partition(".")[0] for name in sys.modules} & {"wandb", "trackio", "tensorboard", "torch"}))
"""


@pytest.mark.full
def test_no_library_is_imported_unless_they_are_named(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text("model: {path: m}\ndata: {train: t}\n")
    for override, imported in ((), []), (("output.report_to=[trackio]",), ["trackio"]):
        done = must_succeed(python("-P", "-c", NAMELESS, "sft.yaml", *override, cwd=tmp_path))
        assert done.stdout == f"{imported}\n" and "R16" not in done.stderr


# wandb with a server, and without one

ONLINE = """
import sys
from pathlib import Path
from rlhf_cli.config import load
from rlhf_cli.tracking.logs import MetricsLog
from rlhf_cli.tracking.trackers import Trackers
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
    """A process that logs these steps, the first ones maybe again."""
    (folder / "sft.yaml").write_text("model: {path: m}\ndata: {train: t}\noutput: {report_to: [wandb]}\n")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    environment |= {"PYTHONPATH": str(ROOT), "HOME": str(folder), "NETRC": str(folder / "netrc")}
    environment |= {"WANDB_BASE_URL": url, "WANDB_INIT_TIMEOUT": "2", "WANDB_FINISH_TIMEOUT": "2", **variables}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-P", "-c", ONLINE, *map(str, steps)]
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes)


@pytest.mark.full
def test_an_online_run_continues_from_what_the_server_has(tmp_path: Path) -> None:
    with stand_in() as server:
        for steps in ((1, 2, 3), (1, 2, 3, 4, 5)):
            out, err = online(tmp_path, server.url, *steps, WANDB_API_KEY="ab" * 20).communicate("\n", timeout=60)
            assert out == "True\n" and err.startswith(f"sft      wandb: {server.url}/me/rlhf/runs/")
            assert "R16" not in err
    assert [(line["_step"], line["loss"]) for line in server.history] == [(n, n / 10) for n in range(1, 6)]
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"ab" * 20 in path.read_bytes()]


@pytest.mark.full
def test_the_project_unless_it_is_named(tmp_path: Path) -> None:
    with stand_in() as server:
        _, err = online(tmp_path, server.url, 1, WANDB_API_KEY="ab" * 20, WANDB_PROJECT="mine").communicate("\n")
        assert err.startswith(f"sft      wandb: {server.url}/me/mine/runs/")
    tracker = Trackio(TrackerRun("sft", tmp_path, None, "x", "g", {}))
    tracker.close(0)
    assert tracker.place == "run x of project rlhf (trackio show --project rlhf)"


@pytest.mark.full
def test_r16_a_server_that_goes_away_and_wandb_without_a_key(tmp_path: Path) -> None:
    with stand_in() as server:
        child = online(tmp_path, server.url, 1, 2, WANDB_API_KEY="ab" * 20)
        assert child.stdout and child.stdout.readline() == "True\n"
    _, err = child.communicate("\n", timeout=60)
    assert child.returncode == 0 and err.splitlines()[1].startswith("warning[R16]: wandb: TimeoutError: ")
    assert [line["step"] for line in lines(tmp_path / "sft/metrics.jsonl")] == [1, 2]
    out, err = online(tmp_path, server.url, 1, WANDB_API_KEY="ab" * 20).communicate("\n", timeout=60)
    assert out == "False\n" and err.startswith("warning[R16]: wandb: CommError: ") and len(err.splitlines()) == 2
    out, err = online(tmp_path, "http://127.0.0.1:9").communicate("\n", timeout=60)
    assert out == "False\n" and err.startswith("warning[R16]: wandb: RuntimeError: there is no API key: ")


def test_a_warning_of_trackio_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import warnings

    monkeypatch.setenv("TRACKIO_SERVER_URL", "http://127.0.0.1:9?write_token=x")  # without a server
    with warnings.catch_warnings(), pytest.raises(RuntimeError, match="could not create a remote client"):
        warnings.simplefilter("default")
        Trackio(TrackerRun("sft", tmp_path, None, "x", "g", {}))


def test_a_name_is_used_once_per_project(tmp_path: Path) -> None:
    places = []
    for folder in ("a", "b", "a"):
        (tmp_path / folder).mkdir(exist_ok=True)
        tracker = Trackio(TrackerRun("sft", tmp_path / folder, "taken", "x", "g", {}, saved_step=0, logged_step=0))
        tracker.metrics(len(places), {"loss": 1.0})
        places.append((tracker.place.split()[1], tracker.last))
        tracker.close(0)
    assert places == [("x", -1), ("x-2", -1), ("x", 0)]
