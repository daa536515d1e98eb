"""`rlhf report --watch`: draw the page again while a run trains."""

import time
from collections.abc import Sequence
from pathlib import Path

from rlhf_cli import terminal
from rlhf_cli.errors import shown
from rlhf_cli.pipeline.status import NextAction, read_run_and_next
from rlhf_cli.report.show import Page, draw_page, write_page
from rlhf_cli.runs.layout import STAGES, configs_in, has_output
from rlhf_cli.runs.read import Run

INTERVAL_S = 10.0  # between looks at the runs, and reloads in the browser
SHORT_S = 2.0  # between looks for a first output
IDLE_S = 120.0  # without a process that trains: between two stages there is none for some seconds


def watch(folders: Sequence[Path], out: Path | None, step: str) -> Page:
    """Draw the page of runs whenever one has written something, until nothing is left to run or nothing runs.

    Ctrl-C ends it, too. The browser reloads the page while it is watched. Raises RLHFError as `draw_page` does.
    """
    _wait_for_output(folders)
    page = write_page(folders, out, step)
    drawn_at: list[float] = []
    idle_since = time.monotonic()
    try:
        while True:
            states = [_read(folder) for folder in folders]
            changed = [run.changed for run, _ in states]
            if changed != drawn_at:
                page = draw_page(folders, page.path, step, reload_s=INTERVAL_S)
                drawn_at = changed
                terminal.say(f"report   drawn: {', '.join(map(_progress, states))}")

            actions = {following.action for _, following in states}
            if actions == {"nothing"}:
                break
            if "wait" in actions:
                idle_since = time.monotonic()
            if time.monotonic() - idle_since > IDLE_S:
                terminal.say(f"report   no stage runs since {terminal.duration(IDLE_S)}")
                break
            time.sleep(INTERVAL_S)
    except KeyboardInterrupt:
        terminal.say("report   stopped")
    return draw_page(folders, page.path, step)  # one that does not reload


def _wait_for_output(folders: Sequence[Path]) -> None:
    """Wait for the first stage of each run to start, for a while."""
    began = time.monotonic()
    while time.monotonic() - began < IDLE_S:
        waiting = [folder for folder in folders if not _has_output(folder)]
        if not waiting:
            return
        terminal.log_once(f"report   waits for the first stage of {', '.join(map(shown, waiting))}")
        time.sleep(SHORT_S)


def _has_output(folder: Path) -> bool:
    """Return True if there is something to draw, or no run."""
    return not configs_in(folder) or any(has_output(folder / stage) for stage in STAGES)


def _read(folder: Path) -> tuple[Run, NextAction]:
    with terminal.muted_warnings():
        return read_run_and_next(folder)


def _progress(state: tuple[Run, NextAction]) -> str:
    """Return how far a run is: `ppo step 15 of 100`."""
    run, following = state
    for name, stage in run.all_stages.items():
        if stage.process:
            return f"{run.name}: {name} {_step(stage.progress.step, stage.progress.steps)}".rstrip()
    return f"{run.name}: {'finished' if following.action == 'nothing' else 'no stage runs'}"


def _step(step: int | None, steps: int | None) -> str:
    if step is None:
        return ""
    return f"step {step} of {steps}" if steps else f"step {step}"
