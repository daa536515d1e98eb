"""Progress: a live bar on a terminal, plain lines elsewhere, and nested work."""

import io
import sys

import pytest
from fake_terminal import Tty

from rlhf_cli import distributed, progress, terminal
from rlhf_cli.progress import Progress, track_progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be set."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_progress_off_a_terminal_is_a_line_at_most_every_ten_seconds(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress("ppo\x1b", 30, "update") as bar:
        for step in range(1, 31):
            clock[0] += 1
            bar.advance(note=f"reward\x1b {step}")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "ppo 10/30 update, 1 update/s, 20 s left, reward 10",
        "ppo 20/30 update, 1 update/s, 10 s left, reward 20",
        "ppo 30/30 update, 1 update/s, 30 s in all, reward 30",
    ]


@pytest.mark.parametrize(
    ("total", "earlier", "seconds", "done", "line"),
    [
        (1000, 0, 40, 10, "ppo 10/1000 update, 4 s/update, 1 h 6 min left"),
        (100, 90, 20, 1, "ppo 91/100 update, 20 s/update, 3 min left"),
    ],
)
def test_the_rate_of_slow_steps_without_those_done_earlier(
    total: int, earlier: int, seconds: int, done: int, line: str, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress("ppo", total, "update", done=earlier) as bar:
        clock[0] += seconds
        bar.advance(done)
    assert capsys.readouterr().err.splitlines()[0] == line


def test_interrupted_progress_prints_how_far_it_came(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError), Progress("sft", 3) as bar:
        bar.advance()
        raise RuntimeError
    assert capsys.readouterr().err.startswith("sft 1/3 step")


def test_progress_on_a_terminal_is_a_live_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Tty())
    monkeypatch.setattr(sys, "stdout", results := io.StringIO())
    with Progress("ppo", 2) as bar:
        bar.advance(note="[bold]reward\x1b[2J 1")
        terminal.out("result")
        terminal.say("a log line")
        bar.advance()
    assert "2/2" in screen.getvalue() and "[bold]reward[2J 1" in screen.getvalue() and "a log line" in screen.getvalue()
    assert results.getvalue() == "result\n"


def test_inner_progress_is_printed_last(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("ppo", 2, "update") as bar:
        for _ in track_progress("update: epoch", range(4)):
            for _ in track_progress("of one alone", range(1)):
                for _ in track_progress("micro-batch", range(3)):
                    clock[0] += 4
        bar.advance(note="reward 1")
    assert capsys.readouterr().err.splitlines() == [
        "ppo 0/2 update, update: epoch 0/4, micro-batch 3/3",
        "ppo 0/2 update, update: epoch 1/4, micro-batch 3/3",
        "ppo 0/2 update, update: epoch 2/4, micro-batch 3/3",
        "ppo 0/2 update, update: epoch 3/4, micro-batch 3/3",
        "ppo 1/2 update, 48 s/update, 48 s left, reward 1",
    ]


def test_inner_progress_after_the_last_step_is_printed(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    """Such as an evaluation after the last step, which may take longer than the steps."""
    with Progress("sft", 1) as bar:
        clock[0] += 1
        bar.advance()
        for _ in track_progress("evaluation: batch", range(3)):
            clock[0] += 60
    assert [line.partition(", evaluation: ")[2] for line in capsys.readouterr().err.splitlines()] == [
        "batch 1/3", "batch 2/3", "batch 3/3", ""
    ]  # fmt: skip


def test_without_a_progress_nothing_is_printed(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Tty())
    seen = []
    for item in track_progress("rollout: token", range(3)):
        clock[0] += 60
        seen.append(item)
    assert seen == [0, 1, 2] and screen.getvalue() == "" and progress._open == []


def test_nested_progress_ends_with_a_loop_that_is_left_early_and_with_an_error() -> None:
    with Progress("ppo", 1) as bar:
        for _ in track_progress("rollout: token", range(9)):
            assert bar.nested_status() == "rollout: token 0/9"
            break
        assert bar.nested_status() == ""
    with pytest.raises(KeyError), Progress("ppo", 1):
        open_still = track_progress("rollout: token", range(9))
        next(open_still)
        raise KeyError
    assert progress._open == []
    with Progress("eval", 1) as bar:
        open_still.close()
        assert progress._open == [bar]


def test_brief_work_is_shown_only_when_it_takes_long(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("data", 3, "row", brief=True) as bar:
        clock[0] += 9
        bar.advance()
    assert capsys.readouterr().err == ""
    with Progress("data", 3, "row", brief=True) as bar:
        clock[0] += 12
        bar.advance()
        clock[0] += 12
        bar.advance(2)
    assert capsys.readouterr().err.splitlines() == [
        "data 1/3 row, 12 s/row, 24 s left",
        "data 3/3 row, 8 s/row, 24 s in all",
    ]


def test_brief_work_on_a_terminal(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Tty())
    with Progress("data", 3, "row", brief=True) as bar:
        clock[0] += 1
        bar.advance()
        assert screen.getvalue() == ""
        clock[0] += 2
        bar.advance()
    assert "data" in screen.getvalue() and "2/3" in screen.getvalue()


def test_the_bar_shows_inner_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Tty())
    with Progress("ppo", 2, "update") as bar:
        for token in track_progress("rollout: token", range(53)):
            if token == 31:
                assert bar._bar
                bar._bar.refresh()
                assert "rollout: token 31/53" in screen.getvalue()
        bar.advance()
    last = screen.getvalue().rpartition("1/2")[2]
    assert last != screen.getvalue() and "rollout" not in last


def test_only_the_main_process_shows_progress(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Tty())
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with Progress("ppo", 2) as bar:
        clock[0] += 11
        bar.advance()
    assert not distributed.is_main_process() and screen.getvalue() == ""
