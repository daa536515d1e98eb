"""`rlhf reward`: real training by TRL's RewardTrainer on a tiny model.

Modules: `stages/common/held_out.py`, `stages/reward/normalize.py`, `stages/reward/scores.py`,
`stages/reward/training.py`.
"""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import trl_stage
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl_stage import manifest_of, metrics_of, signal_at, train, trainer_of

from rlhf_cli import data, jsonl, runs
from rlhf_cli.config.base import Options
from rlhf_cli.config.reward import RewardConfig
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import forward, tokenizers
from rlhf_cli.models.batch import Rollout
from rlhf_cli.models.load import load_reward_model
from rlhf_cli.models.parallel import SINGLE_PROCESS
from rlhf_cli.ppo.graph_engine import GraphEngine
from rlhf_cli.stages.common import engines, trainable_model, training_rows
from rlhf_cli.stages.reward import normalize
from rlhf_cli.statistics import share_interval
from tests.conftest import World

pytestmark = pytest.mark.full

METRICS = {"loss", "accuracy", "margin", "min_reward", "mean_reward", "max_reward", "num_tokens"}
TRAIN_KEYS = METRICS | {"grad_norm", "lr", "epoch"}
EVAL_KEYS = {f"eval_{name}" for name in METRICS} | {"epoch"}


def config_of(world: World, folder: Path, parent: Path, pairs: Path | None = None, **sections: Any) -> RewardConfig:
    sections["reward"] = {"max_steps": 6, "normalize_samples": 24, **sections.get("reward", {})}
    return trl_stage.config_of(world, "reward", folder, parent, pairs or world.pairs, **sections)


@pytest.fixture(scope="module")
def finished(world: World, sft_stage: Path, tmp_path_factory: pytest.TempPathFactory) -> RewardConfig:
    """The config of a quick finished run. Read-only."""
    config = config_of(world, tmp_path_factory.mktemp("finished"), sft_stage)
    train(config)
    return config


def problem_of(config: RewardConfig) -> str:
    with pytest.raises(RLHFError) as error:
        trl_stage.run(config)
    assert error.value.exit_code == 2
    return str(error.value)


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
    assert all(line.keys() == TRAIN_KEYS | {"step"} for line in training)
    assert [line.keys() - {"step"} for line in evaluation] == [EVAL_KEYS, EVAL_KEYS]
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
    prompts = [row["prompt"] for _, row in jsonl.read_jsonl(world.pairs)]
    interval = share_interval([float(margin > 0) for margin in margins], prompts)
    assert headline["accuracy_ci95"] == pytest.approx(interval) and len(set(prompts)) < 96, "pairs of one prompt"
    assert headline["margin"] == pytest.approx(sum(margins) / 96, rel=1e-4)
    assert manifest["parents"]["model.path"]["stage"] == "sft" and manifest["special_tokens"]["stop"] == 1
    card = (config.folder / "model" / "README.md").read_text()
    assert "the sft stage" in card and str(tmp_path) not in card and not list(config.folder.rglob("training_args.bin"))


def test_normalised_scores_of_the_sft_models_answers_have_mean_0_and_deviation_1(
    world: World, finished: RewardConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, manifest = finished, manifest_of(finished)
    scorer = load_reward_model(config.folder / "model").eval()
    assert (scorer.config.reward_mean, scorer.config.reward_std) == (manifest["reward_mean"], manifest["reward_std"])
    tokenizer = tokenizers.load_tokenizer(config.folder / "model")
    parent = runs.open_parents(config)["model.path"]
    rows = training_rows.read_split(config, "train", tokenizer)
    sft_model = trainable_model.load_sft_model(config, Options(), parent, tokenizer)
    sampled = normalize.sample_answers(config, sft_model, parent, tokenizer, rows, SINGLE_PROCESS)
    answers = [answer.ids for answer in sampled]
    prompts = {tuple(data.encode(tokenizer, row["prompt"], None)[0]) for _, row in jsonl.read_jsonl(world.pairs)}
    cut = [(ids[:length], ids[length:]) for ids in answers for length in [len(next(iter(prompts)))]]
    assert len(answers) == 24 and len({tuple(ids) for ids in answers}) > 12
    assert all(tuple(ids[: len(prompt)]) in prompts for ids, (prompt, _) in zip(answers, cut, strict=True))
    rollout = Rollout.from_lists([prompt for prompt, _ in cut], [answer for _, answer in cut])
    scores = forward.rollout_scores(scorer, rollout, max_rows=8)
    assert (float(scores.mean()), float(scores.std(correction=0))) == pytest.approx((0, 1), abs=1e-4)
    monkeypatch.setattr(engines, "engine_class", lambda *_: GraphEngine)  # as on a GPU
    assert normalize.sample_answers(config, sft_model, parent, tokenizer, rows, SINGLE_PROCESS) == sampled


@pytest.mark.parametrize("normalize", ["sft", "none"])
def test_probes_are_the_scores_that_ppo_finds(
    world: World, tmp_path: Path, sft_stage: Path, finished: RewardConfig, normalize: str
) -> None:
    config = finished
    if normalize == "none":
        config = config_of(world, tmp_path, sft_stage, reward={"normalize": "none"})
        train(config)
    manifest = manifest_of(config)
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


@pytest.mark.parametrize("is_list", [False, True])
def test_a_stopped_run_resumes_to_the_same_weights_and_metrics(
    is_list: bool, world: World, tmp_path: Path, sft_stage: Path
) -> None:
    sections: dict[str, Any] = {"reward": {"max_steps": 20, "logging_steps": 3}}
    if is_list:
        (tmp_path / "copy.jsonl").write_bytes(world.pairs.read_bytes())
        sources = [{"path": str(world.pairs), "weight": 0.4}, {"path": str(tmp_path / "copy.jsonl"), "weight": 0.7}]
        sections["data"] = {"train": sources, "eval": str(world.pairs)}
    configs = [config_of(world, tmp_path / name, sft_stage, **sections) for name in ("straight", "stopped")]
    straight = train(configs[0])
    with signal_at(13), pytest.raises(SystemExit) as stopped:
        trl_stage.run(configs[1])
    assert stopped.value.code == 143
    resumed = train(configs[1])
    assert resumed["model_sha256"] == straight["model_sha256"] and resumed["probes"] == straight["probes"]
    assert resumed["card"] == straight["card"]
    assert metrics_of(configs[0]) == metrics_of(configs[1])


def test_c17_no_answers_can_be_sampled_from_a_reward_model(
    world: World, tmp_path: Path, finished: RewardConfig
) -> None:
    folder = shutil.copytree(finished.folder / "model", tmp_path / "scorer")
    problem = problem_of(config_of(world, tmp_path / "next", folder))
    assert "error[C17]" in problem and "reward.normalize: none" in problem
    rows = {"train": str(world.pairs)}
    again = train(config_of(world, tmp_path / "next", folder, reward={"normalize": "none"}, data=rows, run="further"))
    folders = folder, tmp_path / "next/further/reward/model"
    before, after = (load_file(path / "model.safetensors")["score.weight"] for path in folders)
    assert 0 < float((before - after).abs().max()) < 0.1  # its head is trained
    assert again["metrics"] == {} and "card" not in again and len(again["probes"]) == 8  # without evaluation pairs
