"""The logs of a run: new, resumed, changed or damaged."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from ppo_folder import lines

from rlhf_cli import jsonl, terminal
from rlhf_cli.errors import RLHFError
from rlhf_cli.tracking.logs import Log, MetricsLog, read_log


def test_a_new_log_starts_empty_and_has_each_line_at_once(tmp_path: Path) -> None:
    jsonl.write_jsonl(tmp_path / "metrics.jsonl", [{"step": 1, "time_s": 1.0}])
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.log(3, {"loss": 0.5, "lr": 1e-5})
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert list(line) == ["step", "loss", "lr", "time_s"] and (line["step"], line["lr"]) == (3, 1e-5)
    assert line["time_s"] >= 0


def test_a_resumed_log_drops_all_after_its_position(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.log(1, {"loss": 1.0})
    log.log(2, {"loss": 2.0})
    log._began -= 200  # as if it had taken so long
    log.log(2, {"eval_loss": 2.5})
    mark, kept = log.position(2), path.read_bytes()
    log.log(3, {"loss": 3.0})
    with path.open("a") as file:
        file.write('{"step": 4, "lo')  # the process was killed here
    again = MetricsLog(path, mark)
    assert path.read_bytes() == kept
    again.log(3, {"loss": 9.0})
    assert [line["step"] for line in lines(path)] == [1, 2, 2, 3]
    assert 200 <= lines(path)[-1]["time_s"] < 210  # the clock resumes
    assert MetricsLog(path, again.position(3)).position(3) == again.position(3)


@pytest.mark.parametrize(
    ("harm", "left"),
    [
        (lambda path: path.write_text("".join(path.read_text().splitlines(keepends=True)[1:])), [2]),
        (lambda path: os.truncate(path, path.stat().st_size // 4), []),
        (lambda path: path.unlink(), []),
        (lambda path: path.write_text(path.read_text().replace("1.0", "1e999")), [2]),
        (lambda path: path.write_text(re.sub('"time_s": [0-9.]+', '"time_s": null', path.read_text())), [1, 2]),
    ],
    ids=["a line less", "cut off", "deleted", "infinite", "no time"],
)
def test_a_changed_log_is_reported_and_kept(
    tmp_path: Path, harm: Callable[[Path], None], left: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in (1, 2):
        log.log(step, {"loss": float(step)})
    mark = log.position(2)
    log.log(3, {"loss": 3.0})
    harm(path)
    again = MetricsLog(path, mark)
    assert "warning[M05]: " in (stderr := capsys.readouterr().err)
    assert "metrics.jsonl was changed or cut after step 2 was saved" in stderr
    assert [line["step"] for line in read_log(path)] == left
    again.log(3, {"loss": 4.0})
    assert [line["step"] for line in read_log(path)] == [*left, 3]


@pytest.mark.parametrize("bits", [1, 128], ids=["other text", "no text"])
def test_a_run_resumes_with_any_byte_of_a_log_damaged(
    tmp_path: Path, bits: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in (1, 2, 3):
        log.log(step, {"loss": float(step)})
    mark, whole = log.position(3), path.read_bytes()
    for place in range(len(whole)):
        terminal.reset()
        path.write_bytes(whole[:place] + bytes([whole[place] ^ bits]) + whole[place + 1 :])
        again = MetricsLog(path, mark)
        assert "warning[M05]: " in capsys.readouterr().err
        again.log(4, {"loss": 4.0})
        left = [line["step"] for line in read_log(path)]
        assert left[-1] == 4 and len(left) >= 2  # the end of a line joins two


def test_a_position_is_flushed_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(tmp_path / "samples.jsonl")
    assert log.position(0)["bytes"] == 0  # no file yet, nothing to wait for
    log.append({"step": 1})
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    log.position(1)
    assert synced == [(tmp_path / "samples.jsonl").stat().st_ino, tmp_path.stat().st_ino]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_metric_that_is_not_finite_raises(tmp_path: Path, value: float) -> None:
    with pytest.raises(RLHFError, match="step 7"):
        MetricsLog(tmp_path / "metrics.jsonl").log(7, {"loss": value})
