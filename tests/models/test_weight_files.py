"""M15: folders of which transformers would load other weights than those that are hashed, or quantized ones."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from bad_inputs import check, foreign_scorer, rlhf
from run_cli import fails
from safetensors.torch import load_file, save_file

from rlhf_cli.models import load, tokenizers

SHARD = "shard-00001-model-00001-of-00001.safetensors"
MODEL = Path("model")


def edit(name: str, **fields: Any) -> None:
    path = MODEL / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def other_weights(name: str, *, in_place: bool = False) -> None:
    """Write other weights beside the model's, or in their place, with an index."""
    weights = load_file(MODEL / "model.safetensors")
    save_file({key: weight / 2 for key, weight in weights.items()}, MODEL / name, metadata={"format": "pt"})
    if in_place:
        (MODEL / "model.safetensors").unlink()
        index = {"metadata": {}, "weight_map": dict.fromkeys(weights, name)}
        (MODEL / "model.safetensors.index.json").write_text(json.dumps(index))


def stored_as(dtype: torch.dtype) -> None:
    weights = load_file(MODEL / "model.safetensors")
    weights = {name: weight.to(dtype) for name, weight in weights.items()}
    save_file(weights, MODEL / "model.safetensors", metadata={"format": "pt"})


def named_in_config(**where: Any) -> None:
    other_weights("other.safetensors")
    edit("config.json", **where)


def named_in_a_config_of_this_version() -> None:
    """transformers reads config.5.0.0.json in place of config.json."""
    named_in_config(transformers_weights="other.safetensors")
    shutil.copy(MODEL / "config.json", MODEL / "config.5.0.0.json")
    edit("config.json", transformers_weights=None, configuration_files=["config.5.0.0.json"])


def adapter(text: str) -> None:
    (MODEL / "adapter_config.json").write_text(text)


def tokenizer_outside() -> None:
    shutil.copy(MODEL / "tokenizer.json", "tokenizer.1.0.json")
    edit("tokenizer_config.json", fast_tokenizer_files=["../tokenizer.1.0.json"])


def template_elsewhere() -> None:
    (MODEL / "additional_chat_templates").mkdir()
    (MODEL / "additional_chat_templates/default.jinja").write_text("{{ messages }}")


def quantized(method: str) -> Callable[[], None]:
    return lambda: edit("config.json", quantization_config={"quant_method": method})


CASES: dict[str, tuple[Callable[[], None], tuple[str, ...]]] = {
    "config": (
        lambda: named_in_config(transformers_weights="other.safetensors"),
        ('transformers_weights "other.safetensors"', "instead of model.safetensors", "hint: remove the key"),
    ),
    "version": (named_in_a_config_of_this_version, ('transformers_weights "other.safetensors"',)),
    "adapter": (
        lambda: adapter(json.dumps({"base_model_name_or_path": "model", "peft_type": "LORA"})),
        ("holds an adapter (adapter_config.json) beside full weights", "hint: move the adapter's files"),
    ),
    "unreadable adapter": (lambda: adapter("{"), ("holds an adapter (adapter_config.json)",)),
    "shards": (lambda: other_weights(SHARD), (SHARD, "hint: move these files away")),
    "hidden": (lambda: other_weights(".w.safetensors", in_place=True), ('names ".w.safetensors"', "hint: name it so")),
    "suffix": (lambda: other_weights("w.weights", in_place=True), ('names "w.weights"',)),
    "fp8": (lambda: stored_as(torch.float8_e4m3fn), ("F8_E4M3 in ", "hint: name the same model in BF16")),
    "bool": (lambda: stored_as(torch.bool), ("BOOL in model.embed_tokens.weight",)),
    "int8": (lambda: stored_as(torch.int8), ("I8 in ",)),
    "complex": (lambda: stored_as(torch.complex64), ("C64 in ",)),
    "claims fp8": (quantized("fp8"), ("quantized weights (fp8 in config.json)", "hint: name the same model")),
    "claims bitsandbytes": (quantized("bitsandbytes"), ("bitsandbytes",)),
    "tokenizer": (tokenizer_outside, ('fast_tokenizer_files names "../tokenizer.1.0.json"', "hint: remove the key")),
    "template": (template_elsewhere, ("additional_chat_templates/default.jinja", "hint: move it")),
}


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_m15_check_and_stage_refuse_the_folder(folder: Path, case: str) -> None:
    change, says = CASES[case]
    change()
    for result in (check("sft.yaml"), rlhf("sft")):
        fails(result, "M15", *says)
        assert result.stderr.count("error[") == 1 and "R00" not in result.stderr
    assert not (folder / "sft/model").exists()


