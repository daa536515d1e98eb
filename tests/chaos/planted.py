"""Faults planted into the product, one at a time: the harness must see each."""

import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from chaos import faults
from chaos.faults import Point
from chaos.kills import finished
from chaos.runs import STEPS, Run, World
from rlhf_cli.ppo.trainer import PPOTrainer
from rlhf_cli.runs import checkpoints
from rlhf_cli.stages import trl_common
from rlhf_cli.tracking import metrics_log

Undo = Callable[[], None]


def _replace(owner: Any, name: str, value: Any) -> Undo:
    plain = owner.__dict__[name]
    setattr(owner, name, value)
    return partial(setattr, owner, name, plain)


def scheduler_forgotten() -> Undo:
    """A PPO state does not bring the schedule back."""
    plain = PPOTrainer.load_state_dict

    def load(self: PPOTrainer, state: dict[str, Any]) -> None:
        plain(self, state | {"scheduler": self.scheduler.state_dict()})

    return _replace(PPOTrainer, "load_state_dict", load)


def coefficient_forgotten() -> Undo:
    """A PPO state does not bring the adapted kl_coef back."""
    plain = PPOTrainer.load_state_dict
    return _replace(
        PPOTrainer, "load_state_dict", lambda self, state: plain(self, state | {"kl_coef": self.settings.kl_coef})
    )


def log_not_cut() -> Undo:
    """Lines of steps that are made again stay in the logs."""
    return _replace(metrics_log, "_truncate", lambda path, mark: path.read_bytes() if path.exists() else b"")


def state_believed() -> Undo:
    """The newest folder is the state, whatever is in it."""
    return _replace(checkpoints, "_problem", lambda state, content=True: None)


def random_numbers_forgotten() -> Undo:
    """A checkpoint does not bring the generators back, which draw the dropout."""
    trl_common.TrainerMixin._load_rng_state = lambda self, checkpoint: None
    return partial(delattr, trl_common.TrainerMixin, "_load_rng_state")


def litter_left() -> Undo:
    """What a killed process left half written stays."""
    return _replace(sys.modules["rlhf_cli.runs.stage_folder"], "clear_leftovers", lambda folder: None)


LATE = Point("write metrics.jsonl", "half", STEPS - 1)  # a run that has few steps left, which more than one fault needs
# name -> (stage, where its run is killed, what is planted before it goes on)
FAULTS: dict[str, tuple[str, Point, Callable[[], Undo]]] = {
    "scheduler forgotten": ("ppo", LATE, scheduler_forgotten),
    "coefficient forgotten": ("ppo", LATE, coefficient_forgotten),
    "log not cut": ("ppo", LATE, log_not_cut),
    "litter left": ("ppo", Point("remove state/.trash-step_#-#", "before", STEPS // 3 - 2), litter_left),
    "state believed": ("sft", Point("save state/checkpoint-#/model.safetensors", "half", STEPS // 3), state_believed),
    "random numbers forgotten": ("sft", Point("write metrics.jsonl", "after", STEPS), random_numbers_forgotten),
}


def all_seen(world: World) -> dict[str, list[str]]:
    """What the harness says of runs that were killed once and go on with each fault, by its name, and with none."""
    found: dict[str, list[str]] = {"none": []}
    for number, (stage, point) in enumerate(dict.fromkeys((stage, point) for stage, point, _ in FAULTS.values())):
        killed = world.trial(stage, f"planted-{number}")
        run = Run(stage, killed, before=partial(_install, point))
        assert run.wait() == -signal.SIGKILL, run.said()
        for name, (*where, plant) in FAULTS.items():
            if where == [stage, point]:
                copy = shutil.copytree(killed, killed.with_name(f"{stage}-{name.replace(' ', '-')}"), symlinks=True)
                undo = plant()
                try:
                    found[name] = finished(world, stage, copy)
                finally:
                    undo()
        found["none"] += finished(world, stage, killed)
    return found


def _install(point: Point, folder: Path) -> None:
    faults.install(folder, point)
