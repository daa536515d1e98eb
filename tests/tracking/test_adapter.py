"""Trackers of accelerate: the same run on resume, each step once, nothing printed and nothing asked."""

import logging
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from rlhf_cli.tracking.adapter import LIBRARIES, AccelerateTracker, Library
from rlhf_cli.tracking.backends import TrackerRun


class Recorder(GeneralTracker):
    """A library that prints, logs and records."""

    name = "recorder"
    requires_logging_directory = False

    def __init__(self, calls: list[Any], asks: bool, run_id: str | None) -> None:
        super().__init__()
        self.calls = calls
        self.asks = asks
        self.run_id = run_id or "run-1"

    def start(self) -> None:
        print("Welcome!")
        logging.getLogger("recorder").warning("a new version is there")
        if self.asks:
            input("key: ")
        self.calls.append(("start", self.run_id))

    @property
    def tracker(self) -> "Recorder":
        return self

    def store_init_configuration(self, values: dict) -> None:
        self.calls.append(("config", values))

    def log(self, values: dict, step: int | None = None, **_: Any) -> None:
        self.calls.append((step, values))

    def finish(self) -> None:
        self.calls.append("finish")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the recorder was told; `asks` in the config of a run makes it ask for a key."""
    recorded: list[Any] = []
    library = Library(
        options=lambda run, run_id: {"calls": recorded, "asks": "asks" in run.config, "run_id": run_id},
        run_id=lambda active: active.run_id,
        place=lambda run, active: f"{run.name}: {active.run_id}",
    )
    monkeypatch.setitem(LIBRARIES, "recorder", library)
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "recorder", Recorder)
    return recorded


def run_of(folder: Path, config: dict[str, Any], logged_step: int = -1) -> TrackerRun:
    return TrackerRun("ppo", folder, None, "first-ppo", "first", config, logged_step=logged_step)


def test_a_resumed_run_has_its_id_and_its_config_is_sent_once(
    tmp_path: Path, calls: list[Any], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    first = AccelerateTracker("recorder", run_of(tmp_path, {"ppo": {"learning_rate": 1e-5, "layers": [1, 2]}}))
    assert first.place == "first-ppo: run-1" and first.last == -1
    first.metrics(1, {"kl": 0.5})
    first.table(1, "samples", [{"response": "a"}])
    first.histograms(1, {"scores": [1.0]})
    first.close(0)
    assert calls == [
        ("start", "run-1"),
        ("config", {"ppo.learning_rate": 1e-5, "ppo.layers": "[1, 2]"}),
        (1, {"kl": 0.5}),
        "finish",
    ]
    calls.clear()
    (tmp_path / "recorder/rlhf-run-id").write_text("run-7\n")
    second = AccelerateTracker("recorder", run_of(tmp_path, {}, logged_step=4))
    assert second.last == 4
    assert calls == [("start", "run-7")]
    assert capsys.readouterr() == ("", "")
    assert not caplog.records


def test_a_library_that_asks_for_a_key_is_an_error(tmp_path: Path, calls: list[Any]) -> None:
    with pytest.raises(RuntimeError, match="asks for input, such as a key"):
        AccelerateTracker("recorder", run_of(tmp_path, {"asks": True}))
    assert calls == []
    assert not (tmp_path / "recorder/rlhf-run-id").exists()


@pytest.mark.full
def test_mlflow_goes_on_in_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for logged_step, steps in ((-1, (1, 2)), (2, (3,))):
        tracker = AccelerateTracker("mlflow", run_of(tmp_path, {"seed": 1}, logged_step))
        assert tracker.last == logged_step
        for step in steps:
            tracker.metrics(step, {"objective/kl": step / 8})
        tracker.close(0)
    database = sqlite3.connect(tmp_path / "mlflow/mlflow.db")
    assert database.execute("select name from runs").fetchall() == [("first-ppo",)]
    metrics = database.execute("select key, value, step from metrics order by step").fetchall()
    assert metrics == [("objective/kl", step / 8, step) for step in (1, 2, 3)]
    assert database.execute("select key, value from params").fetchall() == [("seed", "1")]
