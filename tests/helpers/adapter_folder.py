"""A run whose SFT and reward stages train adapters, for the tests of them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from bad_inputs import rlhf
from run_cli import must_succeed

from rlhf_cli.models import build, save

SFT = """model: {path: BASE, adapters: {kind: lora, r: 4}}
data: {train: rows.jsonl, eval: rows.jsonl}
sft: {max_length: 64, max_steps: 12, learning_rate: 1e-2, logging_steps: 3, eval_steps: 5}
output: {save_steps: 4}
"""
REWARD = """model: {path: BASE, adapters: {kind: lora, r: 4}}
data: {train: pairs.jsonl, eval: pairs.jsonl}
reward: {max_length: 64, max_steps: 8, learning_rate: 1e-2, normalize_samples: 16, logging_steps: 2, eval_steps: 3}
output: {save_steps: 3}
"""
PPO = """data: {prompts: prompts.jsonl}
ppo: {total_episodes: 16, per_device_train_batch_size: 8, gradient_accumulation_steps: 1, response_length: 6}
"""
EVAL = """data: {prompts: prompts.jsonl}
eval: {n: 8, best_of: [], modes: [sampled], interpolate: []}
"""


def write(folder: Path, world: Any, *, base: str = "model", parent: str = "sft") -> Path:
    """Write a run whose stages train adapters: SFT on `base`, the reward model on `parent`."""
    folder.mkdir(exist_ok=True)
    for name, path in (("rows", world.sft), ("pairs", world.pairs), ("prompts", world.sft)):
        shutil.copy(path, folder / f"{name}.jsonl")
    if base == "model":
        shutil.copytree(world.base, folder / base)
    texts = {"sft": SFT.replace("BASE", base), "reward": REWARD.replace("BASE", parent), "ppo": PPO, "eval": EVAL}
    for stage, text in texts.items():
        (folder / f"{stage}.yaml").write_text(text)
    return folder


def widen(folder: Path, world: Any) -> None:
    """Replace the base by one whose layers can be quantized to 4 bits: rows of 64 and 128."""
    import torch

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = build.new_causal_lm({**sizes, "initializer_range": 0.1, "max_position_embeddings": 128}, world.tokenizer())
    save.save_model(model, world.tokenizer(), folder / "model", "A wider base model.")


def some_ids() -> Any:
    import torch

    return torch.randint(2, 250, (3, 12), generator=torch.Generator().manual_seed(0))


def logits(model: Any) -> Any:
    import torch

    with torch.no_grad():
        return model.eval()(input_ids=some_ids()).logits


def adapter_settings(folder: Path, base: str) -> dict[str, Any]:
    """Check that a model's folder has only adapters, of the model in the relative path `base`; return its settings."""
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert names >= {"adapter_config.json", "adapter_model.safetensors", "merged/config.json", "tokenizer.json"}
    assert "model.safetensors" not in names and "config.json" not in names
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == base and (folder / base).is_dir()
    assert settings["target_modules"] == sorted(settings["target_modules"]) and len(settings["target_modules"]) == 7
    return settings


def run(folder: Path, stage: str, *arguments: str) -> dict[str, Any]:
    """Run a stage by its command and return its manifest."""
    must_succeed(rlhf(stage, "-c", str(folder / f"{stage}.yaml"), *arguments))
    return json.loads((folder / stage / "manifest.json").read_text())


@pytest.fixture(scope="session")
def adapters_run(world: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with adapters for SFT, and for the reward model on top. Read only."""
    folder = write(tmp_path_factory.mktemp("adapters") / "run", world)
    for stage in ("sft", "reward"):
        run(folder, stage)
    return folder


@pytest.fixture
def adapters_copy(adapters_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that run, which is the working directory."""
    monkeypatch.chdir(shutil.copytree(adapters_run, tmp_path / "moved"))
    return tmp_path / "moved"
