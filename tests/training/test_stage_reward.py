"""`rlhf reward`: real training by TRL's RewardTrainer on a tiny model."""

import json
import math
import os
import re
import shutil
import signal
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import World
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlhf_cli import data, jsonl, progress, runs
from rlhf_cli.config.base import Options
from rlhf_cli.config.loading import load
from rlhf_cli.config.training import RewardConfig
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import batch as models_batch
from rlhf_cli.models import forward, tokenizers
from rlhf_cli.models.batch import Rollout
from rlhf_cli.models.load import load_reward_model
from rlhf_cli.stages import reward, sft, training_setup, trl_common
from rlhf_cli.statistics import wilson

pytestmark = pytest.mark.training

METRICS = {"loss", "accuracy", "margin", "min_reward", "mean_reward", "max_reward", "num_tokens"}
TRAIN_KEYS = METRICS | {"grad_norm", "lr", "epoch"}
EVAL_KEYS = {f"eval_{name}" for name in METRICS} | {"epoch"}
QUICK = {"max_length": 64, "max_steps": 6, "per_device_train_batch_size": 8, "learning_rate": 3e-3}
QUICK |= {"normalize_samples": 24}


@pytest.fixture(scope="module")
def sft_stage(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished SFT stage."""
    folder = tmp_path_factory.mktemp("parent")
    settings = {"max_length": 64, "max_steps": 40, "per_device_train_batch_size": 8, "learning_rate": 3e-3}
    sections = {"model": {"path": str(world.base)}, "data": {"train": str(world.sft)}, "sft": settings}
    sft.run(load("sft", world.config(folder, "sft", **sections)), Options())
    return folder / "sft"


def config_of(world: World, folder: Path, parent: Path, pairs: Path | None = None, **sections: Any) -> RewardConfig:
    """A reward.yaml in `folder` that trains from `parent` on pairs; sections override the quick ones."""
    folder.mkdir(exist_ok=True)
    path = str(pairs or world.pairs)
    defaults = {"model": {"path": str(parent)}, "data": {"train": path, "eval": path}}
    sections["reward"] = {**QUICK, **sections.get("reward", {})}
    return load("reward", world.config(folder, "reward", **{**defaults, **sections}))


def train(config: RewardConfig) -> dict[str, Any]:
    """Run the stage and return its manifest."""
    reward.run(config, Options())
    return json.loads((config.folder / "manifest.json").read_text())


def metrics_of(config: RewardConfig) -> list[dict[str, Any]]:
    return [row for _, row in jsonl.read_jsonl(config.folder / "metrics.jsonl")]


def trainer_of(config: RewardConfig) -> tuple[Any, list[dict[str, Any]], Any]:
    """The stage's trainer before training, its token rows, and the tokenizer."""
    tokenizer, model = reward.load_tokenizer_and_model(config, Options(), runs.open_parents(config)["model.path"])
    token_rows, held_out = reward.read_rows(config, tokenizer, model.config)
    trainer = reward.make_trainer(config, model, tokenizer, token_rows, held_out)
    shutil.rmtree(config.folder)  # transformers creates the folder
    return trainer, token_rows, tokenizer


def problem_of(config: RewardConfig) -> str:
    with pytest.raises(RLHFError) as error:
        reward.run(config, Options())
    assert error.value.exit_code == 2
    return str(error.value)


def test_every_evaluation_shows_its_batches_and_the_last_is_made_once(
    world: World,
    tmp_path: Path,
    sft_stage: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of two epochs TRL's loop evaluates after the first; the report card's scores are the other evaluation."""
    clock, batches = [0.0], Counter[str]()
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def slow(name: str, call: Any) -> Any:
        def batch(*args: Any, **kwargs: Any) -> Any:
            clock[0] += 11
            batches[name] += 1
            return call(*args, **kwargs)

        return batch

    monkeypatch.setattr(reward.RewardTrainer, "prediction_step", slow("loop", reward.RewardTrainer.prediction_step))
    monkeypatch.setattr(reward, "right_pad", slow("own", models_batch.right_pad))
    sizes = {"num_train_epochs": 2, "max_steps": None, "per_device_eval_batch_size": 24, "normalize": "none"}
    manifest = train(config_of(world, tmp_path, sft_stage, reward=sizes))
    lines = capsys.readouterr().err.splitlines()
    assert batches["loop"] == 4
    assert len([line for line in lines if re.search(r"12/24 step.* evaluation: batch \d/4", line)]) == 4
    scored = [line for line in lines if "reward: report card" in line and "score: batch" in line]
    assert len(scored) >= 8 and sum("report card 0/" in line for line in scored) == 4
    first, last = (line for line in metrics_of(config_of(world, tmp_path, sft_stage)) if "eval_loss" in line)
    assert (first["step"], last["step"]) == (12, 24) and last["eval_accuracy"] == manifest["metrics"]["accuracy"]


def test_the_last_line_has_the_loss_of_the_training(world: World, tmp_path: Path, sft_stage: Path) -> None:
    """Without learning, our own pass computes TRL's numbers; the pairs have margins, and scores are centred."""
    pairs = [{**row, "margin": 0.1 * (number % 5)} for number, (_, row) in enumerate(jsonl.read_jsonl(world.pairs))]
    jsonl.write_jsonl(tmp_path / "pairs.jsonl", pairs[:32])
    sizes = {"num_train_epochs": 2, "max_steps": None, "learning_rate": 1e-12, "center_rewards_coefficient": 0.3}
    config = config_of(world, tmp_path, sft_stage, tmp_path / "pairs.jsonl", reward={**sizes, "normalize": "none"})
    train(config)
    first, last = (line for line in metrics_of(config) if "eval_loss" in line)
    for name in EVAL_KEYS - {"eval_num_tokens", "epoch"}:
        assert last[name] == pytest.approx(first[name], rel=1e-4), name
    assert (last["eval_num_tokens"], last["epoch"]) == (2 * first["eval_num_tokens"], 2)


def test_it_learns_the_preference_and_writes_a_plain_folder_and_every_metric(
    world: World, tmp_path: Path, sft_stage: Path
) -> None:
    settings = {"max_steps": 40, "eval_steps": 20, "logging_steps": 10}
    config = config_of(world, tmp_path, sft_stage, reward=settings)
    manifest = train(config)
    lines = metrics_of(config)
    training, evaluation = ([line for line in lines if key in line] for key in ("loss", "eval_loss"))
    assert [line["step"] for line in training] == [10, 20, 30, 40] and [line["step"] for line in evaluation] == [20, 40]
    assert all(line.keys() == TRAIN_KEYS | {"step", "time_s"} for line in training)
    assert [line.keys() - {"step", "time_s"} for line in evaluation] == [EVAL_KEYS, EVAL_KEYS]
    assert evaluation[-1]["eval_accuracy"] > 0.95

    scorer = AutoModelForSequenceClassification.from_pretrained(config.folder / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(config.folder / "model")
    margins = []
    for _, row in jsonl.read_jsonl(world.pairs):
        prompt, chosen = data.encode(tokenizer, row["prompt"], row["chosen"])
        _, rejected = data.encode(tokenizer, row["prompt"], row["rejected"])
        with torch.no_grad():
            good, bad = (float(scorer(torch.tensor([prompt + answer])).logits) for answer in (chosen, rejected))
        margins.append(good - bad)
    headline, wins = manifest["metrics"], sum(margin > 0 for margin in margins)
    assert (headline["n"], headline["accuracy"]) == (96, wins / 96) and wins > 90
    assert headline["accuracy_ci95"] == pytest.approx(wilson(wins, 96))
    assert headline["margin"] == pytest.approx(sum(margins) / 96, rel=1e-4)
    assert manifest["parents"]["model.path"]["stage"] == "sft" and manifest["special_tokens"]["stop"] == 1
    card = (config.folder / "model" / "README.md").read_text()
    assert "the sft stage" in card and str(tmp_path) not in card and not list(config.folder.rglob("training_args.bin"))


def test_normalised_scores_of_the_sft_models_answers_have_mean_0_and_deviation_1(
    world: World, tmp_path: Path, sft_stage: Path
) -> None:
    config = config_of(world, tmp_path, sft_stage, reward={"max_steps": 20})
    manifest = train(config)
    scorer = load_reward_model(config.folder / "model").eval()
    assert (scorer.config.reward_mean, scorer.config.reward_std) == (manifest["reward_mean"], manifest["reward_std"])
    tokenizer = tokenizers.load_tokenizer(config.folder / "model")
    parent = runs.open_parents(config)["model.path"]
    rows = training_setup.read_data(config, "train", tokenizer)
    answers = reward.sample_answers(config, Options(), parent, tokenizer, rows)
    prompts = {tuple(data.encode(tokenizer, row["prompt"], None)[0]) for _, row in jsonl.read_jsonl(world.pairs)}
    cut = [(ids[:length], ids[length:]) for ids in answers for length in [len(next(iter(prompts)))]]
    assert len(answers) == 24 and len({tuple(ids) for ids in answers}) > 12
    assert all(tuple(ids[: len(prompt)]) in prompts for ids, (prompt, _) in zip(answers, cut, strict=True))
    rollout = Rollout.from_lists([prompt for prompt, _ in cut], [answer for _, answer in cut])
    scores = forward.rollout_scores(scorer, rollout, max_rows=8)
    assert (float(scores.mean()), float(scores.std(correction=0))) == pytest.approx((0, 1), abs=1e-4)


@pytest.mark.parametrize("normalize", ["sft", "none"])
def test_probes_are_the_scores_that_ppo_finds(world: World, tmp_path: Path, sft_stage: Path, normalize: str) -> None:
    config = config_of(world, tmp_path, sft_stage, reward={"normalize": normalize})
    manifest = train(config)
    probes = manifest["probes"]
    rollout = Rollout.from_lists([p["prompt_ids"] for p in probes], [p["response_ids"] for p in probes])
    scorer = load_reward_model(config.folder / "model").eval()
    found = forward.rollout_scores(scorer, rollout, max_rows=3)
    assert len(probes) == 8 and found.tolist() == pytest.approx([p["score"] for p in probes], abs=1e-4)
    assert all(probe["response_ids"][-1] == 1 for probe in probes)
    assert ("reward_mean" in manifest) == hasattr(scorer.config, "reward_std") == (normalize == "sft")


@pytest.mark.parametrize(("coefficient", "margin"), [(0.0, None), (0.5, None), (0.0, 2.0), (0.5, 2.0)])
def test_the_loss_is_bradley_terry_with_margin_and_centring(
    world: World, tmp_path: Path, sft_stage: Path, coefficient: float, margin: float | None
) -> None:
    extra = {} if margin is None else {"margin": margin}
    jsonl.write_jsonl(tmp_path / "pairs.jsonl", [{**row, **extra} for _, row in jsonl.read_jsonl(world.pairs)][:12])
    settings = {"center_rewards_coefficient": coefficient}
    config = config_of(world, tmp_path, sft_stage, tmp_path / "pairs.jsonl", reward=settings)
    trainer, token_rows, tokenizer = trainer_of(config)
    (batch,) = [batch for batch in trainer.get_eval_dataloader() if len(batch["input_ids"]) == 8]
    model = trainer.model.eval()
    loss, rows = 0.0, zip(batch["input_ids"], batch["attention_mask"], strict=True)
    real = [ids[mask.bool()].tolist() for ids, mask in rows]
    assert real == [row[name] for name in ("chosen_ids", "rejected_ids") for row in token_rows[8:]]  # the last four
    with torch.no_grad():
        scores = [float(model(torch.tensor([ids])).logits) for ids in real]
        trl_loss = float(trainer.compute_loss(model, dict(batch)))
    for good, bad in zip(scores[:4], scores[4:], strict=True):
        loss += math.log1p(math.exp(-(good - bad - (margin or 0.0)))) + coefficient * (good + bad) ** 2
    assert trl_loss == pytest.approx(loss / 4, rel=1e-4)
    assert all(ids[-1] == tokenizer.eos_token_id for ids in real)


def test_implicit_prompts_of_conversations(world: World, tmp_path: Path) -> None:
    def conversation(row: dict[str, str], name: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[name]}]

    pairs = [row for _, row in jsonl.read_jsonl(world.pairs)]
    chat = [{name: conversation(row, name) for name in ("chosen", "rejected")} for row in pairs]
    jsonl.write_jsonl(tmp_path / "chat.jsonl", chat)
    model = {"path": str(world.base), "chat_template": "chatml"}
    manifest = train(config_of(world, tmp_path, world.base, tmp_path / "chat.jsonl", model=model))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "reward" / "model")
    probe, stop = manifest["probes"][0], manifest["special_tokens"]["stop"]
    assert stop == tokenizer.convert_tokens_to_ids("<|im_end|>") == probe["response_ids"][-1]
    assert tokenizer.decode(probe["prompt_ids"]).startswith("<|im_start|>user\nTell me about the ")
    assert tokenizer.decode(probe["prompt_ids"]).endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert manifest["template_sha256"] == tokenizers.template_sha256(tokenizer)


def test_t01_with_a_new_pad_token_the_score_is_read_at_the_stop_token(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = shutil.copytree(world.base, tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(base)
    config = config_of(world, tmp_path, base)
    manifest = train(config)
    assert "warning[T01]" in capsys.readouterr().err
    scorer = AutoModelForSequenceClassification.from_pretrained(config.folder / "model").eval()
    assert scorer.config.pad_token_id == manifest["special_tokens"]["pad"] == len(world.tokenizer())
    probe = manifest["probes"][0]
    ids = torch.tensor([probe["prompt_ids"] + probe["response_ids"]])
    with torch.no_grad():
        score = float(scorer.score(scorer.model(ids).last_hidden_state[:, -1]))
    assert (score - manifest["reward_mean"]) / manifest["reward_std"] == pytest.approx(probe["score"], abs=1e-4)


def test_a_stopped_run_resumes_to_the_same_weights_and_metrics(
    world: World, tmp_path: Path, sft_stage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"max_steps": 20, "logging_steps": 3}
    configs = [
        config_of(world, folder, sft_stage, reward=settings) for folder in (tmp_path / "straight", tmp_path / "stopped")
    ]
    straight = train(configs[0])
    real = trl_common.TrainingCallback.on_step_end
    with monkeypatch.context() as patched:

        def on_step_end(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 13:
                os.kill(os.getpid(), signal.SIGTERM)
            real(self, args, state, control, **kwargs)

        patched.setattr(trl_common.TrainingCallback, "on_step_end", on_step_end)
        with pytest.raises(SystemExit) as stopped:
            reward.run(configs[1], Options())
    assert stopped.value.code == 143
    resumed = train(configs[1])
    assert resumed["model_sha256"] == straight["model_sha256"] and resumed["probes"] == straight["probes"]
    assert resumed["card"] == straight["card"]
    lines = [[{k: v for k, v in line.items() if k != "time_s"} for line in metrics_of(config)] for config in configs]
    assert lines[0] == lines[1]


def test_c17_no_answers_can_be_sampled_from_a_reward_model(world: World, tmp_path: Path, sft_stage: Path) -> None:
    first = config_of(world, tmp_path, sft_stage)
    train(first)
    folder = shutil.copytree(first.folder / "model", tmp_path / "scorer")
    problem = problem_of(config_of(world, tmp_path / "next", folder))
    assert "error[C17]" in problem and "reward.normalize: none" in problem
    again = train(config_of(world, tmp_path / "next", folder, reward={"normalize": "none"}, run="further"))
    folders = folder, tmp_path / "next/further/reward/model"
    before, after = (load_file(path / "model.safetensors")["score.weight"] for path in folders)
    assert again["metrics"]["n"] == 96 and 0 < float((before - after).abs().max()) < 0.1  # its head is trained


def test_d07_identical_pairs_are_rejected_or_dropped(world: World, tmp_path: Path, sft_stage: Path) -> None:
    pairs = [row for _, row in jsonl.read_jsonl(world.pairs)]
    jsonl.write_jsonl(tmp_path / "pairs.jsonl", [*pairs, {**pairs[0], "rejected": pairs[0]["chosen"]}])
    problem = problem_of(config_of(world, tmp_path, sft_stage, tmp_path / "pairs.jsonl"))
    assert "error[D07]" in problem and "pairs.jsonl:97" in problem and "data.on_identical: drop" in problem
    dropping = {"train": str(tmp_path / "pairs.jsonl"), "on_identical": "drop"}
    manifest = train(config_of(world, tmp_path, sft_stage, data=dropping, run="dropped"))
    assert manifest["metrics"] == {} and len(manifest["probes"]) == 8  # without evaluation pairs
