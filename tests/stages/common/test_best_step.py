"""The best step of a reward training on held-out pairs is kept, also by a run that was killed."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trl_stage
from safetensors.torch import load_file
from trl_stage import manifest_of, metrics_of, signal_at, train

from rlhf_cli import jsonl, runs
from rlhf_cli.config.reward import RewardConfig
from rlhf_cli.runs.report import EvaluatedStep, KeptStep
from rlhf_cli.stages.common import best_step
from tests.conftest import World

pytestmark = pytest.mark.full

STEPS = {"max_steps": 8, "eval_steps": 2, "logging_steps": 8, "warmup_steps": 6, "normalize": "none"}


@pytest.fixture(scope="module")
def unlearns(world: World, sft_stage: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the pairs with their answers exchanged, and of a reward model that ranks all of these right."""
    folder = tmp_path_factory.mktemp("unlearns")
    pairs = [row for _, row in jsonl.read_jsonl(world.pairs)]
    exchanged = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in pairs]
    jsonl.write_jsonl(folder / "exchanged.jsonl", exchanged)
    settings = {"max_steps": 24, "normalize": "none"}
    config = trl_stage.config_of(world, "reward", folder, sft_stage, folder / "exchanged.jsonl", reward=settings)
    assert train(config)["metrics"]["accuracy"] == 1
    return folder


def config_of(world: World, folder: Path, parent: Path, unlearns: Path, **sections: Any) -> RewardConfig:
    """A training of that model on the pairs, with the exchanged ones held out: each step makes it worse."""
    sections["data"] = {"train": str(world.pairs), "eval": str(unlearns / "exchanged.jsonl")}
    sections["reward"] = {**STEPS, **sections.get("reward", {})}
    sections["model"] = {"path": str(parent), "start": str(unlearns / "reward")}
    return trl_stage.config_of(world, "reward", folder, parent, world.pairs, **sections)


@pytest.fixture(scope="module")
def straight(world: World, sft_stage: Path, unlearns: Path, tmp_path_factory: pytest.TempPathFactory) -> RewardConfig:
    """The config of a finished run that has all its checkpoints. Read-only."""
    folder = tmp_path_factory.mktemp("straight")
    config = config_of(world, folder, sft_stage, unlearns, output={"save_steps": 1, "keep": 99})
    train(config)
    return config


def weights_of(folder: Path) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in load_file(folder / "model.safetensors").items()}


def test_the_best_step_is_the_model_if_the_last_is_worse(straight: RewardConfig) -> None:
    manifest = manifest_of(straight)
    kept = manifest["card"]["kept_step"]
    accuracies = {each["step"]: each["accuracy"] for each in kept["evaluated"]}
    best = max(accuracies, key=lambda step: accuracies[step])
    assert list(accuracies) == [2, 4, 6, 8] and accuracies[best] > accuracies[8]
    assert (manifest["model_is"], manifest["step"], kept["step"]) == ("the best step", best, best)
    assert manifest["card"]["accuracy"] == accuracies[best]
    assert f": {best} steps, " in (straight.folder / "model/README.md").read_text()

    saved = weights_of(straight.folder / "model")
    assert saved == weights_of(straight.folder / f"state/checkpoint-{best}")
    assert saved != weights_of(straight.folder / "state/checkpoint-8")
    evaluations = [line for line in metrics_of(straight) if "eval_loss" in line]
    assert [line["step"] for line in evaluations] == [2, 4, 6, 8]  # each once, the last one of the last step


def resumed_runs(straight: RewardConfig, folder: Path) -> Iterator[tuple[int, Path]]:
    """Copies of the finished run as if it was killed after a step: the best checkpoint and one newer are left."""
    (best,) = {manifest_of(straight)["step"]}
    for step in (3, 8):
        copy = shutil.copytree(straight.folder.parent, folder / f"from-{step}")
        shutil.rmtree(copy / "reward/model")
        (copy / "reward/manifest.json").unlink()
        for other in {*range(1, 9)} - {best, step}:
            shutil.rmtree(copy / f"reward/state/checkpoint-{other}")
        yield step, copy


def test_a_killed_run_keeps_the_same_step_with_the_same_bytes(
    straight: RewardConfig, world: World, sft_stage: Path, unlearns: Path, tmp_path: Path
) -> None:
    """Also one that is killed when the last step was saved and the model not yet."""
    whole = manifest_of(straight)
    for step, copy in resumed_runs(straight, tmp_path):
        config = config_of(world, copy, sft_stage, unlearns, output={"save_steps": 1, "keep": 2})
        resumed = train(config)
        assert resumed["model_sha256"] == whole["model_sha256"], step
        assert resumed["card"] == whole["card"]
        assert metrics_of(config) == metrics_of(straight)
        assert len(list((config.folder / "state").glob("checkpoint-*"))) == 2  # the best one only while it trains


