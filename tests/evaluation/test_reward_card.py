"""ppo.require_reward: PPO does not start on a reward model whose report card shows less, through the real CLI."""

from pathlib import Path
from typing import Any

import pytest
from ppo_folder import PPO, as_reward_stage, fails, must_succeed, ppo, rlhf, write
from run_cli import run_here

from rlhf_cli import jsonl

CARD = {
    "accuracy": 0.7,
    "accuracy_ci95": [0.62, 0.77],
    "n": 200,
    "margin": 0.8,
    "ece": 0.08,
    "length_correlation": -0.4,
    "length_correlation_ci95": [-0.5, -0.3],
}
FROM_STAGE = {**PPO, "models": {"sft": "sft_model"}}


def write_ppo(folder: Path, require: dict[str, float], config: dict[str, Any] = FROM_STAGE) -> None:
    write(folder, "ppo", {**config, "ppo": {**PPO["ppo"], "require_reward": require}})


def line_of(folder: Path, text: str) -> int:
    lines = (folder / "ppo.yaml").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.strip().startswith(text))


@pytest.mark.full
@pytest.mark.parametrize(
    ("key", "met", "unmet", "message"),
    [
        ("accuracy", 0.7, 0.71, "has 0.7, required at least 0.71"),
        ("accuracy_low", 0.62, 0.65, "has 0.62, required at least 0.65"),
        ("ece", 0.08, 0.07, "has 0.08, required at most 0.07"),
        ("length_correlation", 0.4, 0.3, "has -0.4, required at most 0.3"),
    ],
)
def test_each_key_rejects_worse_and_accepts_equal_values(
    run_folder: Path, key: str, met: float, unmet: float, message: str
) -> None:
    as_reward_stage(run_folder, metrics=CARD)
    write_ppo(run_folder, {key: unmet})
    checked, refused = rlhf("check", run_folder / "ppo.yaml"), ppo(run_folder)
    place = f"{run_folder / 'ppo.yaml'}:{line_of(run_folder, f'{key}:')}"
    for result in (checked, refused):
        assert result.exit_code == 2, result.output
        line = f"error[M11]: {place}: ppo.require_reward.{key}: {run_folder / 'reward'} {message}\nhint: train a better"
        assert line in result.stderr + result.stdout
    assert not (run_folder / "ppo/metrics.jsonl").exists()
    write_ppo(run_folder, {key: met})
    assert "M11" not in rlhf("check", run_folder / "ppo.yaml").output
    assert ppo(run_folder, "-s", "ppo.total_episodes=8").exit_code == 0


def test_all_unmet_requirements_are_reported_together(run_folder: Path) -> None:
    as_reward_stage(run_folder, metrics=CARD)
    write_ppo(run_folder, {"accuracy": 0.9, "ece": 0.01, "length_correlation": 0.9})
    assert ppo(run_folder).stderr.count("error[M11]") == 2


VOTE = {**FROM_STAGE, "rewards": {"vote": {"models": {"good": "reward", "unknown": "reward_model"}}}}
OLD_METRICS = {key: CARD[key] for key in ("accuracy", "accuracy_ci95", "n", "margin")}


@pytest.mark.parametrize(
    ("config", "metrics", "require", "message", "hint"),
    [
        (FROM_STAGE, {}, "ece", "reward has no report card: its stage had no evaluation pairs", "set data.eval or"),
        (FROM_STAGE, OLD_METRICS, "ece", "reward has no ece; an older version wrote it", "run the stage again"),
        (PPO, CARD, "accuracy", "reward_model has no report card: it was not trained by", "name the folder of a"),
        (VOTE, CARD, "accuracy", "reward_model has no report card", "name the folder of a"),
    ],
)
def test_a_reward_model_without_the_number(
    run_folder: Path, config: dict[str, Any], metrics: dict[str, Any], require: str, message: str, hint: str
) -> None:
    as_reward_stage(run_folder, metrics=metrics)
    write_ppo(run_folder, {require: 0.6}, config)
    result = ppo(run_folder)
    assert result.exit_code == 2 and result.stderr.count("error[M11]") == 1
    assert f"{run_folder}/{message}" in result.stderr and f"hint: {hint}" in result.stderr


@pytest.mark.full
def test_a_value_model_is_not_a_reward_and_without_a_reward_model_the_key_has_no_effect(run_folder: Path) -> None:
    write_ppo(run_folder, {"accuracy": 0.6}, {**PPO, "rewards": {"short": {"function": "judges:short"}}})
    for result in (ppo(run_folder), rlhf("check", run_folder / "ppo.yaml")):
        assert result.exit_code == 2 and "M11" not in result.output
        assert (
            "error[C17]" in result.output and "ppo.require_reward has no effect: no reward is a model" in result.output
        )


@pytest.mark.full
def test_rlhf_run_finds_it_before_anything_trains(run_folder: Path) -> None:
    as_reward_stage(run_folder, metrics=CARD)
    (run_folder / "reward.yaml").unlink()  # its stage is not part of this run
    write_ppo(run_folder, {"accuracy": 0.9})
    write(run_folder, "sft", {"model": {"path": "sft_model"}, "data": {"train": "prompts.jsonl"}, "run": "other"})
    fails(run_here(run_folder), "M11", "has 0.7, required at least 0.9")
    assert not (run_folder / "ppo").exists() and not (run_folder / "other").exists()


@pytest.mark.full
def test_what_is_finished_stays_finished_and_a_changed_requirement_makes_nothing_stale(run_folder: Path) -> None:
    as_reward_stage(run_folder, metrics=CARD)
    write_ppo(run_folder, {"accuracy": 0.6})
    assert ppo(run_folder).exit_code == 0
    write_ppo(run_folder, {"accuracy": 0.9})
    must_succeed(ppo(run_folder), "finished already")
    assert "M11" not in rlhf("check", run_folder / "ppo.yaml").output
    fails(ppo(run_folder, "--fresh"), "M11")
    assert (run_folder / "ppo/manifest.json").exists() and not (run_folder / ".old").exists()


@pytest.mark.full
def test_check_waits_for_a_reward_stage_that_is_still_to_run(run_folder: Path) -> None:
    pairs = [{"prompt": "p", "chosen": "a", "rejected": "b"}]
    jsonl.write_jsonl(run_folder / "pairs.jsonl", pairs * 8)
    write(run_folder, "reward", {"model": {"path": "sft_model"}, "data": {"train": "pairs.jsonl"}})
    write_ppo(run_folder, {"accuracy": 0.9})
    message = rlhf("check", run_folder).output
    assert "which the reward stage is to make" in message and "M11" not in message
