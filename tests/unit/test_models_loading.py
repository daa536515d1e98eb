"""Load, create and save models, and save trees of tensors exactly."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SIZES, World
from transformers import AutoModelForCausalLM

from rlhf_cli.errors import RLHFError
from rlhf_cli.models import build, devices, load, save, tokenizers


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_saved_model_is_a_plain_folder(world: World) -> None:
    names = {path.name for path in world.base.iterdir()}
    assert {"config.json", "model.safetensors", "generation_config.json", "tokenizer.json", "README.md"} <= names
    generation = json.loads((world.base / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["pad_token_id"]) == (1, 0)
    ids = torch.tensor([[5, 6, 7]])
    plain = AutoModelForCausalLM.from_pretrained(world.base)
    assert torch.equal(plain(ids).logits, load.load_causal_lm(world.base).eval()(ids).logits)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("auto", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float32)],  # E01: float16 on a CPU
)
def test_dtype_auto_and_unsupported_dtypes_load_in_float32(
    world: World, tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    if name == "float16" and devices.supports_dtype(name):
        pytest.skip("this machine supports float16")
    load.load_causal_lm(world.base).bfloat16().save_pretrained(tmp_path)
    assert load.load_causal_lm(tmp_path, dtype=name).dtype == dtype


def test_a_reward_model_has_the_causal_models_backbone_and_keeps_its_head(world: World, tmp_path: Path) -> None:
    save.save_model(load.init_reward_model(world.base), world.tokenizer(), tmp_path, "A reward model.")
    model, causal = load.load_reward_model(tmp_path), load.load_causal_lm(world.base)
    assert model.num_labels == 1 and model.score.weight.abs().sum() > 0
    assert same_weights(model.model, causal.model)
    assert torch.equal(load.init_reward_model(tmp_path).score.weight, model.score.weight)


def test_new_weights_get_vocabulary_and_special_tokens_from_the_tokenizer(tokenizer: Any) -> None:
    model = build.new_causal_lm({**SIZES, "model_type": "qwen2"}, tokenizer)
    assert model.config.model_type == "qwen2" and model.dtype == torch.float32
    assert (model.config.vocab_size, model.config.pad_token_id, model.config.eos_token_id) == (len(tokenizer), 0, 1)


@pytest.mark.parametrize(
    ("fields", "code", "hint"),
    [
        ({"model_type": "lama"}, "C07", "did you mean llama?"),
        ({"hiden_size": 32}, "C01", "did you mean hidden_size?"),
        ({"vocab_size": 99}, "C17", "remove the line"),
    ],
)
def test_invalid_fields_of_a_new_model(tokenizer: Any, fields: dict[str, Any], code: str, hint: str) -> None:
    with pytest.raises(RLHFError) as error:
        build.new_causal_lm(fields, tokenizer)
    assert error.value.problems[0].code == code and hint in str(error.value)


def test_an_added_token_changes_no_other_logit_and_has_no_large_one(world: World) -> None:
    tokenizer, model = world.tokenizer(), load.load_causal_lm(world.base).eval()
    ids = torch.arange(2, 20)[None]
    before = model(ids).logits
    tokenizer.pad_token = None
    tokenizers.ensure_pad_token(tokenizer, stop_token_id=tokenizer.eos_token_id)
    tokenizers.resize_to_tokenizer(model, tokenizer)
    after = model(ids).logits
    assert after.shape[-1] == before.shape[-1] + 1 == model.config.vocab_size
    assert torch.allclose(after[..., :-1], before, atol=1e-5)
    assert (after[..., -1] < before.amax(-1)).all()


def test_a_saved_tree_is_loaded_exactly_and_shares_no_tensor(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    tree = {"a": [weight, weight, weight.T], 3: (weight[1], None), "n": [1, 0.1, "x", True]}
    save.save_tree(tmp_path, tree)
    loaded = save.load_tree(tmp_path)
    assert [each.tolist() for each in loaded["a"]] == [each.tolist() for each in tree["a"]]
    assert loaded[3][0].tolist() == [3, 4, 5] and loaded[3][1] is None and loaded["n"] == [1, 0.1, "x", True]
    loaded["a"][0][:] = 0
    assert loaded["a"][1].tolist() == weight.tolist()
