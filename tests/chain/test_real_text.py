"""The chain from a real pretrained model (stories260K) on real text (rt-polarity), through the real CLI.

Slow. In `make test` the chain runs on a model of each family and on sentences of this form (tests/presets), PPO on this
model (tests/docs/test_library.py), and what a stage learns is tested in tests/stages.
"""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from rlhf_cli import jsonl
from rlhf_cli.cli import app

SHARED = Path(__file__).parents[3] / "shared"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SHARED.is_dir(), reason="../shared (a pretrained model and real text) is not here"),
]
COMMON = {"per_device_train_batch_size": 16, "learning_rate": 1e-3, "logging_steps": 4}
CONFIGS = {
    "sft": {
        "model": {"path": str(SHARED / "models/stories260K")},
        "data": {"train": "sft.jsonl", "eval": "sft_eval.jsonl"},
        "sft": {**COMMON, "num_train_epochs": 1.0, "max_length": 256},
    },
    "reward": {
        "data": {"train": "pairs.jsonl", "eval": "pairs_eval.jsonl"},
        "reward": {**COMMON, "num_train_epochs": 2.0, "max_length": 256, "normalize_samples": 32},
    },
    "ppo": {
        "data": {"prompts": "pairs.jsonl"},
        "ppo": {
            "total_episodes": 96,
            "per_device_train_batch_size": 16,
            "gradient_accumulation_steps": 2,
            "response_length": 32,
            "temperature": 1.0,
            "learning_rate": 3e-4,
            "missing_eos_penalty": 0.0,
        },
    },
    "eval": {"data": {"prompts": "pairs_eval.jsonl"}, "eval": {"n": 24, "best_of": [2]}},
}


def split(line: str) -> tuple[str, str]:
    """The first words of a review as the prompt, the rest as what follows."""
    words = line.split()
    return " ".join(words[:3]), " " + " ".join(words[3:])


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("real")
    good, bad = (
        [line.strip() for line in (SHARED / f"data/rt-polarity/{kind}.txt").read_text(encoding="utf-8").splitlines()]
        for kind in ("pos", "neg")
    )
    good, bad = ([line for line in lines if len(line.split()) > 8] for lines in (good, bad))
    for name, part in (("", slice(0, 160)), ("_eval", slice(160, 200))):
        texts = (dict(zip(("prompt", "completion"), split(line), strict=True)) for line in good[part] + bad[part])
        jsonl.write_jsonl(folder / f"sft{name}.jsonl", texts)
        pairs = (
            {"prompt": split(one)[0], "chosen": split(one)[1], "rejected": split(other)[1]}
            for one, other in zip(good[part], bad[part], strict=True)
        )
        jsonl.write_jsonl(folder / f"pairs{name}.jsonl", pairs)
    for stage, config in CONFIGS.items():
        (folder / f"{stage}.yaml").write_text(yaml.safe_dump(config))
    for stage in CONFIGS:
        result = CliRunner().invoke(app, [stage, "-c", str(folder / f"{stage}.yaml")])
        assert result.exit_code == 0, result.output
    return folder


def manifest(run: Path, stage: str) -> dict:
    return json.loads((run / stage / "manifest.json").read_text())


def lines(path: Path) -> list[dict]:
    return [row for _, row in jsonl.read_jsonl(path)]


def test_sft_lowers_the_loss_on_reviews_it_never_saw(run):
    metrics = lines(run / "sft/metrics.jsonl")
    first = next(row["loss"] for row in metrics if "loss" in row)
    assert manifest(run, "sft")["metrics"]["eval_loss"] < first - 0.3


def test_reward_separates_the_reviews_it_was_trained_on(run):
    accuracies = [row["accuracy"] for row in lines(run / "reward/metrics.jsonl") if "accuracy" in row]
    assert sum(accuracies[-3:]) / 3 > sum(accuracies[:2]) / 2
    found = manifest(run, "reward")
    assert len(found["probes"]) == 8 and 0 < found["metrics"]["accuracy"] < 1


def test_ppo_starts_exactly_and_moves(run):
    metrics = lines(run / "ppo/metrics.jsonl")
    assert metrics[0]["objective/kl"] == 0.0 and metrics[0]["policy/first_ratio_error"] == 0.0
    assert metrics[-1]["objective/kl"] != 0.0 and len(metrics) == 3
    report = json.loads((run / "eval/report.json").read_text())
    assert report["n"] == 24 and report["reward_model"]["accuracy"] == manifest(run, "reward")["metrics"]["accuracy"]
