"""Full disks, little memory, data that vanishes, signals; and faults planted into the product, which must be found.

Each trouble ends the process in a clean line, or the run continues; afterwards it must equal the straight run.
"""

import os
import random
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from chaos import faults
from chaos.faults import Point
from chaos.trials import Outcome, finish, unclean
from chaos.world import STEPS, Run, World
from rlhf_cli import runs, terminal, tracking
from rlhf_cli.ppo.trainer import PPOTrainer
from rlhf_cli.runs import checkpoints, stage_folder
from rlhf_cli.stages import trl_common


def full_disk(world: World, stage: str, seed: int) -> Outcome:
    """A disk that holds three checkpoints and little more, so that the check before the run passes; then a larger one.

    Only root may mount one.
    """
    outcome, folder = Outcome(f"{stage}: a full disk"), world.trial(stage, f"tmpfs-{seed}")
    size = max(_size(state) for state in (world.origin / stage / "state").iterdir())
    place = folder / stage
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={3 * size + 8192}", "tmpfs", str(place)], check=True)
    try:
        run = Run(stage, folder)
        outcome.wrong += unclean(run, run.wait())
        outcome.end = run.end()
        subprocess.run(["mount", "-o", f"remount,size={4 * _size(world.origin / stage)}", str(place)], check=True)
        outcome.wrong += finish(world, stage, folder, keep=True)
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
    return outcome


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def full_quota(world: World, stage: str, seed: int) -> Outcome:
    """No file may grow beyond a size: writes fail as on a full disk, for any user."""
    outcome, folder = Outcome(f"{stage}: files may not grow"), world.trial(stage, f"fsize-{seed}")
    largest = max(path.stat().st_size for path in (world.origin / stage).rglob("*") if path.is_file())
    limit = int(random.Random(seed).uniform(0.1, 0.9) * largest)

    def limit_files(_: Path) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    run = Run(stage, folder, before=limit_files)
    outcome.wrong += unclean(run, run.wait())
    outcome.end = run.end()
    outcome.wrong += finish(world, stage, folder)
    return outcome


def little_memory(world: World, stage: str, seed: int) -> Outcome:
    """From a step on the process may not grow: one error line and exit code 1, or the run continues."""
    outcome, folder = Outcome(f"{stage}: no more memory"), world.trial(stage, f"memory-{seed}")
    step = random.Random(seed).randint(1, STEPS - 2)

    def starve(place: Path) -> None:
        threading.Thread(target=partial(_limit_memory, place / "metrics.jsonl", step), daemon=True).start()

    run = Run(stage, folder, before=starve)
    if code := run.wait():
        outcome.wrong += unclean(run, code)
    outcome.end = run.end()
    outcome.wrong += finish(world, stage, folder)
    return outcome


def _limit_memory(metrics: Path, step: int) -> None:
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= step):
        time.sleep(0.002)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), resource.RLIM_INFINITY))


