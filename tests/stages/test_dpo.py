"""`rlhf dpo`: real training by TRL's DPOTrainer on a tiny model."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import adapter_folder
import pytest
import torch
import trl_stage
from transformers import AutoTokenizer
from trl_stage import metrics_of, signal_at, train, trainer_of

from rlhf_cli import data, jsonl
from rlhf_cli.config.dpo import DPOConfig
from rlhf_cli.errors import RLHFError
from rlhf_cli.models.load import load_causal_lm
from rlhf_cli.statistics import share_interval
from tests.conftest import World

pytestmark = pytest.mark.full

Pair = tuple[list[int], list[int], list[int]]  # tokens of prompt, chosen and rejected answer


def config_of(world: World, folder: Path, parent: Path, pairs: Path | None = None, **sections: Any) -> DPOConfig:
    sections["dpo"] = {"max_steps": 6, **sections.get("dpo", {})}
    return trl_stage.config_of(world, "dpo", folder, parent, pairs or world.pairs, **sections)


def expected_tokens(world: World, tokenizer: Any) -> list[Pair]:
    return [
        (*data.encode(tokenizer, row["prompt"], row["chosen"]), data.encode(tokenizer, None, row["rejected"])[1])
        for _, row in jsonl.read_jsonl(world.pairs)
    ]


def pairs_of(batch: dict[str, Any]) -> list[Pair]:
    """The pairs of a batch of TRL's, whose second half are the rejected answers."""
    own, real = (batch[name].bool() for name in ("completion_mask", "attention_mask"))
    prompts, answers = (
        [ids[mask].tolist() for ids, mask in zip(batch["input_ids"], masks, strict=True)]
        for masks in (real & ~own, own)
    )
    half = len(prompts) // 2
    assert prompts[:half] == prompts[half:]
    return list(zip(prompts[:half], answers[:half], answers[half:], strict=True))


def ratios(policy: Path, reference: Path, pairs: list[Pair]) -> list[tuple[float, float]]:
    """The log-ratios of both answers of each pair, in float64, a token after the other."""
    models = [load_causal_lm(path).eval() for path in (policy, reference)]

    def logprob(model: Any, prompt: list[int], answer: list[int]) -> float:
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0].double()
        return sum(float(logits[len(prompt) + i - 1].log_softmax(-1)[token]) for i, token in enumerate(answer))

    def ratio(prompt: list[int], answer: list[int]) -> float:
        return logprob(models[0], prompt, answer) - logprob(models[1], prompt, answer)

    return [(ratio(prompt, chosen), ratio(prompt, rejected)) for prompt, chosen, rejected in pairs]


def test_trl_gets_the_tokens_of_the_reward_stage_unchanged(world: World, tmp_path: Path, sft_stage: Path) -> None:
    trainer, token_rows, tokenizer = trainer_of(config_of(world, tmp_path, sft_stage))
    reward = trl_stage.config_of(world, "reward", tmp_path / "reward", sft_stage, world.pairs)
    assert trainer_of(reward)[1] == token_rows
    seen = [pair for batch in trainer.get_train_dataloader() for pair in pairs_of(batch)]
    assert sorted(seen) == sorted(expected_tokens(world, tokenizer))
    assert all(answer[-1] == tokenizer.eos_token_id for _, *answers in seen for answer in answers)


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


# By loss_type, with beta 0.2: loss at the start, where all log-ratios are 0, and of a pair with these log-ratios.
LOSSES: dict[str, tuple[float, Callable[..., float]]] = {
    "sigmoid": (math.log(2), lambda good, bad, *_: softplus(-0.2 * (good - bad))),
    "ipo": (6.25, lambda good, bad, n, m: (good / n - bad / m - 1 / 0.4) ** 2),
    "robust": (
        math.log(2),
        lambda good, bad, *_: (0.9 * softplus(-0.2 * (good - bad)) - 0.1 * softplus(0.2 * (good - bad))) / 0.8,
    ),
}


@pytest.mark.parametrize("loss_type", LOSSES)
def test_the_loss_of_each_step_is_that_of_the_paper(
    world: World, tmp_path: Path, sft_stage: Path, loss_type: str
) -> None:
    at_start, formula = LOSSES[loss_type]
    extra = {"label_smoothing": 0.1} if loss_type == "robust" else {}
    settings = {"loss_type": loss_type, "beta": 0.2, "logging_steps": 1, "max_steps": 2, "warmup_ratio": 0.0, **extra}
    config = config_of(world, tmp_path, sft_stage, dpo=settings, output={"save_steps": 1})
    trainer, _, tokenizer = trainer_of(config)
    _, second = (pairs_of(batch) for _, batch in zip(range(2), trainer.get_train_dataloader(), strict=False))
    metrics = train(config)["metrics"]
    *lines, last = [line for line in metrics_of(config) if line.keys() & {"loss", "eval_loss"}]
    assert lines[0]["loss"] == pytest.approx(at_start, abs=1e-7) and lines[0]["rewards/margins"] == 0
    assert lines[1]["loss"] < lines[0]["loss"] and last["step"] == 2

    def check(policy: Path, pairs: list[Pair], loss: float, margin: float) -> list[float]:
        found = ratios(policy, sft_stage / "model", pairs)
        sizes = [(len(chosen), len(rejected)) for _, chosen, rejected in pairs]
        losses = [formula(*each, *size) for each, size in zip(found, sizes, strict=True)]
        assert loss == pytest.approx(sum(losses) / len(pairs), rel=1e-4)
        assert margin == pytest.approx(sum(0.2 * (good - bad) for good, bad in found) / len(pairs), rel=1e-3)
        return [float(good > bad) for good, bad in found]

    check(config.folder / "state/checkpoint-1", second, lines[1]["loss"], lines[1]["rewards/margins"])
    every = expected_tokens(world, tokenizer)
    right = check(config.folder / "model", every, metrics["loss"], metrics["margin"])
    assert (metrics["n"], metrics["accuracy"]) == (96, sum(right) / 96)
    assert metrics["accuracy_ci95"] == pytest.approx(share_interval(right, [tuple(prompt) for prompt, *_ in every]))
    assert (last["eval_loss"], last["eval_rewards/accuracies"]) == (metrics["loss"], metrics["accuracy"])


