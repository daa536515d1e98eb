"""`rlhf report --watch`: when the page is drawn again, and when that ends."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_config import write_configs
from report_run import write_run

from rlhf_cli import terminal
from rlhf_cli.commands import watch
from rlhf_cli.report import html
from rlhf_cli.report.show import Page

PAGE = Page(Path("page.html"), [], "")
RUNNING = ("wait", 1.0)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """The seconds between reloads of each page that was drawn; the clock moves by the pauses alone."""
    now = [0.0]
    drawn: list[float | None] = []
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(watch.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(watch, "draw_page", lambda *_, reload_s=None: drawn.append(reload_s) or PAGE)
    monkeypatch.setattr(watch, "write_page", lambda *_: PAGE)
    return drawn


def give(monkeypatch: pytest.MonkeyPatch, *states: Any) -> None:
    """The states of the run as they are read one after the other: the next action, and when it last wrote."""
    left = list(states)
    stage = SimpleNamespace(process="p", progress=SimpleNamespace(step=3, steps=8))

    def read(folder: Path) -> Any:
        state = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(state, type):
            raise state
        action, changed = state
        stages = {"ppo": stage} if action == "wait" else {}
        return SimpleNamespace(name="run", changed=changed, all_stages=stages), SimpleNamespace(action=action)

    monkeypatch.setattr(watch, "_read", read)


def test_it_is_drawn_when_the_run_wrote_and_at_the_end(
    drawn: list, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give(monkeypatch, RUNNING, RUNNING, ("wait", 2.0), ("run", 2.0), ("nothing", 3.0))
    assert watch.watch([Path("run")], None, "last") is PAGE
    assert drawn == [10.0, 10.0, 10.0, None], "the last page does not reload"
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["report   drawn: run: ppo step 3 of 8"] * 2 + ["report   drawn: run: finished"]


def test_it_ends_if_nothing_runs(drawn: list, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    give(monkeypatch, ("run", 1.0))
    watch.watch([Path("run")], None, "last")
    assert drawn == [10.0, None] and "no stage runs since 2 min" in capsys.readouterr().err


def test_ctrl_c_ends_it(drawn: list, monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, RUNNING, KeyboardInterrupt)
    watch.watch([Path("run")], None, "last")
    assert drawn == [10.0, None] and not terminal.emitted_warnings()


def test_it_waits_for_the_first_stage(
    here: Path, drawn: list, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "run").mkdir()
    write_configs(here / "run")
    pause = watch.time.sleep
    monkeypatch.setattr(watch.time, "sleep", lambda seconds: (pause(seconds), write_run(here / "run")))
    give(monkeypatch, ("nothing", 1.0))
    watch.watch([Path("run")], None, "last")
    assert drawn == [10.0, None]
    assert "report   waits for the first stage of run\n" in capsys.readouterr().err


def test_a_watched_page_reloads_itself() -> None:
    page = f"<head>\n{html.GENERATOR_TAG}\n</head>{html.GENERATOR_TAG}"
    assert html.with_reload(page, 10.0).count('<meta http-equiv="refresh" content="10">') == 1
