"""The report card through the real CLI: a planted length bias is flagged, and a reward model without one is not."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ppo_folder import must_succeed, rlhf
from scipy.stats import spearmanr
from transformers import AutoModelForSequenceClassification

from rlhf_cli import data, jsonl
from rlhf_cli.evaluation.reward_model import make_card
from rlhf_cli.evaluation.reward_probes import PROBE_LABELS
from rlhf_cli.models import tokenizers
from rlhf_cli.runs.report import HEADLINE, Adversarial
from rlhf_cli.stages.reward import card as card_module
from rlhf_cli.statistics import wilson
from tests.conftest import THINGS, WORDS, World

pytestmark = pytest.mark.full


def answer(draw: random.Random, thing: str, moods: list[str], length: int) -> str:
    return "".join(f" The {thing} is {draw.choice(WORDS[draw.choice(moods)])}." for _ in range(length))


def longer_is_better(draw: random.Random) -> dict[str, str]:
    """Chosen is the longer answer, whatever it says."""
    thing, (short, long) = draw.choice(THINGS), sorted(draw.sample((1, 2, 3, 4), 2))
    chosen, rejected = (answer(draw, thing, ["good", "bad"], length) for length in (long, short))
    prompt = "Please. " * draw.randint(0, 5) + f"Tell me about the {thing}."  # whose length must not count
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def kinder_is_better(draw: random.Random) -> dict[str, str]:
    """Chosen is the kind answer, however long; rejected an unkind one, one beside the topic, or one that repeats."""
    thing, other = draw.sample(THINGS[:3], 2)
    chosen, length = answer(draw, thing, ["good"], draw.randint(1, 4)), draw.randint(1, 4)
    rejected = draw.choice(
        [
            answer(draw, thing, ["bad"], length),
            answer(draw, other, ["good"], length),
            f" {draw.choice([thing, *WORDS['good']])}" * 3 * length,
            chosen * 2,
        ]
    )
    return {"prompt": f"Tell me about the {thing}.", "chosen": chosen, "rejected": rejected}


def reward(
    world: World, folder: Path, pair: Callable[[random.Random], dict[str, str]], *, n: int, steps: int, **settings: Any
) -> tuple[Any, dict[str, Any]]:
    """The command's result, and the manifest, of a model trained on n such pairs and looked at on 128 others."""
    for name, seed, count in (("train", 0, n), ("eval", 1, 128)):
        draw = random.Random(seed)
        jsonl.write_jsonl(folder / f"{name}.jsonl", [pair(draw) for _ in range(count)])
    sections = {
        "model": {"path": str(settings.pop("sft", world.base))},
        "data": {"train": "train.jsonl", "eval": "eval.jsonl"},
        "reward": {"max_steps": steps, "learning_rate": 3e-3, "normalize": "none", "max_length": 100, **settings},
    }
    result = must_succeed(rlhf("reward", "-c", world.config(folder, "reward", **sections)))
    return result, json.loads((folder / "reward/manifest.json").read_text())


@pytest.fixture
def wordy_sft(world: World, tmp_path: Path) -> Path:
    """An SFT model whose answers are as long as those of the pairs."""
    draw = random.Random(2)
    pairs = [longer_is_better(draw) for _ in range(96)]
    rows = [{"prompt": pair["prompt"], "completion": pair[side]} for pair in pairs for side in ("chosen", "rejected")]
    jsonl.write_jsonl(tmp_path / "sft.jsonl", rows)
    sections = {
        "model": {"path": str(world.base)},
        "data": {"train": "sft.jsonl"},
        "sft": {"max_steps": 100, "learning_rate": 5e-3, "max_length": 100},
    }
    must_succeed(rlhf("sft", "-c", world.config(tmp_path, "sft", **sections)))
    return tmp_path / "sft"


def test_a_planted_length_bias_is_flagged(world: World, tmp_path: Path) -> None:
    result, manifest = reward(world, tmp_path, longer_is_better, n=96, steps=40)
    card = manifest["card"]
    assert (
        f"warning[R10]: {tmp_path / 'reward'}: the score depends on the length of the answer: rank correlation 0.9"
        in result.stderr
    )
    assert "the longer answer is the chosen one in 100% of the evaluation pairs\nhint: balance" in result.stderr
    assert f"warning[R11]: {tmp_path / 'reward'}: the good answer to another prompt scores above" in result.stderr
    assert {"R10", "R11"} <= {flag["code"] for flag in card["flags"]}
    assert card["longer_answer"]["preferred"] > 0.95 and card["longer_answer"]["chosen"] == 1
    # The headline's numbers are the card's, and those of a plain reader of the folder.
    assert manifest["metrics"].keys() == {*HEADLINE}
    assert all(card[name] == value for name, value in manifest["metrics"].items())
    scorer = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward/model").eval()
    tokenizer = tokenizers.load_tokenizer(tmp_path / "reward/model")
    scores, lengths = [], []
    for _, row in jsonl.read_jsonl(tmp_path / "eval.jsonl"):
        for side in ("chosen", "rejected"):
            prompt, ids = data.encode(tokenizer, row["prompt"], row[side])
            with torch.no_grad():
                scores.append(float(scorer(torch.tensor([prompt + ids])).logits))
            lengths.append(len(ids))
    assert card["length_correlation"] == pytest.approx(spearmanr(scores, lengths).statistic, abs=1e-3)


