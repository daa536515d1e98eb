"""`rlhf sft`, `rlhf reward` and `rlhf dpo` on the tiny world, in this process."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rlhf_cli import jsonl, runs
from rlhf_cli.config.base import Options
from rlhf_cli.config.loading import load
from rlhf_cli.stages import dpo, sft
from rlhf_cli.stages.common import training_rows, trl_callback, trl_trainer
from rlhf_cli.stages.reward import run as reward_stage
from rlhf_cli.stages.reward import training as reward_training
from tests.conftest import World

STAGES = {"sft": sft, "reward": reward_stage, "dpo": dpo}
QUICK = {"max_length": 64, "per_device_train_batch_size": 8, "learning_rate": 3e-3}


def config_of(world: World, stage: str, folder: Path, parent: Path, rows: Path, **sections: Any) -> Any:
    """A config in `folder` that trains `parent` and evaluates it on `rows`; sections override the quick ones."""
    folder.mkdir(exist_ok=True)
    defaults = {"model": {"path": str(parent)}, "data": {"train": str(rows), "eval": str(rows)}}
    sections[stage] = {**QUICK, **sections.get(stage, {})}
    return load(stage, world.config(folder, stage, **{**defaults, **sections}))


def run(config: Any) -> None:
    STAGES[config.stage].run(config, Options())


def manifest_of(config: Any) -> dict[str, Any]:
    return json.loads((config.folder / "manifest.json").read_text())


def train(config: Any) -> dict[str, Any]:
    """Run the stage and return its manifest."""
    run(config)
    return manifest_of(config)


def metrics_of(config: Any) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without their times."""
    lines = [row for _, row in jsonl.read_jsonl(config.folder / "metrics.jsonl")]
    return [{name: value for name, value in line.items() if name != "time_s"} for line in lines]


def trainer_of(config: Any) -> tuple[Any, list[dict[str, Any]], Any]:
    """The stage's trainer before training, its token rows, and the tokenizer."""
    stage = reward_training if config.stage == "reward" else STAGES[config.stage]
    load = stage.load_tokenizer_and_models if stage is reward_training else stage.load_tokenizer_and_model
    tokenizer, model, *_ = load(config, Options(), runs.open_parents(config))
    token_rows, held_out = training_rows.read_train_and_eval(config, tokenizer, model.config)
    trainer = stage.make_trainer(config, model, tokenizer, token_rows, held_out, trl_trainer.SINGLE_PROCESS)
    if not (config.folder / "manifest.json").exists():
        shutil.rmtree(config.folder)  # transformers creates the folder
    return trainer, token_rows, tokenizer


@contextmanager
def signal_at(step: int, number: int = signal.SIGTERM) -> Iterator[None]:
    """Send this process a signal during step `step`."""
    real = trl_callback.TrainingCallback.on_step_end

    def on_step_end(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == step:
            os.kill(os.getpid(), number)
        real(self, args, state, control, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trl_callback.TrainingCallback, "on_step_end", on_step_end)
        yield


def base_padded_with_eos(world: World, folder: Path) -> Path:
    """A copy of the base model whose pad token is its stop token, without a reserved one."""
    base = shutil.copytree(world.base, folder / "base")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(base)
    rename_pad_token(base)
    return base


def rename_pad_token(folder: Path) -> None:
    """Give a tokenizer's <pad> a name that means nothing."""
    for path in folder.glob("tokenizer*.json"):
        path.write_text(path.read_text().replace("<pad>", "<nil>"))
