"""The printed arithmetic of rows, batches and steps, computed by hand."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_cli.config.loading import load
from rlhf_cli.data.datasets import Prompt
from rlhf_cli.data.readers import RowLocation
from rlhf_cli.stages import ppo_setup, training_setup

SIZES = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "num_train_epochs": 2}
ROW = {"input_ids": [1, 2, 3], "labels": [1, 2, 3]}
PAIR = {"prompt_ids": [1], "chosen_ids": [1, 2], "rejected_ids": [1, 2, 3]}


def config_of(folder: Path, stage: str, **settings: Any) -> Any:
    sections = {"sft": {"model": {"path": "m"}, "data": {"train": "t"}}, "reward": {"data": {"train": "t"}}}
    sections["ppo"] = {"data": {"prompts": "p"}}
    (folder / "x.yaml").write_text(yaml.safe_dump({**sections[stage], stage: settings}))
    return load(stage, folder / "x.yaml")


@pytest.mark.parametrize(
    ("stage", "settings", "rows", "processes", "packed", "text"),
    [
        # 7 batches, 3 steps per epoch
        ("sft", SIZES, [ROW] * 14, 1, None, "14 rows, 42 tokens; a step: 2 x 3 = 6 rows; in all 6 steps"),
        ("sft", SIZES, [ROW] * 14, 2, None,
         "14 rows, 42 tokens; a step: 2 x 3 x 2 processes = 12 rows; in all 4 steps"),
        ("sft", SIZES, [ROW] * 14, 1, 5,
         "14 rows, 42 tokens in 5 sequences; a step: 2 x 3 = 6 sequences; in all 2 steps"),
        ("sft", SIZES, [ROW] * 14, 1, 0, "14 rows, 42 tokens; a step: 2 x 3 = 6 sequences"),
        ("sft", {"max_steps": 9}, [{}] * 4, 1, 0, "4 rows; a step: 8 x 1 = 8 sequences; in all 9 steps"),
        ("reward", SIZES, [PAIR] * 6, 1, None, "6 pairs, 30 tokens; a step: 2 x 3 = 6 pairs; in all 2 steps"),
    ],
)  # fmt: skip
def test_rows_and_steps_of_training(
    tmp_path: Path, stage: str, settings: Any, rows: Any, processes: int, packed: int | None, text: str
) -> None:
    config = config_of(tmp_path, stage, **settings)
    assert training_setup.describe_batches(config, rows, processes, packed=packed) == text


def test_prompts_and_updates_of_ppo_in_two_processes(tmp_path: Path) -> None:
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "total_episodes": 64}
    config = ppo_setup.scale_to_world_size(config_of(tmp_path, "ppo", **sizes), 2)
    text = "20 prompts; an update: 4 x 2 x 2 processes = 16 episodes, 1 per prompt; 4 epochs x 1 minibatches = 4 "
    text += "optimizer steps; in all 4 updates, 64 episodes"
    assert ppo_setup.describe_batches(config, [Prompt([1], "a", RowLocation(Path("p"), 1))] * 20, 2) == text
