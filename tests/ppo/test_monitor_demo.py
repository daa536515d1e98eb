"""The watchdog on the demo's world: silent over five healthy runs, quick where the reward pays for a word (minutes)."""

import json
from pathlib import Path

import pytest
import yaml
from ppo_folder import lines, rlhf

pytestmark = pytest.mark.slow

GOLD = {"function": "rlhf_cli.demo.gold:gold", "weight": 0}
# Five points for each "enjoy", five times at most: the most that reward models of the demo give is about two.
PAID = {"builtin": "keyword", "parameters": {"words": ["enjoy"], "most": 5}, "weight": 5}

WINDOW = 3  # updates, of ppo.watchdog
NOISE = 0.05  # of the mean of a window, two standard errors


@pytest.fixture(scope="module", params=range(5))
def world(request, tmp_path_factory) -> Path:
    """The demo of a seed up to its reward model."""
    folder = tmp_path_factory.mktemp(f"demo-{request.param}")
    folder.rmdir()
    assert rlhf("init", "demo", folder, "--seed", request.param).exit_code == 0
    for stage in ("sft", "reward"):
        assert rlhf(stage, "-c", folder / f"{stage}.yaml").exit_code == 0
    return folder


def with_rewards(world: Path, **rewards: object) -> None:
    config = yaml.safe_load((world / "ppo.yaml").read_text())
    (world / "ppo.yaml").write_text(yaml.safe_dump({**config, "rewards": rewards}))


def gold(world: Path) -> list[float]:
    return [row["objective/score/gold"] for row in lines(world / "ppo/metrics.jsonl")]


def test_silent_on_a_healthy_run(world):
    """With the gold judge held out, so that every signal but an ensemble's is watched."""
    with_rewards(world, reward={}, gold=GOLD)
    result = rlhf("ppo", "-c", world / "ppo.yaml", "--fresh")
    assert result.exit_code == 0 and "R13" not in result.stderr, result.stderr
    assert not (world / "ppo/watchdog.jsonl").exists()
    assert sum(gold(world)[-3:]) / 3 > gold(world)[0] + 0.2  # and it did learn


@pytest.mark.parametrize("world", [0], indirect=True)
@pytest.mark.parametrize("beside_the_reward_model", [True, False])
def test_a_word_that_is_paid_for_is_stopped_soon_after_gold_falls(world, beside_the_reward_model):
    """Within five updates of its falling below SFT's; beside the reward model, from which gold gains first, before."""
    with_rewards(world, **({"reward": {}} if beside_the_reward_model else {}), points=PAID, gold=GOLD)
    result = rlhf("ppo", "-c", world / "ppo.yaml", "-s", "ppo.watchdog.actions={judge: stop}", "--fresh")
    assert result.exit_code == 1 and "error[R13]" in result.stderr, result.stderr
    found, made = gold(world), json.loads((world / "ppo/manifest.json").read_text())
    assert len(found) < 50 and made["model_is"] == "the best step"

    windows = [sum(found[i : i + WINDOW]) / WINDOW for i in range(len(found) - WINDOW + 1)]
    assert all(window > windows[0] - NOISE for window in windows[:-5])
    if beside_the_reward_model:
        assert windows[-1] > found[0]
    assert made["best"]["value"] > found[0] + (0.1 if beside_the_reward_model else 0)
