"""Models that answer, and sources that score: those that changed since training are skipped."""

import shutil
from pathlib import Path

import ppo_folder
import pytest
from ppo_folder import write

from rlhf_cli.models import load
from tests.commands.test_chat import is_error, piped

pytestmark = pytest.mark.full


def test_sources_that_changed_since_training_are_skipped_with_a_message(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PPO on external models, with a function of weight 0."""
    monkeypatch.chdir(run_folder)
    short = {"function": "judges:short", "weight": 0}
    write(run_folder, "ppo", {**ppo_folder.PPO, "rewards": {"reward": {}, "short": short}})
    assert ppo_folder.ppo(run_folder).exit_code == 0
    compared = piped(".", "--compare=sft,ppo")
    assert compared.exit_code == 0 and compared.stdout.startswith("sft: ")
    assert "sft: sft_model" in compared.stderr and "  short -" in compared.stderr and "sum" not in compared.stderr
    assert "reward (reward_model), short (judges:short), KL from sft_model" in compared.stderr
    Path("judges.py").write_text("def short(prompts, responses):\n    return [1.0 for _ in responses]\n")
    changed = load.load_causal_lm("sft_model")
    changed.lm_head.weight.data += 0.1
    changed.save_pretrained("sft_model")
    shutil.rmtree("reward_model")
    result = piped(".")
    assert result.exit_code == 0
    for text in (
        "no short: judges.py has changed since PPO was trained with it",
        "no KL: sft_model is no longer the model that PPO was trained with",
        "no reward: rewards.reward.model: no such folder reward_model",
    ):
        assert text in result.stderr, text
    assert "below each reply" not in result.stderr
    assert result.stderr.splitlines()[-1].split(" tok")[0].isdecimal()  # only the length is left
    assert is_error(piped(".", "--compare", "sft,ppo"), "M10", "is no longer the model")
    assert is_error(piped(".", "--stage", "sft"), "M01", "holds no sft stage")
