"""Checks of tokenizers, templates, rows and models."""

import shutil
from pathlib import Path

import pytest
from bad_inputs import check, foreign_scorer, replace
from safetensors.torch import load_file, save_file

from rlhf_cli import jsonl
from rlhf_cli.models import tokenizers
from tests.pipeline.test_check import lines, messages
from tests.pipeline.test_check_report import json_report


def test_lengths_are_those_of_the_stage(folder: Path) -> None:
    tokenizer = tokenizers.load_tokenizer(folder / "model")
    texts = [{"prompt": "Tell me", "completion": " about the sun" * (n % 7 + 1)} for n in range(96)]
    jsonl.write_jsonl(folder / "rows.jsonl", texts)
    lengths = [sum(len(tokenizer(text).input_ids) for text in row.values()) + 1 for row in texts]
    for limit, left_out in (1000, 0), (20, sum(length > 20 for length in lengths)):
        checked = json_report("sft.yaml", f"sft.max_length={limit}")["checked"]
        (numbers,) = [each for each in checked if each["what"] == "data.train"]
        assert (numbers["rows"], numbers["left_out"]) == (96 - left_out, left_out)
        assert numbers["longest"] == max(length for length in lengths if length <= limit)


def test_batches_are_those_of_all_processes(run_folder: Path) -> None:
    two = lines(check(".", "--nproc", "2").stdout)
    assert " x 2 processes = " in two["sft", "batches"] and " x 2 processes = " in two["ppo", "batches"]
    many = check("sft.yaml", "--nproc", "97")
    assert many.exit_code == 2 and "hint: start 96 processes at most, or bring more rows" in many.stderr
    assert "error[C07]" in check("sft.yaml", "--nproc", "some").stderr


def test_fresh_weights(run_folder: Path) -> None:
    new = "new: {hidden_size: 32, num_attention_heads: 4, num_hidden_layers: 1, max_position_embeddings: 64, "
    replace("sft.yaml", "path: model", new + "tokenizer: {train: rows.jsonl, vocab_size: 300}}")
    replace("sft.yaml", "max_steps: 1", "max_steps: 1, max_length: 64")
    quick = check(".")
    assert quick.exit_code == 0 and lines(quick.stdout)["sft", "data.train"] == "96 rows; columns: prompt, completion"
    assert "not checked: sft model.new: its tokenizer" in quick.stdout
    deep = check(".", "--deep")
    assert deep.exit_code == 0 and lines(deep.stdout)["ppo", "data.prompts"].startswith("96 prompts, at most ")
    assert "not checked" not in deep.stdout
    replace("sft.yaml", "hidden_size", "hiden_size")
    assert "error[C01]: sft.yaml:1: model.new.hiden_size" in check(".").stderr


def test_evaluation_prompts_that_a_stage_trains_on(run_folder: Path) -> None:
    """D13 across stages, once for each training file that contains them."""
    _, pair = next(jsonl.read_jsonl(run_folder / "pairs.jsonl"))
    jsonl.write_jsonl(run_folder / "held-out.jsonl", [{"prompt": pair["prompt"]}, {"prompt": "Something else?"}])
    result = check(".")
    warnings = messages(result, "warning[D13]: eval.yaml:1: 1 of 2 evaluation prompts also occur in")
    assert [line.rpartition(" ")[2] for line in warnings] == ["rows.jsonl", "pairs.jsonl", "prompts.jsonl"]
    assert result.exit_code == 0


@pytest.mark.parametrize("deep", [False, True])
def test_models_are_loaded_only_with_the_option(folder: Path, deep: bool) -> None:
    """M13: one tied matrix is expected, and two are stored; only their numbers show if they are equal."""
    tensors = load_file(folder / "model/model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, folder / "model/model.safetensors", metadata={"format": "pt"})
    result = check("sft.yaml", *(["--deep"] if deep else []))
    assert result.exit_code == (2 if deep else 0), result.stderr
    assert ("error[M13]: sft.yaml:1: model: config.json has tie_word_embeddings" in result.stderr) == deep


def test_a_missing_head_is_found_without_loading(folder: Path) -> None:
    foreign_scorer(folder)
    shutil.copy(folder / "model/model.safetensors", folder / "scorer")
    result = check("ppo.yaml")
    assert result.exit_code == 2 and "error[M02]: ppo.yaml:1: scorer has no trained reward head" in result.stderr


def test_t04_and_t05_against_a_stage_that_is_still_to_run(run_folder: Path) -> None:
    foreign_scorer(run_folder)
    (run_folder / "ppo.yaml").write_text("models: {reward: scorer}\n" + (run_folder / "ppo.yaml").read_text())
    assert check(".").exit_code == 0
    replace("sft.yaml", "path: model", "path: model, chat_template: chatml")
    assert "error[T04]: ppo.yaml:1: models.reward has another tokenizer" in check(".").stderr
    replace("reward.yaml", "data:", "model: {chat_template: '{{ messages }}'}\ndata:")
    assert "error[T05]: reward.yaml:1: model.chat_template is not that of the SFT stage" in check(".").stderr


def test_prompts_that_do_not_fit_have_a_reason(folder: Path) -> None:
    replace("ppo.yaml", "total_episodes: 64", "total_episodes: 64\n  response_length: 126")
    result = check("ppo.yaml")
    assert result.exit_code == 2 and "error[D05]: " in result.stderr
    assert "hint: lower ppo.response_length (126 tokens for a response leave 2 to a prompt), or use" in result.stderr
