"""`rlhf sft`: real training by TRL's SFTTrainer on a tiny model.

Modules: `config/sft.py`, `stages/common/trainable_model.py`, `stages/common/training_rows.py`,
`stages/common/trl_callback.py`, `stages/common/trl_trainer.py`, `stages/common/trl_training.py`.
"""

import json
import math
import re
import shutil
import signal
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
import trl_stage
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl_stage import base_padded_with_eos, manifest_of, metrics_of, signal_at, train, trainer_of

from rlhf_cli import data, jsonl, progress, runs
from rlhf_cli.config.sft import SFTConfig
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import forward
from rlhf_cli.models.load import load_causal_lm
from rlhf_cli.runs import stage_folder
from rlhf_cli.stages import sft
from tests.conftest import SIZES, World

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


@pytest.fixture
def copied(world: World, finished: Path, tmp_path: Path) -> SFTConfig:
    """The config of a copy of it."""
    return config_of(world, Path(shutil.copytree(finished, tmp_path / "run")))


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


def test_the_loops_loss_is_a_mean_over_tokens_like_the_headline(world: World, tmp_path: Path) -> None:
    """Rows of different length, in batches of one: the mean of the batches' means would be another number."""
    rows = [{"prompt": "Say it.", "completion": " moon" * count} for count in (1, 1, 1, 2, 3, 12, 24, 1)]
    jsonl.write_jsonl(tmp_path / "rows.jsonl", rows)
    sizes = {"num_train_epochs": 2, "max_steps": None, "learning_rate": 1e-12, "per_device_eval_batch_size": 1}
    config = config_of(world, tmp_path, tmp_path / "rows.jsonl", sft=sizes)
    headline = train(config)["metrics"]
    first, last = (line["eval_loss"] for line in metrics_of(config) if "eval_loss" in line)
    assert first == pytest.approx(headline["eval_loss"], rel=1e-4) and last == headline["eval_loss"]


@pytest.mark.parametrize("completion_only", [True, False])
def test_trl_gets_our_tokens_and_labels_unchanged(world: World, tmp_path: Path, completion_only: bool) -> None:
    config = config_of(world, tmp_path, sft={"completion_only_loss": completion_only})
    trainer, token_rows, tokenizer = trainer_of(config)
    expected = []
    for _, row in jsonl.read_jsonl(world.sft):
        prompt, response = data.encode(tokenizer, row["prompt"], row["completion"])
        expected.append((prompt + response, ([-100] * len(prompt) if completion_only else prompt) + response))
    assert [(row["input_ids"], row["labels"]) for row in token_rows] == expected
    seen, names = [], ("input_ids", "labels", "attention_mask")
    for batch in trainer.get_train_dataloader():
        assert batch.keys() == set(names)
        for ids, labels, mask in zip(*(batch[name].tolist() for name in names), strict=True):
            length = sum(mask)
            assert set(ids[length:]) <= {tokenizer.pad_token_id} and set(labels[length:]) <= {-100}
            assert labels[length - 1] == ids[length - 1] == tokenizer.eos_token_id
            seen.append((ids[:length], labels[:length]))
    assert sorted(seen) == sorted(expected)


def test_batches_have_rows_of_similar_length_with_group_by_length(world: World, tmp_path: Path) -> None:
    jsonl.write_jsonl(tmp_path / "long.jsonl", [{"prompt": "a", "completion": " b" * (1 + n % 40)} for n in range(160)])

    def padding(group: bool) -> int:
        trainer = trainer_of(config_of(world, tmp_path, tmp_path / "long.jsonl", sft={"group_by_length": group}))[0]
        return sum(int((batch["attention_mask"] == 0).sum()) for batch in trainer.get_train_dataloader())

    assert padding(True) < 0.2 * padding(False)


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


def test_packed_rows_do_not_attend_to_one_another(world: World, tmp_path: Path) -> None:
    config = config_of(world, tmp_path, sft={"packing": True, "max_length": 64, "max_steps": 2})
    trainer, token_rows, _ = trainer_of(config)
    batch = next(iter(trainer.get_train_dataloader()))
    labels = batch.pop("labels")
    starts = [*(batch["position_ids"][0] == 0).nonzero().flatten().tolist(), labels.shape[1]]
    assert len(starts) > 16  # eight sequences of at least two rows
    known = {tuple(row["input_ids"]): row["labels"] for row in token_rows}
    with torch.no_grad():
        together = trainer.model.eval()(**batch, use_cache=False).logits[0]
        for start, stop in pairwise(starts):
            ids = batch["input_ids"][:, start:stop]
            assert torch.allclose(trainer.model(ids, use_cache=False).logits[0], together[start:stop], atol=1e-4)
            assert labels[0, start + 1 : stop].tolist() == known[tuple(ids[0].tolist())][1:]
    assert train(config)["step"] == 2


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


def test_an_sft_stage_is_a_parent_and_its_tokens_are_kept(world: World, copied: SFTConfig) -> None:
    first, folder = manifest_of(copied), copied.folder.parent / "next"
    second = train(config_of(world, folder, model={"path": "../sft"}, sft={"max_steps": 2}))
    assert second["parents"]["model.path"] == {"path": "../../sft", "stage": "sft", "sha256": first["model_sha256"]}
    assert second["tokenizer_sha256"] == first["tokenizer_sha256"]


@pytest.mark.parametrize(("log", "save"), [(1, 8), (8, 1)])
def test_r01_a_loss_that_is_no_number_stops_the_run_before_it_is_saved(
    world: World, tmp_path: Path, log: int, save: int
) -> None:
    settings = {"learning_rate": 1e30, "warmup_ratio": 0.0, "logging_steps": log}
    config = config_of(world, tmp_path, sft=settings, output={"save_steps": save})
    fails(config, "R01", "at step")
    saved = [load_file(path) for path in config.folder.rglob("model.safetensors")]
    assert all(torch.isfinite(tensor).all() for weights in saved for tensor in weights.values())


def test_other_fields_of_trl_reach_it_or_are_refused_in_one_line(world: World, tmp_path: Path) -> None:
    config = config_of(world, tmp_path, trainer={"neftune_noise_alpha": 5.0, "optim": "sgd"}, seed=7)
    args = trainer_of(config)[0].args
    assert (args.neftune_noise_alpha, args.optim, args.seed) == (5.0, "sgd", 7)
    assert not args.bf16 or torch.cuda.is_available()
    assert (args.max_steps, args.warmup_steps, args.save_steps) == (8, 0.03, 0.1)
    assert isinstance(args, trl.SFTConfig)
    schedules = {"cosine_warmup_with_min_lr": {"min_lr_rate": 0.1}, "warmup_stable_decay": {"num_decay_steps": 1}}
    for name, options in schedules.items():
        trainer = trainer_of(config_of(world, tmp_path, sft={"lr_scheduler_type": name}))[0]
        assert trainer.args.lr_scheduler_kwargs == options
        trainer.create_scheduler(8, trainer.create_optimizer())
    fails(config_of(world, tmp_path, trainer={"padding_free": True}), "C17", "padding_free")


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
