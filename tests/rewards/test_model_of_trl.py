"""Reward models that a plain TRL script trained on a ChatML and on a Gemma template: as accurate in PPO as there."""

import random
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from datasets import Dataset
from ppo_folder import ONE, must_succeed, rlhf, write
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer

from rlhf_cli import data, jsonl
from rlhf_cli.models.batch import Rollout
from rlhf_cli.rewards.model import ModelReward

pytestmark = pytest.mark.full

GOOD = ["bright", "warm", "kind", "clear", "gentle", "fresh"]
BAD = ["dull", "cold", "rude", "vague", "harsh", "stale"]
TRAINING = {
    "max_steps": 90, "per_device_train_batch_size": 16, "learning_rate": 3e-3, "seed": 0,
    "use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no", "disable_tqdm": True,
}  # fmt: skip
PPO = {
    "models": {"sft": "base", "reward": "trl", "value": "policy_head"},
    "data": {"prompts": "pairs.jsonl"},
    "output": {"snapshots": 0},
    "ppo": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "response_length": 4},
}


def pairs_of(generator: random.Random, count: int) -> list[dict[str, Any]]:
    """Conversations whose better answer has more of the good words."""

    def answer(most: list[str], others: list[str]) -> list[dict[str, str]]:
        words = generator.choices(most, k=generator.randint(3, 4)) + generator.choices(others, k=1)
        generator.shuffle(words)
        return [{"role": "assistant", "content": " ".join(words)}]

    questions = [[{"role": "user", "content": f"How is number {number}?"}] for number in range(count)]
    return [{"prompt": each, "chosen": answer(GOOD, BAD), "rejected": answer(BAD, GOOD)} for each in questions]


def train_by_trl(base: Path, folder: Path, pairs: list[dict[str, Any]]) -> None:
    """Train and save a reward model as TRL's documentation does."""
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    trainer = RewardTrainer(
        model=model,
        args=RewardConfig(output_dir=str(folder), **TRAINING),
        train_dataset=Dataset.from_list(pairs),
        processing_class=AutoTokenizer.from_pretrained(base),
    )
    trainer.train()
    trainer.save_model(str(folder))


def by_transformers(folder: Path, conversations: list[list[dict[str, str]]]) -> torch.Tensor:
    """The scores of whole conversations as their template renders them."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [tokenizer.apply_chat_template(each, return_tensors="pt") for each in conversations]
    with torch.no_grad():
        return torch.stack([model(**row).logits[0, 0] for row in rows])


def by_ppo(folder: Path, source: ModelReward, pairs: list[dict[str, Any]], answer: str) -> torch.Tensor:
    """The scores of the pairs' answers by the source of rewards of a run of PPO."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoded = [data.encode(tokenizer, pair["prompt"], pair[answer][0]["content"]) for pair in pairs]
    prompts, responses = ([list(ids) for ids in column] for column in zip(*encoded, strict=True))
    return source(Rollout.from_lists(prompts, responses))


@pytest.mark.parametrize("family", ["qwen2", pytest.param("gemma", marks=pytest.mark.slow)])
def test_accuracy_in_ppo_is_that_of_transformers(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = random.Random(0)
    pairs, held_out = pairs_of(generator, 300), pairs_of(generator, 100)
    contents = [pair["prompt"][0]["content"] + pair["chosen"][0]["content"] for pair in pairs]
    texts = [*contents, *[families.CHATML] * 20]  # few tokens for what the template writes
    families.write_causal(tmp_path / "base", family, texts)
    train_by_trl(tmp_path / "base", tmp_path / "trl", pairs)
    sources: list[ModelReward] = []
    plain = ModelReward.__call__

    def recorded(source: ModelReward, rollout: Rollout) -> torch.Tensor:
        sources.append(source)
        return plain(source, rollout)

    with monkeypatch.context() as patch:
        patch.setattr(ModelReward, "__call__", recorded)
        jsonl.write_jsonl(tmp_path / "pairs.jsonl", held_out)
        write(tmp_path, "ppo", PPO)
        must_succeed(rlhf("ppo", "-c", tmp_path / "ppo.yaml", "-s", ONE))
    chosen, rejected = (by_ppo(tmp_path / "trl", sources[0], held_out, answer) for answer in ("chosen", "rejected"))
    for answer, scores in (("chosen", chosen), ("rejected", rejected)):
        expected = by_transformers(tmp_path / "trl", [pair["prompt"] + pair[answer] for pair in held_out])
        torch.testing.assert_close(scores, expected, atol=1e-4, rtol=0)
    assert (chosen > rejected).float().mean() >= 0.85, "0.33 one token earlier, with ChatML"
