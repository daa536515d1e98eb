"""The sentence about batch sizes, counted by hand."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_cli.config.loading import load
from rlhf_cli.data.datasets import Prompt
from rlhf_cli.data.readers import RowLocation
from rlhf_cli.stages import ppo_setup, setup

SIZES = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "num_train_epochs": 2}


def config_of(folder: Path, stage: str, **settings: Any) -> Any:
    sections = {"sft": {"model": {"path": "m"}, "data": {"train": "t"}}, "reward": {"data": {"train": "t"}}}
    sections["ppo"] = {"data": {"prompts": "p"}}
    (folder / "x.yaml").write_text(yaml.safe_dump({**sections[stage], stage: settings}))
    return load(stage, folder / "x.yaml")


@pytest.mark.parametrize(
    ("processes", "packed", "said"),
    [
        (1, None, "14 rows, 42 tokens; a step: 2 x 3 = 6 rows; in all 6 steps"),  # 7 batches, 3 steps an epoch
        (2, None, "14 rows, 42 tokens; a step: 2 x 3 x 2 processes = 12 rows; in all 4 steps"),
        (1, 5, "14 rows, 42 tokens in 5 sequences; a step: 2 x 3 = 6 sequences; in all 2 steps"),
        (1, 0, "14 rows, 42 tokens; a step: 2 x 3 = 6 sequences"),
    ],
)
def test_sft(tmp_path: Path, processes: int, packed: int | None, said: str) -> None:
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 14
    assert setup.describe_batches(config_of(tmp_path, "sft", **SIZES), rows, processes, packed=packed) == said


def test_packed_rows_of_a_given_number_of_steps(tmp_path: Path) -> None:
    config = config_of(tmp_path, "sft", max_steps=9)
    assert setup.describe_batches(config, [{}] * 4, packed=0) == "4 rows; a step: 8 x 1 = 8 sequences; in all 9 steps"


def test_pairs_have_the_tokens_of_both_answers(tmp_path: Path) -> None:
    rows = [{"prompt_ids": [1], "chosen_ids": [1, 2], "rejected_ids": [1, 2, 3]}] * 6
    said = "6 pairs, 30 tokens; a step: 2 x 3 = 6 pairs; in all 2 steps"
    assert setup.describe_batches(config_of(tmp_path, "reward", **SIZES), rows) == said


def test_ppo_in_two_processes(tmp_path: Path) -> None:
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "total_episodes": 64}
    config = ppo_setup.scale_to_world_size(config_of(tmp_path, "ppo", **sizes), 2)
    said = "20 prompts; an update: 4 x 2 x 2 processes = 16 episodes, 1 per prompt; 4 epochs x 1 minibatches = 4 "
    assert (
        ppo_setup.describe_batches(config, [Prompt([1], "a", RowLocation(Path("p"), 1))] * 20, 2)
        == f"{said}optimizer steps; in all 4 updates, 64 episodes"
    )
