"""A transformers text-classification pipeline as a reward: which label, which number, which text; and its faults."""

import json
import math
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from ppo_folder import PPO, PROMPTS, lines, ppo, rlhf, write
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlhf_cli.rewards.classifier import ClassifierReward


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


@pytest.mark.parametrize(
    ("keys", "number"),
    [
        ({}, lambda bad, good: good),
        ({"label": "NEGATIVE"}, lambda bad, good: bad),
        ({"number": "probability"}, lambda bad, good: math.exp(good) / (math.exp(bad) + math.exp(good))),
        ({"reads": "both", "batch_size": 3}, lambda bad, good: good),
    ],
)
def test_the_number_of_a_label(classified: Path, keys: dict[str, Any], number: Any) -> None:
    with_pipeline(classified, **keys)
    result = ppo(classified, "-s", "ppo.total_episodes=8")
    assert result.exit_code == 0, result.output
    manifest = json.loads((classified / "ppo/manifest.json").read_text())
    assert manifest["parents"].keys() == {"models.sft", "rewards.kind.pipeline"}
    for row in lines(classified / "ppo/samples.jsonl"):
        if row["response"]:  # nothing at all cannot be asked by hand
            text = row["prompt"] * (keys.get("reads") == "both") + row["response"]
            assert row["scores"]["kind"] == pytest.approx(number(*logits(classified, text)), abs=1e-4)


def test_an_empty_and_an_over_long_response_have_a_number_too(
    classified: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    plain = ClassifierReward.__call__

    def spy(self: ClassifierReward, prompts: list[str], responses: list[str]) -> list[float]:
        long = "moon " * 300
        asked.append(plain(self, [""] * 3, [long, long + "sea", "moon"]))
        return plain(self, prompts, responses)

    monkeypatch.setattr(ClassifierReward, "__call__", spy)
    with_pipeline(classified)
    assert ppo(classified, "-s", "ppo.total_episodes=8").exit_code == 0
    assert asked[0][0] == pytest.approx(asked[0][1], abs=1e-5) and asked[0][0] != pytest.approx(asked[0][2], abs=1e-5)


@pytest.mark.parametrize(
    ("keys", "code", "says"),
    [
        ({"label": "POSITIV"}, "C07", "did you mean POSITIVE?"),
        ({"label": None}, "C07", "label is missing; "),
        ({"pipeline": "./sentimnt"}, "M01", "no such folder"),
        ({"pipeline": "sft_model"}, "M02", "no trained reward head"),
    ],
)
def test_what_is_wrong_with_a_pipeline_is_found_before_the_run(
    classified: Path, keys: dict[str, Any], code: str, says: str
) -> None:
    with_pipeline(classified, **keys)
    for refused in (rlhf("check", classified / "ppo.yaml"), ppo(classified)):
        assert refused.exit_code == 2 and f"error[{code}]" in refused.stderr and says in refused.stderr


def test_check_sees_damaged_weights_by_their_header(classified: Path) -> None:
    with_pipeline(classified)
    (classified / "sentiment/model.safetensors").write_bytes(b"damaged")
    plain, deep = (rlhf("check", *how, classified / "ppo.yaml") for how in ((), ("--deep",)))
    for refused in (plain, deep, ppo(classified)):
        assert refused.exit_code == 2 and "error[M01]" in refused.stderr and "ppo.yaml" in refused.stderr


def test_a_plan_and_a_replay_of_it(classified: Path) -> None:
    with_pipeline(classified)
    assert rlhf("plan", classified / "ppo.yaml").exit_code == 0
    assert ppo(classified).exit_code == 0
    assert rlhf("verify", classified, "--step", "3").exit_code == 0


def test_another_classifier_makes_the_run_another_one(classified: Path) -> None:
    with_pipeline(classified)
    assert ppo(classified, "-s", "ppo.total_episodes=8").exit_code == 0
    families.write_sentiment_classifier(classified / "sentiment", PROMPTS)
    stale = ppo(classified, "-s", "ppo.total_episodes=8")
    assert stale.exit_code == 2 and "error[C15]" in stale.stderr and "rewards.kind.pipeline" in stale.stderr


def test_a_classifier_of_the_hub_that_is_not_fetched(classified: Path) -> None:
    with_pipeline(classified, pipeline="nobody/nowhere")
    assert "fetch it first: hf download nobody/nowhere" in rlhf("check", classified / "ppo.yaml").stdout
    refused = ppo(classified)
    assert refused.exit_code == 2 and "error[M01]" in refused.stderr and "not a cached hub id" in refused.stderr
