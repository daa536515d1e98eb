"""`rlhf sft`: real training by TRL's SFTTrainer on a tiny model.

Modules: `config/sft.py`.
"""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import trl_stage
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl_stage import manifest_of, metrics_of, train

from rlhf_cli import data, jsonl, runs
from rlhf_cli.config.sft import SFTConfig
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import forward
from rlhf_cli.models.load import load_causal_lm
from rlhf_cli.stages import sft
from rlhf_cli.stages.common.lifecycle import StageRun
from tests.conftest import World

pytestmark = pytest.mark.full

TRAIN_KEYS = {"loss", "mean_token_accuracy", "entropy", "num_tokens", "grad_norm", "lr", "epoch"}
EVAL_KEYS = {"eval_loss", "eval_mean_token_accuracy", "eval_entropy", "eval_num_tokens", "epoch"}


def config_of(world: World, folder: Path, rows: Path | None = None, **sections: Any) -> SFTConfig:
    sections["sft"] = {"max_steps": 8, "logging_steps": 2, **sections.get("sft", {})}
    return trl_stage.config_of(world, "sft", folder, world.base, rows or world.sft, **sections)


def fails(config: SFTConfig, code: str, *says: str) -> None:
    with pytest.raises(RLHFError) as caught:
        trl_stage.run(config)
    assert caught.value.problems[0].code == code and all(text in str(caught.value) for text in says)
    assert not (config.folder / "manifest.json").exists()


@pytest.fixture(scope="module")
def finished(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a quick finished run. Read-only."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(config_of(world, folder))
    return folder


def test_data_that_vanish_once_they_are_read_end_no_run(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.jsonl"
    shutil.copy(world.sft, rows)
    begin = StageRun.begin_training

    def begin_without_data(stage: StageRun) -> None:
        begin(stage)
        rows.unlink()

    monkeypatch.setattr(StageRun, "begin_training", begin_without_data)
    assert train(config_of(world, tmp_path / "run", rows))["step"] == 8 and not rows.exists()


@pytest.fixture
def copied(world: World, finished: Path, tmp_path: Path) -> SFTConfig:
    """The config of a copy of it."""
    return config_of(world, Path(shutil.copytree(finished, tmp_path / "run")))


def test_it_trains_and_writes_a_plain_folder_and_every_metric(world: World, tmp_path: Path) -> None:
    config = config_of(world, tmp_path, sft={"max_steps": 40, "eval_steps": 20, "logging_steps": 10})
    manifest = train(config)
    lines = metrics_of(config)
    training, evaluation = ([line for line in lines if key in line] for key in ("loss", "eval_loss"))
    assert [line["step"] for line in training] == [10, 20, 30, 40] and [line["step"] for line in evaluation] == [20, 40]
    assert all(line.keys() == TRAIN_KEYS | {"step"} for line in training)
    assert [line.keys() - {"step"} for line in evaluation] == [EVAL_KEYS, EVAL_KEYS]
    assert training[-1]["loss"] < 0.6 * training[0]["loss"]

    folder = config.folder / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.use_cache and (model.generation_config.eos_token_id, tokenizer.pad_token_id) == (1, 0)
    prompt = tokenizer("Tell me about the moon.", return_tensors="pt")
    generated = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    assert generated[0, -1] == 1 and tokenizer.decode(generated[0]).startswith("Tell me about the moon. The ")
    card = (folder / "README.md").read_text()
    assert "40 steps" in card and str(tmp_path) not in card and str(world.folder) not in card
    assert not [path for path in config.folder.rglob("*") if path.name in ("training_args.bin", "README.md")][1:]
    assert manifest["special_tokens"] == {"pad": 0, "bos": None, "eos": 1, "stop": 1}
    assert manifest["parents"]["model.path"]["stage"] == "foreign" and manifest["step"] == 40


def test_the_headline_is_the_saved_models_loss_over_the_rows(world: World, copied: SFTConfig) -> None:
    config, headline = copied, manifest_of(copied)["metrics"]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(config.folder / "model"), world.tokenizer()
    losses, entropies, correct = [], [], []
    for _, row in jsonl.read_jsonl(world.sft):
        prompt, response = data.encode(tokenizer, row["prompt"], row["completion"])
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        targets = torch.tensor(response)
        losses += torch.nn.functional.cross_entropy(logits, targets, reduction="none").tolist()
        entropies += torch.distributions.Categorical(logits=logits).entropy().tolist()
        correct += (logits.argmax(-1) == targets).tolist()
    loss, count = sum(losses), len(losses)
    assert (headline["eval_tokens"], headline["eval_rows"]) == (count, 96)
    assert headline["eval_loss"] == pytest.approx(loss / count, rel=1e-5)
    assert headline["eval_entropy"] == pytest.approx(sum(entropies) / count, rel=1e-5)
    assert headline["eval_token_accuracy"] == pytest.approx(sum(correct) / count)
    assert headline["eval_perplexity"] == pytest.approx(math.exp(loss / count), rel=1e-4)
    assert metrics_of(config)[-1]["eval_loss"] == headline["eval_loss"]


def test_the_headline_does_not_depend_on_the_logits_at_a_time(
    world: World, copied: SFTConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = load_causal_lm(copied.folder / "model"), world.tokenizer()
    encoded = [data.encode(tokenizer, row["prompt"], row["completion"]) for _, row in jsonl.read_jsonl(world.sft)][:8]
    ids, labels = [p + r for p, r in encoded], [[-100] * len(p) + r for p, r in encoded]
    whole = sft._batch_sums(model, ids, labels, 0)
    monkeypatch.setattr(forward, "MAX_LOGITS", 1)
    monkeypatch.setattr(forward, "MIN_CHUNK_TOKENS", 3)
    assert len(forward.logit_chunks(model, whole[3])) > 10
    assert sft._batch_sums(model, ids, labels, 0) == pytest.approx(whole, rel=1e-5)


def test_an_sft_stage_is_a_parent_and_its_tokens_are_kept(world: World, copied: SFTConfig) -> None:
    first, folder = manifest_of(copied), copied.folder.parent / "next"
    second = train(config_of(world, folder, model={"path": "../sft"}, sft={"max_steps": 2}))
    assert second["parents"]["model.path"] == {"path": "../../sft", "stage": "sft", "sha256": first["model_sha256"]}
    assert second["tokenizer_sha256"] == first["tokenizer_sha256"]


def test_a_model_that_diverged_never_counts_as_finished(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither immediately, nor when the same command finds the last step saved: the finished model's loss decides."""
    config = config_of(world, tmp_path, sft={"max_steps": 1})
    monkeypatch.setattr(sft, "_batch_sums", lambda *_: sft.TokenSums(math.nan, 0.0, 0, 10))
    for _ in range(2):
        fails(config, "R01", "the training diverged")
        runs.release()
    monkeypatch.undo()
    assert math.isfinite(train(config)["metrics"]["eval_loss"])
