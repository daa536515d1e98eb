"""Rollouts, micro-batches and seeds by worked tables.

Modules: `data/sampling.py`, `stages/common/batch_sizes.py`, `stages/ppo/prompt_rows.py`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rlhf_cli.config import ppo
from rlhf_cli.config.loading import load
from rlhf_cli.data.datasets import Prompt
from rlhf_cli.data.readers import RowLocation
from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.models.batch import Prompts, Rollout, split_into_micro_batches
from rlhf_cli.stages.common import batch_sizes
from rlhf_cli.stages.ppo import prompt_rows


def test_rollout_from_lists_table():
    rollout = Rollout.from_lists([[7, 8], [9]], [[3], [4, 2]], stop_token_id=2)
    assert rollout.ids.tolist() == [[7, 8, 3, 0], [0, 9, 4, 2]]
    assert rollout.mask.int().tolist() == [[1, 1, 1, 0], [0, 1, 1, 1]]
    assert rollout.response_mask.int().tolist() == [[1, 0], [1, 1]]
    assert rollout.ended.tolist() == [False, True]
    assert rollout.prompt_tokens(1) == [9] and rollout.response_tokens(1) == [4, 2]
    lists = [[7, 8], [9]], [[3], [4, 2]], [[1], [1, 0]]
    plain, tensors = (Rollout.from_lists(*rows) for rows in (lists, [list(map(torch.tensor, rows)) for rows in lists]))
    assert torch.equal(plain.ids, tensors.ids) and torch.equal(plain.response_mask, tensors.response_mask)


def test_micro_batches_have_no_left_padding_and_read_tokens_that_are_not_trained():
    micro = Rollout.from_lists([[7]], [[3, 4, 5]], [[True, False, True]]).micro_batch(torch.tensor([0]))
    assert micro.ids.tolist() == [[7, 3, 4, 5]]
    assert micro.response_ids.tolist() == [3, 5] and micro.logit_position.tolist() == [0, 2]
    micro = Rollout.from_lists([[7, 8, 9], [6]], [[3], [4, 2]]).micro_batch(torch.tensor([1, 0]))
    assert micro.ids.tolist() == [[6, 4, 2, 0], [7, 8, 9, 3]]
    assert micro.lengths.tolist() == [3, 4] and micro.response_ids.tolist() == [4, 2, 3]
    scattered = torch.zeros(2, 2)
    scattered[micro.response_index] = torch.tensor([1.0, 2.0, 3.0])
    assert scattered.tolist() == [[3.0, 0.0], [1.0, 2.0]]


@pytest.mark.parametrize("bad", [([], []), ([[1]], [[]]), ([[]], [[1]]), ([[1], [2]], [[1]]), ([[1]], [[2]], [[0]])])
def test_lists_that_do_not_match_are_rejected(bad):
    with pytest.raises(ValueError):
        Rollout.from_lists(*bad)
    with pytest.raises(ValueError):
        Prompts.from_lists([[1], []])


@pytest.mark.parametrize(
    "limits,expected",
    [
        ({"max_rows": 3, "max_tokens": 20}, [[3], [0, 2], [5, 4, 1], [6]]),
        ({"max_rows": 4}, [[3, 0, 2, 5], [4, 1, 6]]),
        ({"max_rows": 2, "packed": True}, [[3, 0, 2, 5, 4, 1, 6]]),
        ({"max_rows": 2, "max_tokens": 31, "packed": True}, [[3], [0, 2, 5, 4, 1, 6]]),
    ],
)
def test_micro_batches_keep_the_limits_and_lose_no_row(limits, expected):
    """Padded, rows times the longest count; packed, the sum does, up to that of max_rows of the longest."""
    lengths = torch.tensor([9, 3, 5, 30, 4, 5, 2])
    assert [batch.tolist() for batch in split_into_micro_batches(lengths, torch.arange(7), **limits)] == expected


def test_seeds_depend_on_every_part():
    keys = [(0, "sample", 1, 2), (1, "sample", 1, 2), (0, "shuffle", 1, 2), (0, "sample", 2, 2), (0, "sample", 1, 3)]
    keys.append((0, "sample", 12))
    seeds = {derive_seed(*key) for key in keys}
    assert len(seeds) == len(keys) and all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(*keys[0]) == derive_seed(*keys[0])


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
    assert batch_sizes.describe_batches(config, rows, processes, packed=packed) == text


def test_prompts_and_updates_of_ppo_in_two_processes(tmp_path: Path) -> None:
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "total_episodes": 64}
    config = ppo.scale_to_world_size(config_of(tmp_path, "ppo", **sizes), 2)
    text = "20 prompts; an update: 4 x 2 x 2 processes = 16 episodes, 1 per prompt; 4 epochs x 1 minibatches = 4 "
    text += "optimizer steps; in all 4 updates, 64 episodes"
    assert prompt_rows.describe_batches(config, [Prompt([1], "a", RowLocation(Path("p"), 1))] * 20, 2) == text
