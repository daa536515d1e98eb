"""metrics.jsonl and samples.jsonl: one object a line, and nothing of steps that are going to be made again."""

from pathlib import Path

import pytest

from rlhf_cli import rows
from rlhf_cli.errors import RLHFError
from rlhf_cli.tracking import MetricsLog, SamplesLog


def lines(path: Path) -> list[dict]:
    return [row for _, row in rows.read_jsonl(path)]


def test_metrics_are_there_at_once_with_step_and_time(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    assert log.last() == {}
    log.log(3, {"loss": 0.5, "lr": 1e-5})
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert list(line) == ["step", "loss", "lr", "time_s"] and (line["step"], line["lr"]) == (3, 1e-5)
    assert line["time_s"] >= 0 and log.last() == {"loss": 0.5, "lr": 1e-5}


def test_a_resumed_log_forgets_later_steps_and_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows.write_jsonl(path, [{"step": step, "loss": float(step), "time_s": 100.0 * step} for step in (1, 2, 2, 3, 4)])
    path.write_text(path.read_text() + '{"step": 4, "lo')
    log = MetricsLog(path, resume_at=2)
    assert [line["step"] for line in lines(path)] == [1, 2, 2] and log.last() == {"loss": 2.0}
    log.log(3, {"loss": 9.0})
    assert 200 <= lines(path)[-1]["time_s"] < 210  # the clock goes on where it stopped


def test_a_new_log_starts_empty(tmp_path: Path) -> None:
    rows.write_jsonl(tmp_path / "metrics.jsonl", [{"step": 1, "time_s": 1.0}])
    MetricsLog(tmp_path / "metrics.jsonl").log(1, {"loss": 1.0})
    assert len(lines(tmp_path / "metrics.jsonl")) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_finite_number_ends_the_run(tmp_path: Path, value: float) -> None:
    with pytest.raises(RLHFError, match="step 7"):
        MetricsLog(tmp_path / "metrics.jsonl").log(7, {"loss": value})


def test_samples_are_kept_up_to_the_step(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    for step in (1, 1, 2):
        SamplesLog(path, resume_at=9).log({"step": step, "prompt": "a"})
    SamplesLog(path, resume_at=1).log({"step": 2, "prompt": "b"})
    assert [(line["step"], line["prompt"]) for line in lines(path)] == [(1, "a"), (1, "a"), (2, "b")]
