"""A stage of ours, as its command runs it: what its training holds, its peak, and what `rlhf plan` says of it.

    python -m benchmarks.memory.ours ppo BIG/ppo.yaml SMALL/ppo.yaml

SMALL is the same stage on next to nothing: it loads the libraries that the stage uses, and what the process holds then
is not counted. One line of JSON.
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

from benchmarks.memory import held
from rlhf_cli.cli import app
from rlhf_cli.stages import trl_common
from rlhf_cli.stages.ppo import PPORunner


def models_of_ppo(runner: PPORunner) -> dict[str, nn.Module]:
    trainer = runner.trainer
    rewards: dict[str, Any] = {f"reward {name}": source.model for name, source in trainer.rewards.items()}
    return {"policy": trainer.policy, "reference": trainer.ref, "value": trainer.value, **rewards}


def model_of_trl(trainer: Any) -> dict[str, nn.Module]:
    return {"policy": trainer.model}


# Where a stage trains: a function whose first argument has the models.
LOOPS: dict[str, tuple[Any, str, Callable[[Any], dict[str, nn.Module]]]] = {
    "sft": (trl_common, "train", model_of_trl),
    "reward": (trl_common, "train", model_of_trl),
    "ppo": (PPORunner, "run", models_of_ppo),
}


@contextmanager
def watched(stage: str) -> Iterator[held.Found]:
    """Within, a stage runs; afterwards what it held in training."""
    owner, name, models_of = LOOPS[stage]
    plain, found = getattr(owner, name), held.Found()

    def train(subject: Any, *others: Any) -> Any:
        with held.watched(models_of(subject)) as seen:
            done = plain(subject, *others)
        found.update(seen)
        return done

    with patch.object(owner, name, train):
        yield found


def run(*command: str) -> None:
    """A command of `rlhf`. Raises RuntimeError where it fails; what was wrong is on stderr."""
    try:
        app([*command])
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"rlhf {' '.join(command)} ended with {end.code}") from end


def plan(stage: str, config: Path) -> held.Found:
    """What `rlhf plan` says: weights in training, tensors at the fullest moment, and what malloc keeps beside them.

    PPO keeps its gradients, so that each moment has what learning takes; other stages' fullest one may be before them.
    """
    with redirect_stdout(io.StringIO()) as said:
        run("plan", str(config), "--json")
    (told,) = json.loads(said.getvalue())["stages"]
    training = [phase["bytes"] for phase in told["phases"] if phase["rows"]]
    found = {"weights": max(each["weights"] for each in training), "holes": told["holes"]}
    if stage == "ppo":
        found["learning"] = max(each["gradients"] + each["optimizer"] for each in training)
    return {**found, "peak": max(phase["total"] for phase in told["phases"])}


def measure(stage: str, config: Path, small: Path) -> dict[str, Any]:
    """Run the stage anew, first on next to nothing. Bytes; peaks are above what the process held then."""
    for path in (small, config):
        shutil.rmtree(path.parent / stage, ignore_errors=True)
    run(stage, "--config", str(small))
    before = held.libraries()
    with watched(stage) as found:
        run(stage, "--config", str(config))
    seen = held.told(found, before)
    left = config.parent / stage
    shutil.rmtree(left / "state" if stage == "reward" else left)  # gigabytes; PPO reads the reward models
    return {**seen, "plan": plan(stage, config)}


if __name__ == "__main__":
    stage, *paths = sys.argv[1:]
    print(json.dumps(measure(stage, *map(Path, paths))))