@pytest.mark.full
def test_m15_whichever_key_names_the_folder(folder: Path) -> None:
    foreign_scorer(folder)
    bad = Path(shutil.copytree("scorer", "bad"))
    shutil.copy(bad / "model.safetensors", bad / SHARD)
    named_in_config(transformers_weights="other.safetensors")
    models = {"sft": "model", "reward": "scorer", "value": "bad"}
    rewards = {
        "one": {"model": "bad"},
        "many": {"models": {"a": "scorer", "b": "bad"}},
        "label": {"pipeline": "bad", "label": "LABEL_0"},
    }
    files = {
        "ppo": {"models": models, "data": {"prompts": "prompts.jsonl"}, "ppo": {"total_episodes": 64}},
        "eval": {"models": {"sft": "model", "ppo": "model", "reward": "bad"}, "data": {"prompts": "prompts.jsonl"}},
        "reward": {"model": {"path": "model"}, "data": {"train": "pairs.jsonl"}, "reward": {"max_steps": 1}},
        "sft": {
            "model": {"path": "model"}, "data": {"train": "rows.jsonl"}, "sft": {"max_steps": 1},
            "best_of": {"reward": "bad", "n": 2, "response_length": 4},
        },
    }  # fmt: skip
    for stage, config in files.items():
        Path(f"{stage}.yaml").write_text(yaml.safe_dump(config))
        found = check(f"{stage}.yaml").stderr
        assert "error[M15]" in found and ": model: config.json has transformers_weights" in found, found
        assert stage == "reward" or f"bad holds {SHARD}" in found, found
    Path("model/other.safetensors").unlink()
    edit("config.json", transformers_weights=None)
    for name, section in rewards.items():
        config = {**files["ppo"], "models": {"sft": "model", "value": "policy_head"}, "rewards": {name: section}}
        Path("ppo.yaml").write_text(yaml.safe_dump(config))
        fails(rlhf("ppo"), "M15", f"bad holds {SHARD}")
    judge = {"models": {"sft": "model", "ppo": "model"}, "judges": {"j": "bad"}, "data": {"prompts": "prompts.jsonl"}}
    Path("eval.yaml").write_text(yaml.safe_dump(judge))
    fails(check("eval.yaml"), "M15", f"bad holds {SHARD}")


@pytest.mark.full
def test_m15_the_base_of_an_adapter(adapters_copy: Path) -> None:
    manifest = json.loads((adapters_copy / "sft/manifest.json").read_text())
    base = adapters_copy / "sft" / manifest["parents"]["model.path"]["path"]
    shutil.copy(base / "model.safetensors", base / SHARD)
    with pytest.raises(load.RLHFError, match=f"M15.*{SHARD}"):
        load.load_causal_lm(adapters_copy / "sft/model")


def test_weights_that_are_read_as_they_are_hashed(folder: Path) -> None:
    """Weights beside the model's that nothing names, other float formats, and the masks of an old GPT-2."""
    other_weights("consolidated.safetensors")
    edit("config.json", transformers_weights="model.safetensors")
    stored_as(torch.float64)
    assert check("sft.yaml").exit_code == 0
    model = tiny.causal("gpt2", vocab_size=len(tokenizers.load_tokenizer(MODEL)))
    model.save_pretrained(MODEL)
    masks = {f"transformer.h.{layer}.attn.bias": torch.ones(1, 1, 64, 64, dtype=torch.bool) for layer in range(2)}
    save_file({**load_file(MODEL / "model.safetensors"), **masks}, MODEL / "model.safetensors", {"format": "pt"})
    assert check("sft.yaml").exit_code == 0


@pytest.mark.full
def test_m10_a_file_that_was_added_to_a_finished_stage(sft_stage: Path, folder: Path) -> None:
    shutil.copytree(sft_stage, "sft")
    Path("sft/model/NOTES.md").write_text("Mine.")
    Path("reward.yaml").write_text(Path("reward.yaml").read_text().replace("path: model", "path: sft"))
    assert check("reward.yaml").exit_code == 0
    shutil.copy("sft/model/model.safetensors", f"sft/model/{SHARD}")
    for result in (check("reward.yaml"), rlhf("reward")):
        fails(result, "M10", f"sft/model/{SHARD} was not written by the stage", "hint: move it out of the folder")
