"""A TRL training that goes on from a checkpoint ends in the same bytes."""

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import trl_stage
from trl_stage import metrics_of, signal_at, train

from rlhf_cli import jsonl
from tests.conftest import SIZES, World
from tests.stages.test_sft import config_of

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    ("number", "code", "step", "optim"),
    [(signal.SIGTERM, 143, 17, "adamw_torch_fused"), (signal.SIGINT, 130, 5, "adamw_8bit")],
)
def test_a_stopped_run_resumes_to_the_same_weights_and_metrics(
    world: World, tmp_path: Path, number: int, code: int, step: int, optim: str
) -> None:
    """Step 17 is in the second epoch, between two lines of the log and two regular checkpoints."""
    settings = {"max_steps": 26, "logging_steps": 3, "eval_steps": 9, "gradient_accumulation_steps": 1}
    wide = {"hidden_size": 64, "intermediate_size": 128}  # 8 bits begin with 4096 numbers
    tokens = {"tokenizer": {"train": str(world.text), "vocab_size": 320}}
    dropout = {"new": {**SIZES, **wide, "attention_dropout": 0.1, **tokens}}
    configs = [
        config_of(world, folder, sft=settings, model=dropout, output={"save_steps": 12}, trainer={"optim": optim})
        for folder in (tmp_path / "straight", tmp_path / "stopped")
    ]
    straight = train(configs[0])
    with signal_at(step, number), pytest.raises(SystemExit) as stopped:
        trl_stage.run(configs[1])
    assert stopped.value.code == code
    state = configs[1].folder / "state"
    assert f"checkpoint-{step}" in {path.name for path in state.iterdir()}
    assert not list(state.rglob("training_args.bin")) and not list(state.rglob("README.md"))
    moments = torch.load(state / f"checkpoint-{step}/optimizer.pt", weights_only=True)["state"].values()
    kept = [each.get("__bnb_optimizer_quant_state__", each) for each in moments]
    dtypes = {tensor.dtype for each in kept for tensor in each.values() if isinstance(tensor, torch.Tensor)}
    assert (torch.uint8 in dtypes) == (optim == "adamw_8bit")
    assert not (configs[1].folder / "manifest.json").exists()
    half = shutil.copytree(state / f"checkpoint-{step}", state / "checkpoint-20")  # what a kill -9 may leave
    (half / "trainer_state.json").write_text('{"global_step": 2')
    resumed = train(configs[1])
    assert not half.exists()
    assert resumed["model_sha256"] == straight["model_sha256"] and resumed["metrics"] == straight["metrics"]
    assert metrics_of(configs[1]) == metrics_of(configs[0])


def test_from_any_checkpoint_the_run_ends_in_the_same_bytes(world: World, tmp_path: Path) -> None:
    """Also from one at the end of an epoch, whose evaluation is in the log before it, and from the last one."""
    changes: dict[str, Any] = {
        "output": {"save_steps": 1, "keep": 99},
        "sft": {"num_train_epochs": 2, "max_steps": None},
    }
    jsonl.write_jsonl(tmp_path / "rows.jsonl", [row for _, row in jsonl.read_jsonl(world.sft)][:48])
    straight = config_of(world, tmp_path / "straight", tmp_path / "rows.jsonl", **changes)
    whole = train(straight)
    assert [line["step"] for line in metrics_of(straight) if "eval_loss" in line] == [6, 12]
    for step in (2, 6, 11, 12):
        folder = shutil.copytree(tmp_path / "straight", tmp_path / f"from-{step}")
        shutil.rmtree(folder / "sft/model")
        (folder / "sft/manifest.json").unlink()
        for later in range(step + 1, 13):
            shutil.rmtree(folder / f"sft/state/checkpoint-{later}")
        other = {**changes, "output": {"save_steps": 4, "keep": 99}}
        config = config_of(world, folder, tmp_path / "rows.jsonl", **other)
        assert train(config)["model_sha256"] == whole["model_sha256"]
        assert metrics_of(config) == metrics_of(straight)
        saved = {int(path.name.rpartition("-")[2]) for path in (config.folder / "state").iterdir()}
        assert saved == {*range(1, step + 1), *range(step + 4 - step % 4, 13, 4)}, "the interval is the new one"
