"""Memory of one of our stages, run through its command, and the estimate of `rlhf plan`; one line of JSON.

    python -m benchmarks.memory.ours ppo BIG/ppo.yaml SMALL/ppo.yaml

SMALL is the same stage with tiny sizes. It loads the libraries of the stage, whose memory is subtracted.
"""

import io
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import nn

from benchmarks.memory import tensors
from rlhf_cli.cli import app
from rlhf_cli.stages.common import trl_training
from rlhf_cli.stages.ppo.runner import PPORunner


def ppo_models(runner: PPORunner) -> dict[str, nn.Module]:
    trainer = runner.trainer
    rewards: dict[str, Any] = {f"reward {name}": source.model for name, source in trainer.rewards.items()}
    return {"policy": trainer.policy, "reference": trainer.ref, "value": trainer.value, **rewards}


def trl_model(trainer: Any) -> dict[str, nn.Module]:
    return {"policy": trainer.model}


# Stage -> the function that trains (owner, name), and a function from its first argument to the models.
TRAINING: dict[str, tuple[Any, str, Callable[[Any], dict[str, nn.Module]]]] = {
    "sft": (trl_training, "train_and_save", trl_model),
    "reward": (trl_training, "train_and_save", trl_model),
    "ppo": (PPORunner, "run", ppo_models),
}


@contextmanager
def watch_stage(stage: str) -> Iterator[tensors.Bytes]:
    """Context manager that yields a dict and fills it with the bytes of the training of the stage run inside."""
    owner, name, models_of = TRAINING[stage]
    original, maxima = getattr(owner, name), tensors.Bytes()

    def train(subject: Any, *others: Any, **named: Any) -> Any:
        with tensors.watch_training(models_of(subject)) as training:
            result = original(subject, *others, **named)
        maxima.update(training)
        return result

    with patch.object(owner, name, train):
        yield maxima


def run(*command: str) -> None:
    """Run a command of `rlhf` in this process. Raises RuntimeError if it fails; its error is on stderr."""
    try:
        app([*command])
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"rlhf {' '.join(command)} exited with {end.code}") from end


def plan(stage: str, config: Path) -> tensors.Bytes:
    """Return the estimates of `rlhf plan`: weights in training, peak, and memory that malloc does not return.

    `learning`, gradients and optimizer state, is only defined for PPO: another stage may be fullest before it has
    gradients.
    """
    with redirect_stdout(io.StringIO()) as stdout:
        run("plan", str(config), "--json")
    (estimate,) = json.loads(stdout.getvalue())["stages"].values()
    training = [phase["bytes"] for phase in estimate["phases"] if phase["rows"]]
    plan = {"weights": max(phase["weights"] for phase in training), "holes": estimate["holes"]}
    if stage == "ppo":
        plan["learning"] = max(phase.get("gradients", 0) + phase["optimizer"] for phase in training)
    return {**plan, "peak": max(phase["total"] for phase in estimate["phases"])}


def measure(stage: str, config: Path, small: Path) -> dict[str, Any]:
    """Run the small and then the measured config from scratch, and return the bytes of the latter."""
    for path in (small, config):
        shutil.rmtree(path.parent / stage, ignore_errors=True)
    run(stage, "--config", str(small))
    libraries = tensors.current_bytes()
    with watch_stage(stage) as maxima:
        run(stage, "--config", str(config))
    result = tensors.above_libraries(maxima, libraries)
    output = config.parent / stage
    shutil.rmtree(output / "state" if stage == "reward" else output)  # gigabytes; PPO reads the reward models
    return {**result, "plan": plan(stage, config)}


if __name__ == "__main__":
    stage, *paths = sys.argv[1:]
    print(json.dumps(measure(stage, *map(Path, paths))))
