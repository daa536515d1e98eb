"""What else befalls a run: a full disk, too little memory, a data file that vanishes, and signals that ask it to stop.

Each ends the process in a clean line, or lets it go on by right; afterwards the run ends as the straight one did.
"""

import os
import random
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from chaos.kills import Outcome, finished
from chaos.points import unclean
from chaos.runs import STEPS, Run, World
from rlhf_cli import runs, terminal


def full_disk(world: World, stage: str, seed: int) -> Outcome:
    """A run on a disk of its own that is too small, then made larger. Only root may mount one.

    It holds three states, so that the look at the disk before the run lets it begin, and next to nothing beside them.
    """
    outcome, folder = Outcome(f"{stage}: a full disk"), world.trial(stage, f"tmpfs-{seed}")
    size = max(_size(state) for state in (world.origin / stage / "state").iterdir())
    place = folder / stage
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={3 * size + 8192}", "tmpfs", str(place)], check=True)
    try:
        run = Run(stage, folder)
        outcome.wrong += unclean(run, run.wait())
        outcome.how = _how(run)
        subprocess.run(["mount", "-o", f"remount,size={4 * _size(world.origin / stage)}", str(place)], check=True)
        outcome.wrong += finished(world, stage, folder, keep=True)
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
    return outcome


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def may_mount() -> bool:
    """Whether this user may make a small disk."""
    return os.geteuid() == 0 and subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0


def full_quota(world: World, stage: str, seed: int) -> Outcome:
    """No file may grow beyond a size: writes fail as on a full disk, for any user."""
    outcome, folder = Outcome(f"{stage}: files may not grow"), world.trial(stage, f"fsize-{seed}")
    largest = max(path.stat().st_size for path in (world.origin / stage).rglob("*") if path.is_file())
    limit = int(random.Random(seed).uniform(0.1, 0.9) * largest)
    run = Run(stage, folder, before=partial(_limit_files, limit))
    outcome.wrong += unclean(run, run.wait())
    outcome.how = _how(run)
    outcome.wrong += finished(world, stage, folder)
    return outcome


def _limit_files(size: int, folder: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def little_memory(world: World, stage: str, seed: int) -> Outcome:
    """In the middle of the run no more memory can be had: a line and exit code 1, or the run goes on by right."""
    outcome, folder = Outcome(f"{stage}: no more memory"), world.trial(stage, f"memory-{seed}")
    run = Run(stage, folder, before=partial(_starve, random.Random(seed).randint(1, STEPS - 2)))
    if code := run.wait():
        outcome.wrong += unclean(run, code)
    outcome.how = _how(run)
    outcome.wrong += finished(world, stage, folder)
    return outcome


def _starve(step: int, folder: Path) -> None:
    """From `step` on the process may not grow."""

    def watch() -> None:
        metrics = folder / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= step):
            time.sleep(0.002)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), resource.RLIM_INFINITY))

    threading.Thread(target=watch, daemon=True).start()


def vanished_data(world: World, stage: str, seed: int) -> Outcome:
    """The data goes in the middle of a run, which has read it; a start without it says so; then it is back."""
    outcome, folder = Outcome(f"{stage}: data vanishes"), world.trial(stage, f"data-{seed}", data=True)
    run = Run(stage, folder)
    _reach(run, random.Random(seed).randint(2, STEPS - 3))
    (folder / "data").rename(folder / "gone")
    run.signal(signal.SIGKILL)
    run.wait()
    run = Run(stage, folder)
    said = (run.wait(), run.said().count("error[D01]"), "Traceback" in run.said())
    if said[0] != 2 or not said[1] or said[2]:
        outcome.wrong.append(f"without its data it ended with {said[0]}: {run.said()[-300:]}")
    outcome.how = _how(run)
    (folder / "gone").rename(folder / "data")
    run = Run(stage, folder)
    _reach(run, STEPS // 2)
    (folder / "data").rename(folder / "gone")
    if code := run.wait():
        outcome.wrong.append(f"it had read its data, and ended with {code}: {run.said()[-300:]}")
    (folder / "gone").rename(folder / "data")
    outcome.wrong += finished(world, stage, folder)
    return outcome


def stopped(world: World, stage: str, seed: int, *, number: int, twice: bool) -> Outcome:
    """SIGTERM or SIGINT at a random step: saved at once, 143 or 130. A second one ends the process there and then."""
    how = f"{signal.Signals(number).name}{' twice' if twice else ''}"
    outcome, folder = Outcome(f"{stage}: {how}"), world.trial(stage, f"{how.replace(' ', '-')}-{seed}")
    draw = random.Random(f"{seed}{how}")
    run = Run(stage, folder)
    _reach(run, draw.randint(1, STEPS - 3))
    run.signal(number)
    if twice:
        time.sleep(draw.uniform(0, 0.4))  # below ONE_BLOW it is the same wish
        run.signal(number)
    code, asked = run.wait(), 128 + number
    outcome.how = _how(run)
    if code not in ({asked, -number} if twice else {asked}):
        outcome.wrong.append(f"exit code {code}, not {asked}: {run.said()[-300:]}")
    with terminal.muted_warnings():
        state = runs.latest_state(run.folder / "state")
    if not twice and (state is None or int(state.name.replace("-", "_").rpartition("_")[2]) != run.step()):
        outcome.wrong.append(f"stopped at step {run.step()}, the newest state is {state}")
    if "Traceback" in run.said():
        outcome.wrong.append(f"a traceback: {run.said()[-300:]}")
    outcome.wrong += finished(world, stage, folder)
    return outcome


def _how(run: Run) -> str:
    """How a process ended: its code, its last step, and the code of its error."""
    error = next((f", {line[:10]}" for line in run.said().splitlines() if line.startswith("error[")), "")
    return f"{run.code} at step {run.step()}{error}"


def _reach(run: Run, step: int) -> None:
    while run.alive() and not run.made(step):
        time.sleep(0.002)


def kinds() -> list[Callable[[World, str, int], Outcome]]:
    """All troubles; a small disk only where this user may make one."""
    stops = [
        partial(stopped, number=number, twice=twice)
        for number in (signal.SIGTERM, signal.SIGINT)
        for twice in (False, True)
    ]
    disks = [full_disk, full_quota] if may_mount() else [full_quota]
    return [*disks, little_memory, vanished_data, *stops]
