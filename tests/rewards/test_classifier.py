"""A transformers text-classification pipeline as a reward: label, number, text; and its errors."""

import math
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from ppo_folder import PPO, PROMPTS, fails, lines, manifest, must_succeed, ppo, rlhf, write
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from rlhf_cli.rewards.classifier import ClassifierReward
from tests.reference.comparison import compare_run, disagreements


@pytest.fixture
def classified(run_folder: Path) -> Path:
    torch.manual_seed(3)
    families.write_sentiment_classifier(run_folder / "sentiment", PROMPTS)
    return run_folder


def with_pipeline(folder: Path, **keys: Any) -> None:
    source = {"pipeline": "sentiment", "label": "POSITIVE", **keys}
    models = {"sft": "sft_model", "value": "policy_head"}
    write(folder, "ppo", {**PPO, "models": models, "rewards": {"kind": source}})


def logits(folder: Path, text: str) -> list[float]:
    model = AutoModelForSequenceClassification.from_pretrained(folder / "sentiment").eval()
    ids = AutoTokenizer.from_pretrained(folder / "sentiment")(text, truncation=True, max_length=64)["input_ids"]
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].tolist()


@pytest.mark.full
@pytest.mark.parametrize(
    ("keys", "number"),
    [
        ({}, lambda bad, good: good),
        ({"label": "NEGATIVE"}, lambda bad, good: bad),
        ({"output": "probability"}, lambda bad, good: math.exp(good) / (math.exp(bad) + math.exp(good))),
        ({"input": "both", "batch_size": 3}, lambda bad, good: good),
    ],
)
def test_the_number_of_a_label(classified: Path, keys: dict[str, Any], number: Any) -> None:
    with_pipeline(classified, **keys)
    must_succeed(ppo(classified, "-s", "ppo.total_episodes=8"))
    assert manifest(classified)["parents"].keys() == {"models.sft", "rewards.kind.pipeline"}
    for row in lines(classified / "ppo/samples.jsonl"):
        if row["response"]:
            text = row["prompt"] * (keys.get("input") == "both") + row["response"]
            assert row["scores"]["kind"] == pytest.approx(number(*logits(classified, text)), abs=1e-4)


def test_a_response_beyond_the_context_is_truncated(classified: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = []
    plain = ClassifierReward.__call__

    def spy(self: ClassifierReward, prompts: list[str], responses: list[str]) -> list[float]:
        long = "moon " * 300
        scores.append(plain(self, [""] * 3, [long, long + "sea", "moon"]))
        return plain(self, prompts, responses)

    monkeypatch.setattr(ClassifierReward, "__call__", spy)
    with_pipeline(classified)
    assert ppo(classified, "-s", "ppo.total_episodes=8").exit_code == 0
    assert scores[0][0] == pytest.approx(scores[0][1], abs=1e-5) and scores[0][0] != pytest.approx(
        scores[0][2], abs=1e-5
    )


@pytest.mark.full
def test_roberta_has_fewer_positions_than_its_config_says(classified: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(classified / "sentiment")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    names = {"num_labels": 1, "id2label": {0: "GOOD"}, "label2id": {"GOOD": 0}, "max_position_embeddings": 20}
    config = RobertaConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **sizes, **names)
    RobertaForSequenceClassification(config).save_pretrained(classified / "roberta")
    tokenizer.eos_token, tokenizer.pad_token = tokenizer.sep_token or tokenizer.pad_token, None
    tokenizer.save_pretrained(classified / "roberta")
    with_pipeline(classified, pipeline="roberta", label="GOOD", input="both")
    must_succeed(ppo(classified, "-s", "ppo.total_episodes=8", "-s", "ppo.response_length=30"))


@pytest.mark.parametrize(
    ("keys", "code", "says"),
    [
        ({"label": "POSITIV"}, "C07", "did you mean POSITIVE?"),
        ({"label": None}, "C07", "label is missing; "),
        ({"pipeline": "./sentimnt"}, "M01", "no such folder"),
        ({"pipeline": "sft_model"}, "M02", "no trained reward head"),
    ],
)
def test_a_wrong_pipeline_is_rejected_before_the_run(
    classified: Path, keys: dict[str, Any], code: str, says: str
) -> None:
    with_pipeline(classified, **keys)
    for result in (rlhf("check", classified / "ppo.yaml"), ppo(classified)):
        fails(result, code, says)


def test_check_detects_corrupt_weights_by_their_header(classified: Path) -> None:
    with_pipeline(classified)
    (classified / "sentiment/model.safetensors").write_bytes(b"damaged")
    plain, deep = (rlhf("check", *how, classified / "ppo.yaml") for how in ((), ("--deep",)))
    for result in (plain, deep, ppo(classified)):
        fails(result, "M01", "ppo.yaml")


@pytest.mark.full
def test_plan_and_verify_work_with_a_pipeline_and_another_makes_the_run_stale(classified: Path) -> None:
    with_pipeline(classified)
    assert rlhf("plan", classified / "ppo.yaml").exit_code == 0
    assert ppo(classified).exit_code == 0
    assert rlhf("verify", classified, "--step", "3").exit_code == 0
    assert disagreements(compare_run(classified, 3)) == {}
    families.write_sentiment_classifier(classified / "sentiment", PROMPTS)
    fails(ppo(classified), "C15", "rewards.kind.pipeline")


def test_m01_a_classifier_of_the_hub_that_is_not_downloaded(classified: Path) -> None:
    with_pipeline(classified, pipeline="nobody/nowhere")
    assert "fetch it first: hf download nobody/nowhere" in rlhf("check", classified / "ppo.yaml").stdout
    fails(ppo(classified), "M01", "not a cached hub id")
