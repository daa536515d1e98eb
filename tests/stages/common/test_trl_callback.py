"""Each step of a TRL training: progress, evaluations, checkpoints, and losses that are no numbers."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trl_stage import metrics_of, train

from rlhf_cli import jsonl, progress
from rlhf_cli.runs import stage_folder
from rlhf_cli.stages import sft
from tests.conftest import World
from tests.stages.test_sft import config_of, fails

pytestmark = pytest.mark.full


def test_checkpoints_that_take_too_much_of_the_time_are_omitted_unless_the_user_sets_the_interval(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_folder, "SHORT_SECONDS", 0)
    monkeypatch.setattr(stage_folder, "MAX_SHARE", 0)
    saved = {}
    for name, output in (("default", {}), ("set", {"save_steps": 1})):
        config = config_of(world, tmp_path / name, sft={"max_steps": 10}, output=output)
        train(config)
        saved[name] = sorted(path.name for path in (config.folder / "state").glob("checkpoint-*"))
    assert saved == {"default": ["checkpoint-1", "checkpoint-10"], "set": ["checkpoint-10", "checkpoint-9"]}


def test_every_evaluation_shows_its_batches_and_the_last_is_made_once(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two epochs TRL's loop evaluates after the first; our own pass over the finished model is the other one."""
    clock = [0.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def slow(call: Any) -> Any:
        def batch(*args: Any, **kwargs: Any) -> Any:
            clock[0] += 11
            return call(*args, **kwargs)

        return batch

    monkeypatch.setattr(sft.SFTTrainer, "prediction_step", slow(sft.SFTTrainer.prediction_step))
    monkeypatch.setattr(sft, "_batch_sums", slow(sft._batch_sums))
    sizes = {"num_train_epochs": 2, "max_steps": None, "per_device_eval_batch_size": 12}
    config = config_of(world, tmp_path, sft=sizes)
    headline = train(config)["metrics"]
    lines = capsys.readouterr().err.splitlines()
    assert len([line for line in lines if re.search(r"12/24 step.* evaluation: batch \d/8", line)]) == 8
    shown = [re.findall(r"score: batch (\d)/8", line) for line in lines if "held-out loss 0/1" in line]
    assert shown == [[str(done)] for done in range(1, 9)]
    first, last = (line for line in metrics_of(config) if "eval_loss" in line)
    assert (first["step"], last["step"]) == (12, 24) and last["eval_loss"] == headline["eval_loss"]


def test_by_default_each_tenth_is_saved_and_each_epoch_evaluated(world: World, tmp_path: Path) -> None:
    jsonl.write_jsonl(tmp_path / "rows.jsonl", [row for _, row in jsonl.read_jsonl(world.sft)][:80])
    sizes = {"num_train_epochs": 2, "max_steps": None}
    config = config_of(world, tmp_path, tmp_path / "rows.jsonl", sft=sizes, output={"keep": 99})
    train(config)
    saved = {int(path.name.rpartition("-")[2]) for path in (config.folder / "state").glob("checkpoint-*")}
    assert saved == set(range(2, 21, 2))
    assert [line["step"] for line in metrics_of(config) if "eval_loss" in line] == [10, 20]


def test_the_newest_checkpoints_are_kept_and_sealed(world: World, tmp_path: Path) -> None:
    config = config_of(world, tmp_path, output={"save_steps": 1, "keep": 3})
    train(config)
    states = config.folder / "state"
    assert sorted(path.name for path in states.iterdir()) == ["checkpoint-6", "checkpoint-7", "checkpoint-8"]
    for path in states.iterdir():
        sealed = json.loads((path / "state.json").read_text())["files"]
        assert (
            set(sealed) == {file.name for file in path.iterdir()} - {"state.json", ".run"} and "optimizer.pt" in sealed
        )


@pytest.mark.parametrize(("log", "save"), [(1, 8), (8, 1)])
def test_r01_a_loss_that_is_no_number_stops_the_run_before_it_is_saved(
    world: World, tmp_path: Path, log: int, save: int
) -> None:
    settings = {"learning_rate": 1e30, "warmup_ratio": 0.0, "logging_steps": log}
    config = config_of(world, tmp_path, sft=settings, output={"save_steps": save})
    fails(config, "R01", "at step")
    saved = [load_file(path) for path in config.folder.rglob("model.safetensors")]
    assert all(torch.isfinite(tensor).all() for weights in saved for tensor in weights.values())
