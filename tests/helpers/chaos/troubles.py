"""Files that may not grow, little memory, data that vanishes, signals; and faults planted into the product.

Each trouble ends the process with one error line, or the run continues; afterwards it must equal the straight run.
"""

import random
import resource
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from chaos import faults
from chaos.faults import Point
from chaos.kills import Outcome, finish, unclean
from chaos.world import STEPS, Run, World
from rlhf_cli import runs, terminal
from rlhf_cli.ppo.trainer import PPOTrainer
from rlhf_cli.runs import stage_folder
from rlhf_cli.stages.common import trl_trainer
from rlhf_cli.tracking import logs


def full_quota(world: World, stage: str, seed: int) -> Outcome:
    """No file may grow beyond a size: writes fail as on a full disk, for any user."""
    outcome, folder = Outcome(f"{stage}: files may not grow"), world.trial(stage, f"fsize-{seed}")
    largest = max(path.stat().st_size for path in (world.origin / stage).rglob("*") if path.is_file())
    limit = int(random.Random(seed).uniform(0.1, 0.9) * largest)

    def limit_files(_: Path) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    run = Run(stage, folder, before=limit_files)
    run.wait()
    outcome.wrong = [*unclean(run), *finish(world, stage, folder)]
    return outcome


def little_memory(world: World, stage: str, seed: int) -> Outcome:
    """From a step on the process may not grow: one error line and exit code 1, or the run continues."""
    outcome, folder = Outcome(f"{stage}: no more memory"), world.trial(stage, f"memory-{seed}")
    step = random.Random(seed).randint(1, STEPS - 2)

    def starve(place: Path) -> None:
        threading.Thread(target=partial(_limit_memory, place / "metrics.jsonl", step), daemon=True).start()

    run = Run(stage, folder, before=starve)
    if run.wait():
        outcome.wrong += unclean(run)
    outcome.wrong += finish(world, stage, folder)
    return outcome


def _limit_memory(metrics: Path, step: int) -> None:
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= step):
        time.sleep(0.002)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), resource.RLIM_INFINITY))


def vanished_data(world: World, stage: str, seed: int) -> Outcome:
    """Data that vanish after they were read do not end a run; a start without them is refused."""
    outcome, folder = Outcome(f"{stage}: data vanishes"), world.trial(stage, f"data-{seed}")
    run = Run(stage, folder)
    run.wait_for_step(random.Random(seed).randint(2, STEPS - 3))
    run.signal(signal.SIGKILL)
    run.wait()
    (folder / "data").rename(folder / "gone")
    run = Run(stage, folder)
    if run.wait() != 2 or "error[D01]" not in run.output() or "Traceback" in run.output():
        outcome.wrong.append(f"without its data it ended with {run.code}: {run.output()[-300:]}")
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
    how = f"{signal.Signals(number).name}{'-twice' if twice else ''}"
    outcome, folder = Outcome(f"{stage}: {how}"), world.trial(stage, f"{how}-{seed}")
    draw = random.Random(f"{seed}{how}")
    run = Run(stage, folder)
    run.wait_for_step(draw.randint(1, STEPS - 3))
    run.signal(number)
    if twice:
        time.sleep(draw.uniform(0, 0.4))  # soon after the first one, it counts as the same signal
        run.signal(number)
    code, expected = run.wait(), 128 + number
    if code not in ({expected, -number} if twice else {expected}) or "Traceback" in run.output():
        outcome.wrong.append(f"exit code {code}, not {expected}: {run.output()[-300:]}")
    with terminal.muted_warnings():
        state = runs.latest_state(run.folder / "state")
    if not twice and (state is None or int(state.name.replace("-", "_").rpartition("_")[2]) != run.step()):
        outcome.wrong.append(f"stopped at step {run.step()}, the newest checkpoint is {state}")
    outcome.wrong += finish(world, stage, folder)
    return outcome


SIGNALS = [
    partial(stopped, number=number, twice=twice)
    for number in (signal.SIGTERM, signal.SIGINT)
    for twice in (False, True)
]
TROUBLES: list[Callable[[World, str, int], Outcome]] = [full_quota, little_memory, vanished_data, *SIGNALS]


# Planted faults


def _keep_coefficient(self: PPOTrainer, state: dict[str, Any], plain: Any = PPOTrainer.load_state_dict) -> None:
    plain(self, state | {"kl_coef": self.settings.kl_coef})


LATE = Point("write metrics.jsonl", "half", STEPS - 1)  # a run with few steps left
# name -> (stage, where its run is killed, what is replaced before it resumes: owner, name and value)
PLANTED: dict[str, tuple[str, Point, tuple[Any, str, Any]]] = {
    "coefficient forgotten": ("ppo", LATE, (PPOTrainer, "load_state_dict", _keep_coefficient)),
    "log not cut": (
        "ppo",
        LATE,
        (logs, "_truncate", lambda path, position: path.read_bytes() if path.exists() else b""),
    ),
    "litter left": (
        "ppo",
        Point("remove state/.trash-#-step_#-#", "before", STEPS // 3 - 2),
        (stage_folder, "clear_leftovers", lambda folder: None),
    ),
    "random numbers forgotten": (
        "sft",
        Point("write metrics.jsonl", "after", STEPS),
        (trl_trainer.TrainerMixin, "_load_rng_state", lambda self, checkpoint: None),
    ),
}


def planted(world: World, name: str) -> Outcome:
    """Kill a run and resume it with a planted fault: it must differ from the straight run."""
    stage, point, replacement = PLANTED[name]
    folder = world.trial(stage, f"planted-{name.replace(' ', '-')}")
    run = Run(stage, folder, before=partial(faults.install, point=point))
    assert run.wait() == -signal.SIGKILL, run.output()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*replacement, raising=False)
        different = finish(world, stage, folder)
    return Outcome(name, wrong=[] if different else ["the planted fault was not found"])
