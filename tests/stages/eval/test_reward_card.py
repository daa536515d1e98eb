"""`rlhf eval` prints the report card of the reward model, or why there is none."""

import json
import shutil
from pathlib import Path

import pytest
from ppo_folder import EVAL, PPO, as_reward_stage, evaluate, must_succeed, ppo, rlhf, write
from reward_card import card

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("no_page")]
QUICK = {"n": 4, "best_of": [], "modes": ["sampled"], "interpolate": [], "per_device_batch_size": 4}
FLAG = {"code": "R10", "text": "the score depends on the length of the answer"}
CARD = {key: value for key, value in card().items() if key != "ci95"} | {"flags": [FLAG]}
HEADLINE = {"accuracy": 0.8, "accuracy_ci95": [0.76, 0.83], "n": 500, "ece": 0.06}


def evaluation(folder: Path, reward: str | None) -> None:
    write(folder, "eval", {**EVAL, "models": {"sft": "sft_model", "reward": reward}, "eval": QUICK})


@pytest.fixture
def trained(run_folder: Path) -> Path:
    """A chain whose PPO was trained on a reward stage's model, which has a card."""
    as_reward_stage(run_folder, metrics=HEADLINE, card=CARD)
    write(run_folder, "ppo", {**PPO, "models": {"sft": "sft_model"}})
    must_succeed(ppo(run_folder, "-s", "ppo.total_episodes=8"))
    return run_folder


@pytest.mark.parametrize("named", ["reward", None])
def test_the_card_is_in_the_report_and_on_the_terminal(trained: Path, named: str | None) -> None:
    """By models.reward; or, where that is null, by what PPO's manifest says it was trained on."""
    evaluation(trained, named)
    found, result = evaluate(trained)
    shown = found["reward_model"]
    assert (shown["accuracy"], shown["ci95"], shown["ece"], shown["length_correlation"]) == (
        0.8,
        [0.76, 0.83],
        0.06,
        0.15,
    )
    assert (
        shown["adversarial"] == CARD["adversarial"] and "accuracy_ci95" not in shown and "no_reward_card" not in found
    )
    assert "reward model: accuracy 0.800 [0.760, 0.830] on the held-out pairs\nreport card: 500 pairs" in result.stdout
    assert "beaten by one token repeated" in result.stdout and "\nmargin, chosen - rejected  below -4" in result.stdout
    line = f"warning[R10]: {trained / 'reward'}: {FLAG['text']}"
    assert found["warnings"].count(line) == 1 and line in result.stderr
    assert line not in result.stdout and "in report.json, printed above: R10\n" in result.stdout
    again = rlhf("eval", "-c", trained / "eval.yaml")  # finished: the warning is in report.json only
    assert f"in report.json: {line}" in again.stdout and "warning[R10]" not in again.stderr


def test_the_card_of_a_retrained_reward_model_is_not_used(trained: Path) -> None:
    manifest = trained / "ppo/manifest.json"
    trained_with = json.loads(manifest.read_text())["parents"]["rewards.reward.model"]["sha256"]
    shutil.rmtree(trained / "reward")
    config = trained / "reward_model/generation_config.json"
    config.write_text("{}")
    as_reward_stage(trained, metrics=HEADLINE, card=CARD)
    assert json.loads((trained / "reward/manifest.json").read_text())["model_sha256"] != trained_with
    evaluation(trained, None)
    found, result = evaluate(trained)
    assert "reward_model" not in found and "accuracy 0.8" not in result.stdout
    assert "reward model: no report card: models.reward is null, and PPO used no model" in result.stdout


def test_the_reason_for_a_missing_card(run_folder: Path) -> None:
    assert ppo(run_folder, "-s", "ppo.total_episodes=8").exit_code == 0
    evaluation(run_folder, "reward_model")
    found, result = evaluate(run_folder)
    why = f"{run_folder / 'reward_model'}: it was not trained by `rlhf reward`"
    assert "reward_model" not in found and found["no_reward_card"] == why
    assert f"reward model: no report card: {why}" in result.stdout
    as_reward_stage(run_folder, metrics={})
    evaluation(run_folder, "reward")
    found, result = evaluate(run_folder, "--fresh")
    assert "its stage had no evaluation pairs" in found["no_reward_card"] and found["no_reward_card"] in result.stdout


def test_a_card_of_an_older_version_has_its_accuracy(run_folder: Path) -> None:
    as_reward_stage(run_folder, metrics={key: HEADLINE[key] for key in ("accuracy", "accuracy_ci95", "n")})
    assert ppo(run_folder, "-s", "ppo.total_episodes=8").exit_code == 0
    evaluation(run_folder, "reward")
    found, result = evaluate(run_folder)
    assert found["reward_model"] == {"accuracy": 0.8, "ci95": [0.76, 0.83], "n": 500}
    assert "accuracy 0.800" in result.stdout and "report card" not in result.stdout