def vanished_data(world: World, stage: str, seed: int) -> Outcome:
    """Data that vanish after they were read do not end a run; a start without them is refused."""
    outcome, folder = Outcome(f"{stage}: data vanishes"), world.trial(stage, f"data-{seed}", copy_data=True)
    run = Run(stage, folder)
    run.wait_for_step(random.Random(seed).randint(2, STEPS - 3))
    (folder / "data").rename(folder / "gone")
    run.signal(signal.SIGKILL)
    run.wait()
    run = Run(stage, folder)
    if run.wait() != 2 or "error[D01]" not in run.output() or "Traceback" in run.output():
        outcome.wrong.append(f"without its data it ended with {run.code}: {run.output()[-300:]}")
    outcome.end = run.end()
    (folder / "gone").rename(folder / "data")
    run = Run(stage, folder)
    run.wait_for_step(STEPS // 2)
    (folder / "data").rename(folder / "gone")
    if code := run.wait():
        outcome.wrong.append(f"it had read its data, and ended with {code}: {run.output()[-300:]}")
    (folder / "gone").rename(folder / "data")
    outcome.wrong += finish(world, stage, folder)
    return outcome


def stopped(world: World, stage: str, seed: int, *, number: int, twice: bool) -> Outcome:
    """SIGTERM or SIGINT at a random step: the run saves and exits with 143 or 130. A second one ends it at once."""
    how = f"{signal.Signals(number).name}{' twice' if twice else ''}"
    outcome, folder = Outcome(f"{stage}: {how}"), world.trial(stage, f"{how.replace(' ', '-')}-{seed}")
    draw = random.Random(f"{seed}{how}")
    run = Run(stage, folder)
    run.wait_for_step(draw.randint(1, STEPS - 3))
    run.signal(number)
    if twice:
        time.sleep(draw.uniform(0, 0.4))  # soon after the first one, it counts as the same signal
        run.signal(number)
    code, expected = run.wait(), 128 + number
    outcome.end = run.end()
    if code not in ({expected, -number} if twice else {expected}):
        outcome.wrong.append(f"exit code {code}, not {expected}: {run.output()[-300:]}")
    with terminal.muted_warnings():
        state = runs.latest_state(run.folder / "state")
    if not twice and (state is None or int(state.name.replace("-", "_").rpartition("_")[2]) != run.step()):
        outcome.wrong.append(f"stopped at step {run.step()}, the newest checkpoint is {state}")
    if "Traceback" in run.output():
        outcome.wrong.append(f"a traceback: {run.output()[-300:]}")
    outcome.wrong += finish(world, stage, folder)
    return outcome


def kinds() -> list[Callable[[World, str, int], Outcome]]:
    """Return all troubles; the small disk only for users who may mount one."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    stops = [partial(stopped, number=number, twice=twice) for number in numbers for twice in (False, True)]
    may_mount = os.geteuid() == 0 and subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0
    return [*([full_disk] if may_mount else []), full_quota, little_memory, vanished_data, *stops]


# Planted faults


def _load_state(change: Callable[[PPOTrainer], dict[str, Any]]) -> Callable[[pytest.MonkeyPatch], None]:
    """Plant a `load_state_dict` that keeps a part of the trainer's own state."""
    plain = PPOTrainer.load_state_dict
    load = lambda self, state: plain(self, state | change(self))  # noqa: E731
    return lambda patch: patch.setattr(PPOTrainer, "load_state_dict", load)


def _replace(owner: Any, name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(owner, name, value, raising=False)


def _keep_log(path: Path, position: Any) -> bytes:
    return path.read_bytes() if path.exists() else b""


LATE = Point("write metrics.jsonl", "half", STEPS - 1)  # a run with few steps left, for several faults
# name -> (stage, where its run is killed, fault planted before it resumes)
FAULTS: dict[str, tuple[str, Point, Callable[[pytest.MonkeyPatch], None]]] = {
    "scheduler forgotten": ("ppo", LATE, _load_state(lambda trainer: {"scheduler": trainer.scheduler.state_dict()})),
    "coefficient forgotten": ("ppo", LATE, _load_state(lambda trainer: {"kl_coef": trainer.settings.kl_coef})),
    "log not cut": ("ppo", LATE, _replace(tracking, "_truncate", _keep_log)),
    "litter left": (
        "ppo",
        Point("remove state/.trash-step_#-#", "before", STEPS // 3 - 2),
        _replace(stage_folder, "clear_leftovers", lambda folder: None),
    ),
    "state believed": (
        "sft",
        Point("save state/checkpoint-#/model.safetensors", "half", STEPS // 3),
        _replace(checkpoints, "_problem", lambda state, content=True: None),
    ),
    "random numbers forgotten": (
        "sft",
        Point("write metrics.jsonl", "after", STEPS),
        _replace(trl_common.TrainerMixin, "_load_rng_state", lambda self, checkpoint: None),
    ),
}


def all_seen(world: World) -> dict[str, list[str]]:
    """Return the differences of runs that were killed once and resumed with each fault, by its name, and with none."""
    found: dict[str, list[str]] = {"none": []}
    for number, (stage, point) in enumerate(dict.fromkeys((stage, point) for stage, point, _ in FAULTS.values())):
        killed = world.trial(stage, f"planted-{number}")
        run = Run(stage, killed, before=partial(_install, point))
        assert run.wait() == -signal.SIGKILL, run.output()
        for name, (*where, plant) in FAULTS.items():
            if where == [stage, point]:
                copy = shutil.copytree(killed, killed.with_name(f"{stage}-{name.replace(' ', '-')}"), symlinks=True)
                with pytest.MonkeyPatch.context() as patch:
                    plant(patch)
                    found[name] = finish(world, stage, copy)
        found["none"] += finish(world, stage, killed)
    return found


def _install(point: Point, folder: Path) -> None:
    faults.install(folder, point)