def test_a_healthy_reward_model_is_not_flagged(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = []
    plain = card_module.raw_scores

    def spy(scorer: Any, ids: list[list[int]], *how: Any, **options: Any) -> list[float]:
        longest.append(max(map(len, ids)))
        return plain(scorer, ids, *how, **options)

    monkeypatch.setattr(card_module, "raw_scores", spy)
    result, manifest = reward(world, tmp_path, kinder_is_better, n=512, steps=200)
    card = manifest["card"]
    assert card["flags"] == [] and not re.search(r"warning\[R", result.stderr), result.stderr
    assert card["accuracy"] > 0.95 and card["n"] == 128
    assert card["adversarial"]["n"] == 3, "one pair of each prompt"
    assert card["adversarial"]["probes"].keys() == PROBE_LABELS.keys()
    assert result.stdout.startswith("reward model: accuracy ") and "beaten by an empty answer" in result.stdout
    assert max(longest) == 128, "probes are cut to the model's context"


def test_pairs_that_all_have_one_prompt_count_one_by_one() -> None:
    """After a fixed prompt the answers are what was drawn; a pair that was labelled twice is still one."""
    answers = [([1, 5, number], [1, 6, number]) for number in range(7, 47)]

    def interval(prompts: list[list[int]], answers: list[tuple[list[int], list[int]]]) -> list[float]:
        rows = [
            {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}
            for prompt, (chosen, rejected) in zip(prompts, answers, strict=True)
        ]
        margins = [-1.0 if number % 4 == 0 else 1.0 for number in range(len(rows))]
        pairs = card_module.scored_pairs(rows, margins, [0.0] * len(rows))
        return make_card(pairs, Adversarial(n=1, probes={})).accuracy_ci95

    one = [[1]] * 40
    assert interval(one, answers) == pytest.approx(wilson(30, 40)) == interval([[1, k] for k in range(40)], answers)
    repeated = [*answers[:20], *((rejected, chosen) for chosen, rejected in answers[:20])]
    assert interval(one, repeated) == interval([[1, k % 20] for k in range(40)], answers)
    assert interval(one, repeated)[0] < wilson(30, 40)[0] - 0.02


def test_length_debiasing_removes_a_planted_bias(world: World, tmp_path: Path, wordy_sft: Path) -> None:
    """The same training with the key has what the card without it says."""
    samples = {"sft": wordy_sft, "normalize": "sft", "normalize_samples": 256}
    result, plain = reward(world, tmp_path, longer_is_better, n=96, steps=40, **samples)
    promise = plain["card"]["length_debiasing"]
    assert not promise["applied"] and promise["raw"]["length_correlation"] == plain["card"]["length_correlation"] > 0.8
    assert "hint: set reward.length_debias: true, which brings it to" in result.stderr

    again = ("--fresh", "-s", "reward.length_debias=true")
    result = must_succeed(rlhf("reward", "-c", tmp_path / "reward.yaml", *again))
    manifest = json.loads((tmp_path / "reward/manifest.json").read_text())
    card = manifest["card"]
    found = card["length_debiasing"]
    assert found == {**promise, "applied": True} and manifest["reward_length_slope"] == promise["slope"] > 0
    assert manifest["reward_mean"] == pytest.approx(plain["reward_mean"])
    assert manifest["reward_std"] < plain["reward_std"]
    assert card["length_correlation"] == found["debiased"]["length_correlation"] < 0.5
    assert card["accuracy"] == manifest["metrics"]["accuracy"] == found["debiased"]["accuracy"]
    assert re.search(r"length debiasing +yes +correlation ", result.stdout)
    evaluated = [row for _, row in jsonl.read_jsonl(tmp_path / "reward/metrics.jsonl") if "eval_accuracy" in row]
    assert evaluated[-1]["eval_accuracy"] == found["raw"]["accuracy"], "the curve is of raw scores to its end"

    scorer = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward/model").eval()
    config = scorer.config
    for probe in manifest["probes"]:
        ids = probe["prompt_ids"] + probe["response_ids"]
        with torch.no_grad():
            raw = float(scorer(torch.tensor([ids])).logits)
        raw -= config.reward_length_slope * (len(probe["response_ids"]) - config.reward_length_mean)
        assert probe["score"] == pytest.approx((raw - config.reward_mean) / config.reward_std, abs=1e-4)


def test_r22_answers_of_one_length_leave_the_scores_as_they_are(world: World, tmp_path: Path) -> None:
    """The base model is untrained and samples no end, so that all answers have the greatest length."""
    settings = {"normalize": "sft", "normalize_samples": 32, "length_debias": True}
    result, manifest = reward(world, tmp_path, kinder_is_better, n=16, steps=1, **settings)
    assert re.search(r"warning\[R22\]: reward.length_debias changes no score: \d of 32 answers", result.stderr)
    assert (
        "reward_mean" in manifest
        and "reward_length_slope" not in manifest
        and "length_debiasing" not in manifest["card"]
    )