def test_a_stopped_run_has_the_best_checkpoint_beside_the_newest(
    straight: RewardConfig, world: World, sft_stage: Path, unlearns: Path, tmp_path: Path
) -> None:
    best = manifest_of(straight)["step"]
    config = config_of(world, tmp_path, sft_stage, unlearns, output={"save_steps": 1, "keep": 2})
    with signal_at(7), pytest.raises(SystemExit):
        trl_stage.run(config)
    names = {path.name for path in (config.folder / "state").glob("checkpoint-*")}
    assert names == {f"checkpoint-{step}" for step in (best, 6, 7)}
    assert train(config)["model_sha256"] == manifest_of(straight)["model_sha256"]


def test_a_damaged_best_checkpoint_leaves_the_last_step(
    straight: RewardConfig, world: World, sft_stage: Path, unlearns: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    best = manifest_of(straight)["step"]
    *_, (_, copy) = resumed_runs(straight, tmp_path)
    weights = copy / f"reward/state/checkpoint-{best}/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    config = config_of(world, copy, sft_stage, unlearns, output={"save_steps": 1, "keep": 2})
    manifest = train(config)
    assert weights_of(config.folder / "model") == weights_of(straight.folder / "state/checkpoint-8")
    assert "M05" in capsys.readouterr().err and "kept_step" not in manifest["card"] and manifest["step"] == 8


def test_keep_last_says_what_the_best_step_would_gain(
    straight: RewardConfig, world: World, sft_stage: Path, unlearns: Path, tmp_path: Path
) -> None:
    config = config_of(world, tmp_path, sft_stage, unlearns, reward={"keep": "last"}, output={"save_steps": 8})
    manifest = train(config)
    best = manifest_of(straight)["card"]["kept_step"]
    assert (manifest["model_is"], manifest["step"]) == ("the last step", 8)
    assert manifest["card"]["kept_step"] == {"step": 8, "evaluated": best["evaluated"]}
    assert weights_of(config.folder / "model") == weights_of(straight.folder / "state/checkpoint-8")
    assert {path.name for path in (config.folder / "state").glob("checkpoint-*")} == {"checkpoint-8"}


def test_a_single_evaluation_leaves_no_choice(world: World, sft_stage: Path, unlearns: Path, tmp_path: Path) -> None:
    few = {"max_steps": 2, "eval_steps": None}
    config = config_of(world, tmp_path, sft_stage, unlearns, reward=few)
    manifest = train(config)
    assert "model_is" not in manifest and "kept_step" not in manifest["card"] and manifest["step"] == 2
    assert [line["step"] for line in metrics_of(config) if "eval_loss" in line] == [2]


def test_adapters_of_the_best_step_are_kept(
    world: World, sft_stage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice of step 1 is forced: which step is the best is not of interest here."""
    monkeypatch.setattr(best_step, "keep_step", lambda right, prompts, keeps_best: forced(right))
    lora = {"path": str(sft_stage), "adapters": {"kind": "lora", "r": 4}}
    few = {**STEPS, "max_steps": 2, "eval_steps": 1}
    changes = {"model": lora, "output": {"save_steps": 1}, "reward": few}
    config = trl_stage.config_of(world, "reward", tmp_path, sft_stage, world.pairs, **changes)
    copy = tmp_path / "copy"
    keep = runs.complete_stage

    def complete_stage(*args: Any, **kwargs: Any) -> None:
        shutil.copytree(config.folder / "state", copy)  # before old checkpoints are deleted
        keep(*args, **kwargs)

    monkeypatch.setattr(runs, "complete_stage", complete_stage)
    train(config)
    name = "adapter_model.safetensors"
    saved = load_file(config.folder / "model" / name)
    first, last = (load_file(copy / f"checkpoint-{step}" / name) for step in (1, 2))
    assert all(saved[key].equal(first[key]) for key in first) and any(not saved[key].equal(last[key]) for key in last)


def forced(right: dict[int, list[float]]) -> KeptStep:
    evaluated = [EvaluatedStep(step=step, accuracy=0.5, within_noise=False) for step in right]
    return KeptStep(step=1, evaluated=evaluated)