@pytest.mark.parametrize(
    "model",
    [pytest.param({}, marks=pytest.mark.slow), {"adapters": {"kind": "lora", "r": 4}}],
    ids=["full", "lora"],
)
def test_it_learns_the_preference_and_resumes_to_the_same_bytes(
    world: World, tmp_path: Path, sft_stage: Path, model: dict[str, Any]
) -> None:
    """With adapters the base stays as it was, and is what the policy is compared with."""
    rows = tmp_path / "held-out.jsonl"
    jsonl.write_jsonl(rows, [row for _, row in jsonl.read_jsonl(world.pairs)][64:])
    sections = {
        "dpo": {"max_steps": 24, "logging_steps": 3, "eval_steps": 8, "learning_rate": 1e-2 if model else 3e-3},
        "model": {"path": str(sft_stage), **model}, "data": {"train": str(world.pairs), "eval": str(rows)},
    }  # fmt: skip
    straight, stopped = (config_of(world, tmp_path / name, sft_stage, **sections) for name in ("straight", "stopped"))
    manifest = train(straight)
    with signal_at(13), pytest.raises(SystemExit) as error:
        trl_stage.run(stopped)
    assert error.value.code == 143
    assert train(stopped)["model_sha256"] == manifest["model_sha256"]
    assert metrics_of(stopped) == metrics_of(straight)
    evaluated = [line["eval_rewards/accuracies"] for line in metrics_of(straight) if "eval_loss" in line]
    assert len(evaluated) == 3 and manifest["metrics"]["accuracy"] == evaluated[-1] > 0.95
    assert manifest["metrics"]["n"] == 32 and manifest["metrics"]["loss"] < 0.5 < manifest["metrics"]["margin"]
    files = {path.relative_to(straight.folder / "model").as_posix() for path in (straight.folder / "model").rglob("*")}
    assert ("adapter_model.safetensors" in files) == bool(model) and not any("ref" in name for name in files)
    card = (straight.folder / "model" / "README.md").read_text()
    assert "tags: [rlhf-cli, dpo]" in card and "the sft stage" in card and "beta 0.1" in card
    tokenizer = AutoTokenizer.from_pretrained(straight.folder / "model")
    found = ratios(straight.folder / "model", sft_stage / "model", expected_tokens(world, tokenizer)[64:])
    assert manifest["metrics"]["margin"] == pytest.approx(sum(0.1 * (good - bad) for good, bad in found) / 32, rel=1e-3)


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"adapters": {"kind": "qlora"}}},
        {"model": {"adapters": {"kind": "lora", "use_dora": True}}},
        {"dpo": {"bf16": True}},
        {"dpo": {"gradient_checkpointing": True, "gradient_accumulation_steps": 2}},
        {"trainer": {"precompute_ref_log_probs": True}},
        {"trainer": {"use_weighting": True}},
    ],
    ids=str,
)
def test_policy_and_reference_are_equal_at_the_first_step(
    world: World, tmp_path: Path, sft_stage: Path, sections: dict[str, Any]
) -> None:
    """In each way to keep the reference; its log-probs that are computed before have other padding."""
    adapter_folder.widen(tmp_path, world)
    settings = {"logging_steps": 1, "max_steps": 2, "warmup_ratio": 0.0, **sections.get("dpo", {})}
    model = {"path": str(tmp_path / "model"), **sections.get("model", {})}
    config = config_of(world, tmp_path, sft_stage, **{**sections, "dpo": settings, "model": model})
    trainer, *_ = trainer_of(config)
    trained = {name for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    adapters = config.model.adapters is not None
    assert trained and all(("lora_" in name and ".default." in name) == adapters for name in trained)
    assert not any(".ref." in name for name, _ in trainer.model.named_parameters())
    assert (trainer.ref_model is None) == (not config.keeps_reference)
    manifest = train(config)
    first, second = [line for line in metrics_of(config) if "loss" in line]
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-6) != second["rewards/margins"]
    if "use_weighting" not in config.trainer:
        assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert manifest["step"] == 2 and math.isfinite(manifest["metrics"]["loss"])


def test_r01_a_policy_that_diverged_never_counts_as_finished(world: World, tmp_path: Path, sft_stage: Path) -> None:
    config = config_of(world, tmp_path, sft_stage, dpo={"learning_rate": 1e30, "logging_steps": 100})
    with pytest.raises(RLHFError, match="R01"):
        trl_stage.run(config)
    assert not (config.folder / "manifest.json").exists()
