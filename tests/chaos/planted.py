"""Faults planted into the product, one at a time: the harness must see each."""

import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from chaos import faults
from chaos.faults import Point
from chaos.kills import finished
from chaos.runs import Run, World
from rlhf_cli import tracking
from rlhf_cli.checkpoints import states
from rlhf_cli.ppo.trainer import PPOTrainer
from rlhf_cli.stages import trl_training

Undo = Callable[[], None]
IN_A_STATE = {"sft": "save state/checkpoint-#/model.safetensors", "ppo": "save state/.tmp-step_#-#/tensors.safetensors"}


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
    return _replace(tracking, "_cut", lambda path, mark: path.read_bytes() if path.exists() else b"")


def state_believed() -> Undo:
    """The newest folder is the state, whatever is in it."""
    return _replace(states, "_problem", lambda state, content=True: None)


def random_numbers_forgotten() -> Undo:
    """A checkpoint does not bring the generators back, which draw the dropout."""
    trl_training.PlainTrainer._load_rng_state = lambda self, checkpoint: None
    return partial(delattr, trl_training.PlainTrainer, "_load_rng_state")


def litter_left() -> Undo:
    """What a killed process left half written stays."""
    return _replace(sys.modules["rlhf_cli.checkpoints.outputs"], "clear_leftovers", lambda folder: None)


# name -> (stage, where its run is killed, what is planted)
FAULTS: dict[str, tuple[str, Point, Callable[[], Undo]]] = {
    "scheduler forgotten": ("ppo", Point(IN_A_STATE["ppo"], "half", 4), scheduler_forgotten),
    "coefficient forgotten": ("ppo", Point(IN_A_STATE["ppo"], "half", 4), coefficient_forgotten),
    "log not cut": ("ppo", Point("write metrics.jsonl", "half", 8), log_not_cut),
    "litter left": ("ppo", Point("remove state/.trash-step_#-#", "before", 6), litter_left),
    "state believed": ("sft", Point(IN_A_STATE["sft"], "half", 4), state_believed),
    "random numbers forgotten": ("sft", Point("write metrics.jsonl", "after", 8), random_numbers_forgotten),
}


def seen(world: World, name: str) -> list[str]:
    """What the harness says of a run that is killed once, with the fault in the product."""
    stage, point, plant = FAULTS[name]
    undo = plant()
    try:
        return _killed_once(world, stage, point, name)
    finally:
        undo()


def _killed_once(world: World, stage: str, point: Point, name: str) -> list[str]:
    folder = world.trial(stage, name.replace(" ", "-"))
    run = Run(stage, folder, before=partial(_install, point))
    assert run.wait() == -signal.SIGKILL, run.said()
    return finished(world, stage, folder)


def _install(point: Point, folder: Path) -> None:
    faults.install(folder, point)


def all_seen(world: World) -> dict[str, list[str]]:
    """What differs with each fault, by its name, and with none of them."""
    found = {name: seen(world, name) for name in FAULTS}
    one_of_each = {stage: point for stage, point, _ in FAULTS.values()}
    found["none"] = [text for stage, point in one_of_each.items() for text in _killed_once(world, stage, point, "none")]
    return found
