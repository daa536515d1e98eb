"""Models in and out of folders, and what is refused on the way."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SIZES, World
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_cli.errors import RLHFError
from rlhf_cli.models import build, devices, load, save, tokenizers


def code_of(call: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(RLHFError) as error:
        call(*arguments, **options)
    assert error.value.exit_code == 2
    return error.value.problems[0].code


def copy_of(world: World, folder: Path, **changes: Any) -> Path:
    """The base model's folder with changes in its config.json."""
    shutil.copytree(world.base, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


@pytest.fixture
def scorer_folder(world: World, tmp_path: Path) -> Path:
    model = load.init_reward_model(world.base)
    save.save_model(model, world.tokenizer(), tmp_path / "scorer", "A scorer.")
    return tmp_path / "scorer"


def test_a_saved_model_is_a_plain_folder(world: World) -> None:
    names = {path.name for path in world.base.iterdir()}
    assert {"config.json", "model.safetensors", "generation_config.json", "tokenizer.json", "README.md"} <= names
    generation = json.loads((world.base / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["pad_token_id"]) == (1, 0)
    ids = torch.tensor([[5, 6, 7]])
    plain = AutoModelForCausalLM.from_pretrained(world.base)
    assert torch.equal(plain(ids).logits, load.load_causal_lm(world.base).eval()(ids).logits)


@pytest.mark.parametrize(("name", "dtype"), [("auto", torch.float32), ("bfloat16", torch.bfloat16)])
def test_dtype_auto_is_float32_even_for_weights_stored_in_bfloat16(
    world: World, tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    load.load_causal_lm(world.base).bfloat16().save_pretrained(tmp_path)
    assert load.load_causal_lm(tmp_path, dtype=name).dtype == dtype


@pytest.mark.skipif(torch.cuda.is_available(), reason="float16 works on this machine")
def test_e01_a_format_that_the_device_lacks_becomes_float32(world: World) -> None:
    assert [devices.supports_dtype(name) for name in ("float16", "bfloat16", "float32")] == [False, True, True]
    assert load.load_causal_lm(world.base, dtype="float16").dtype == torch.float32
    assert load.load_causal_lm(world.base, dtype="bfloat16").dtype == torch.bfloat16


def test_a_scorer_has_the_causal_models_body_and_one_label(world: World, scorer_folder: Path) -> None:
    scorer, causal = load.load_reward_model(scorer_folder), load.load_causal_lm(world.base)
    assert scorer.num_labels == 1 and scorer.score.weight.abs().sum() > 0
    pairs = zip(scorer.model.parameters(), causal.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    again = load.init_reward_model(scorer_folder)
    assert torch.equal(again.score.weight, scorer.score.weight)  # a head that is there is kept


def test_a_scorer_around_a_policy_is_its_body_and_the_head(world: World, tmp_path: Path) -> None:
    causal = load.load_causal_lm(world.base)
    head = torch.nn.Linear(causal.config.hidden_size, 1, bias=False)
    scorer = load.reward_model_from_backbone(causal, head)
    assert scorer.model is causal.model and scorer.num_labels == 1
    scorer.save_pretrained(tmp_path)
    again = load.load_reward_model(tmp_path)
    assert torch.equal(again.score.weight, head.weight)
    pairs = zip(again.model.parameters(), causal.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_m01_nothing_to_load(tmp_path: Path) -> None:
    assert code_of(load.load_causal_lm, tmp_path) == "M01"


def test_m02_no_reward_head(world: World, scorer_folder: Path) -> None:
    assert code_of(load.load_reward_model, world.base) == "M02"
    config = scorer_folder / "config.json"  # says it is a classifier, but the weights lack the head
    shutil.copy(world.base / "model.safetensors", scorer_folder)
    assert "ForSequenceClassification" in config.read_text()
    assert code_of(load.load_reward_model, scorer_folder) == "M02"


def test_m03_two_labels(world: World, tmp_path: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(world.base, num_labels=2)
    model.save_pretrained(tmp_path)
    assert code_of(load.load_reward_model, tmp_path) == "M03"
    assert code_of(load.init_reward_model, tmp_path) == "M03"


def test_m06_ids_beyond_the_embeddings(world: World) -> None:
    tokenizer, model = world.tokenizer(), load.load_causal_lm(world.base)
    tokenizers.check_vocabulary(model, tokenizer)
    tokenizer.add_tokens(["one too many"])
    assert code_of(tokenizers.check_vocabulary, model, tokenizer) == "M06"


def test_m07_pickled_weights(world: World, tmp_path: Path) -> None:
    folder = copy_of(world, tmp_path / "pickled")
    torch.save(load.load_causal_lm(world.base).state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert code_of(load.load_causal_lm, folder) == "M07"


def test_m08_code_of_the_models_own(world: World, tmp_path: Path) -> None:
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    folder = copy_of(world, tmp_path / "coded", model_type="own", auto_map=auto_map)
    assert code_of(load.load_causal_lm, folder) == "M08"


def test_fresh_weights_take_vocabulary_and_special_tokens_from_the_tokenizer(world: World) -> None:
    tokenizer = world.tokenizer()
    model = build.new_causal_lm({**SIZES, "model_type": "qwen2"}, tokenizer)
    assert model.config.model_type == "qwen2" and model.dtype == torch.float32
    assert (model.config.vocab_size, model.config.pad_token_id, model.config.eos_token_id) == (len(tokenizer), 0, 1)


@pytest.mark.parametrize(
    ("fields", "code", "hint"),
    [
        ({"model_type": "lama"}, "C07", "did you mean llama?"),
        ({"hiden_size": 32}, "C01", "did you mean hidden_size?"),
        ({"vocab_size": 99}, "C17", "take the line out"),
    ],
)
def test_fields_that_make_no_model(world: World, fields: dict[str, Any], code: str, hint: str) -> None:
    with pytest.raises(RLHFError) as error:
        build.new_causal_lm(fields, world.tokenizer())
    assert error.value.problems[0].code == code and hint in str(error.value)


def test_an_added_token_changes_no_other_logit_and_does_not_stand_out(world: World) -> None:
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
