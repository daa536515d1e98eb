"""The tokenizer and the model that are trained: pad and stop tokens, templates, fresh weights."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl_stage import base_padded_with_eos, metrics_of, train, trainer_of

from tests.conftest import SIZES, World
from tests.stages.test_sft import config_of

pytestmark = pytest.mark.full


def test_t01_a_pad_token_that_is_the_stop_token_is_replaced_and_the_stop_token_is_trained(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(world, tmp_path, model={"path": str(base_padded_with_eos(world, tmp_path))})
    trainer, _, tokenizer = trainer_of(config)
    for batch in trainer.get_train_dataloader():
        assert (batch["labels"] == tokenizer.eos_token_id).sum() == len(batch["labels"])
    manifest = train(config)
    err = capsys.readouterr().err
    assert "warning[T01]" in err and "[PAD]" in err
    pad = manifest["special_tokens"]["pad"]
    assert pad == len(world.tokenizer()) and manifest["special_tokens"]["stop"] == 1
    saved = AutoModelForCausalLM.from_pretrained(config.folder / "model")
    assert saved.config.vocab_size == pad + 1 == saved.get_input_embeddings().weight.shape[0]
    assert AutoTokenizer.from_pretrained(config.folder / "model").pad_token == "[PAD]"


def test_messages_with_chatml_are_trained_to_stop_with_its_token(world: World, tmp_path: Path) -> None:
    model = {"path": str(world.base), "chat_template": "chatml"}
    config = config_of(world, tmp_path, world.messages, model=model)
    manifest = train(config)
    tokenizer = AutoTokenizer.from_pretrained(config.folder / "model")
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert manifest["special_tokens"]["stop"] == stop and manifest["template_sha256"]
    generation = json.loads((config.folder / "model" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [stop, tokenizer.eos_token_id] and tokenizer.chat_template
    assert manifest["metrics"]["eval_rows"] == 2 * 96  # an example for each turn of the assistant


def test_fresh_weights_packed_from_plain_text(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = {"new": {**SIZES, "tokenizer": {"train": str(world.text), "vocab_size": 320}}}
    settings = {"packing": True, "max_length": 32, "max_steps": 30, "logging_steps": 10}
    config = config_of(world, tmp_path, world.text, model=model, sft=settings)
    trainer, token_rows, _ = trainer_of(config)
    assert sum(len(row["input_ids"]) for row in token_rows) == sum(map(len, trainer.train_dataset["input_ids"]))
    assert set(map(len, trainer.train_dataset["input_ids"][:-1])) == {32}
    manifest = train(config)
    assert "packing: wrapped" in capsys.readouterr().err
    lines = [line for line in metrics_of(config) if "loss" in line]
    assert 2500 < lines[0]["num_tokens"] <= 10 * 8 * 32 and lines[-1]["loss"] < 0.7 * lines[0]["loss"]
    assert manifest["parents"] == {} and "model.new.tokenizer.train" in manifest["data"]
    names = "loss perplexity entropy token_accuracy tokens rows"
    assert set(manifest["metrics"]) == {f"eval_{name}" for name in names.split()}
