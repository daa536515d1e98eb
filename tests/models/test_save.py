"""No stage is finished without its weights on disk, by the names and shapes in the files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from ppo_folder import ONE, ppo
from run_cli import fails, must_succeed, rlhf
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

Change = Callable[[Path], None]
LORA = ("-s", "model.adapters.kind=lora")


def remove(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def edit(name: str, change: Callable[[dict[str, torch.Tensor]], None]) -> Change:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / name)
        change(tensors)
        save_file(tensors, folder / name, {"format": "pt"})

    return apply


def drop_first(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[min(tensors)]


def cut_first(tensors: dict[str, torch.Tensor]) -> None:
    tensors[min(tensors)] = tensors[min(tensors)][:1].clone()


def drop_head(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["score.weight"]


def saves_wrongly(patch: pytest.MonkeyPatch, kind: Any, change: Change, place: str) -> None:
    """Make the model that is saved to RUN/STAGE/`place` lose what `change` takes."""
    save_pretrained = kind.save_pretrained

    def save(model: Any, folder: Any, **options: Any) -> None:
        save_pretrained(model, folder, **options)
        if Path(folder).name == place and Path(folder).parent.name in ("sft", "reward", "ppo"):
            change(Path(folder))

    patch.setattr(kind, "save_pretrained", save)


@pytest.mark.full
@pytest.mark.parametrize(
    ("stage", "kind", "change", "says", "options"),
    [
        ("sft", PreTrainedModel, remove("model.safetensors"), "there are none", ()),
        ("sft", PreTrainedModel, edit("model.safetensors", drop_first), "missing (lm_head.weight", ()),
        ("sft", PreTrainedModel, edit("model.safetensors", cut_first), "1 of another shape (model.", ()),
        ("sft", PeftModel, remove("adapter_model.safetensors"), "adapter_model.safetensors", LORA),
        ("sft", PeftModel, edit("adapter_model.safetensors", drop_first), "missing base_model.model.", LORA),
        ("reward", PreTrainedModel, edit("model.safetensors", drop_head), "missing score.weight", ()),
    ],
)
def test_a_stage_that_loses_weights_stops_and_resumes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, stage: str, kind: Any, change: Change, says: str, options: tuple
) -> None:
    with monkeypatch.context() as patch:
        saves_wrongly(patch, kind, change, "model")
        result = rlhf(stage, "-c", f"{stage}.yaml", *options)
        fails(result, "R21", f"{stage}/model does not hold the weights that were trained", says, exit_code=1)
    assert not (folder / stage / "manifest.json").exists()
    if stage == "reward":
        must_succeed(rlhf(stage, "-c", f"{stage}.yaml", *options), "resumes at step 1 of 1")


@pytest.mark.full
@pytest.mark.parametrize("place", ["model", "value"])
def test_ppo_that_loses_weights_stops(run_folder: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    saves_wrongly(monkeypatch, PreTrainedModel, remove("model.safetensors"), place)
    fails(ppo(run_folder, "-s", ONE), "R21", f"ppo/{place} does not hold the weights", exit_code=1)
    assert not (run_folder / "ppo/manifest.json").exists()
