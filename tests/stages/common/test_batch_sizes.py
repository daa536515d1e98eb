"""The line about rows and steps before a training."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_cli.config.loading import load
from rlhf_cli.stages.common import batch_sizes

SIZES = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "num_train_epochs": 2}
ROW = {"input_ids": [1, 2, 3], "labels": [1, 2, 3]}
PAIR = {"prompt_ids": [1], "chosen_ids": [1, 2], "rejected_ids": [1, 2, 3]}


def config_of(folder: Path, stage: str, **settings: Any) -> Any:
    sections = {"sft": {"model": {"path": "m"}, "data": {"train": "t"}}, "reward": {"data": {"train": "t"}}}
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
    assert batch_sizes.describe_batches(config, rows, processes, packed=packed) == text
