"""The defaults of checkpoints, evaluations and snapshots over a run."""

from itertools import pairwise

import pytest
from conftest import World

from rlhf_cli import jsonl
from rlhf_cli.config.base import Options, Output
from rlhf_cli.config.loading import load
from rlhf_cli.config.training import SFTConfig
from rlhf_cli.stages import sft
from rlhf_cli.stages.ppo_samples import evenly_spaced_steps


@pytest.fixture(scope="module")
def trained(world: World, tmp_path_factory: pytest.TempPathFactory) -> SFTConfig:
    """Two epochs of ten steps, with default intervals."""
    folder = tmp_path_factory.mktemp("trained")
    jsonl.write_jsonl(folder / "rows.jsonl", [row for _, row in jsonl.read_jsonl(world.sft)][:80])
    sections = {
        "model": {"path": str(world.base)},
        "data": {"train": "rows.jsonl", "eval": str(world.sft)},
        "output": {"keep": 99},
        "sft": {"num_train_epochs": 2, "max_length": 64},
    }
    config = load("sft", world.config(folder, "sft", **sections))
    sft.run(config, Options())
    return config


@pytest.mark.training
def test_a_run_can_resume_from_each_tenth_of_it(trained: SFTConfig) -> None:
    assert trained.output.save_steps is None
    saved = {int(path.name.rpartition("-")[2]) for path in (trained.folder / "state").glob("checkpoint-*")}
    assert saved == set(range(2, 21, 2))


@pytest.mark.training
def test_each_epoch_ends_with_an_evaluation(trained: SFTConfig) -> None:
    assert trained.sft.eval_steps is None
    lines = [row for _, row in jsonl.read_jsonl(trained.folder / "metrics.jsonl")]
    assert [line["step"] for line in lines if "eval_loss" in line] == [10, 20]


def test_snapshots_are_the_eighths_of_a_run() -> None:
    for updates in (8, 100, 157, 10_000):
        steps = sorted(evenly_spaced_steps(updates, Output().snapshots))
        assert len(steps) == 8 and steps[-1] == updates
        assert all(abs(after - before - updates / 8) <= 1 for before, after in pairwise([0, *steps]))
