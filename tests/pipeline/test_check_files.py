"""Checks of configs, files, parents and outputs, without torch."""

import os
import subprocess
from pathlib import Path

import pytest
import run_cli
from bad_inputs import check, replace, rlhf
from cost import cost

from tests.pipeline.test_check import lines, messages


@pytest.mark.parametrize("name", ["modle", "base/model"])
def test_a_misspelt_folder_is_not_a_hub_id(folder: Path, name: str) -> None:
    (folder / "base").mkdir()
    replace("sft.yaml", "path: model", f"path: {name}")
    assert messages(check("sft.yaml"), "error[M01]: sft.yaml:1: model.path")


def test_a_missing_model_is_reported_once_with_all_its_keys(folder: Path) -> None:
    replace("ppo.yaml", "models: {sft: model, reward: scorer}", "models: {sft: model, reward: ./gone, value: ./gone}")
    (message,) = messages(check("ppo.yaml"), "error[M01]")
    assert message == "error[M01]: ppo.yaml:1: models.value: no such folder gone (models.reward too)"


def test_a_stage_that_has_not_run_is_no_misspelt_folder(run_folder: Path) -> None:
    (run_folder / "ppo").mkdir()
    replace("eval.yaml", "data:", "policies: {dpo: RUN/dpo}\ndata:")
    hint = "hint: write dpo.yaml (`rlhf init` with --baselines writes one in a new run) and run that stage first"
    assert hint in check("eval.yaml").stderr


@pytest.mark.full
def test_finished_stages_and_the_output_of_another_config(run_folder: Path) -> None:
    assert rlhf("sft").exit_code == 0
    whole = lines(check(".").stdout)
    assert whole["sft", "sft.yaml"].startswith("config read; output: up to date (")
    assert whole["reward", "model.path"] == "sft: llama, 336 tokens"
    assert check("reward.yaml").exit_code == 0
    replace("sft.yaml", "max_steps: 1", "max_steps: 2")
    assert "error[C15]: sft.yaml: sft holds another run: sft.max_steps 1 -> 2" in check("sft.yaml").stderr
    stale = check(".")  # rlhf run moves it aside
    assert stale.exit_code == 0 and lines(stale.stdout)["reward", "model.path"].startswith("sft, which the sft stage")


@pytest.mark.full
def test_static_faults_are_found_quickly_without_torch(run_folder: Path) -> None:
    """Each of the four files has a fault; the cost counts the start of Python too."""
    replace("sft.yaml", "max_steps: 1", "max_stepps: 1")
    replace("reward.yaml", "max_steps: 1", "max_steps: -1")
    replace("ppo.yaml", "total_episodes: 64", "total_episodes: sixty")
    replace("eval.yaml", "best_of: []", "best_of: 2")
    code = "import sys; from rlhf_cli.cli import app\ntry: app(['check', '.'])\n"
    code += "finally: print(sorted({'torch', 'transformers', 'datasets'} & sys.modules.keys()))"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    def checked() -> subprocess.CompletedProcess[str]:
        return run_cli.python("-c", code, env=env)

    done = checked()
    assert done.returncode == 2 and done.stdout.splitlines()[-1] == "[]", done.stdout
    errors = [line[6:9] for line in done.stderr.splitlines() if line.startswith("error[")]
    assert errors == ["C01", "C06", "C05", "C05"]
    assert cost(checked) <= 5
