"""Prompts and ptx rows of `rlhf ppo`, and its batch arithmetic."""

import json
from pathlib import Path

import pytest
import yaml
from ppo_folder import PPO, fails, lines, ppo, settings, write

from rlhf_cli.config.loading import load
from rlhf_cli.config.ppo import scale_to_world_size
from rlhf_cli.data.datasets import Prompt
from rlhf_cli.data.readers import RowLocation
from rlhf_cli.stages.ppo import prompt_rows


def test_prompts_and_updates_of_ppo_in_two_processes(tmp_path: Path) -> None:
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "total_episodes": 64}
    (tmp_path / "ppo.yaml").write_text(yaml.safe_dump({"data": {"prompts": "p"}, "ppo": sizes}))
    config = scale_to_world_size(load("ppo", tmp_path / "ppo.yaml"), 2)
    text = "20 prompts; an update: 4 x 2 x 2 processes = 16 episodes, 1 per prompt; 4 epochs x 1 minibatches = 4 "
    text += "optimizer steps; in all 4 updates, 64 episodes"
    assert prompt_rows.describe_batches(config, [Prompt([1], "a", RowLocation(Path("p"), 1))] * 20, 2) == text


@pytest.mark.full
@pytest.mark.parametrize(
    "row", [{"prompt": "tell me", "completion": " about the sea"}, {"text": "about the moon and the hill"}]
)
def test_ptx_rows_of_all_forms(run_folder, row):
    (run_folder / "ptx.jsonl").write_text(3 * (json.dumps(row) + "\n"))
    write(run_folder, "ppo", {**PPO, "data": {**PPO["data"], "ptx_data": "ptx.jsonl"}})
    assert ppo(run_folder, *settings("ptx_coef=1.0")).exit_code == 0
    history = [line["loss/ptx_avg"] for line in lines(run_folder / "ppo/metrics.jsonl")]
    assert history[-1] < history[0]
    fails(ppo(run_folder, "--fresh"), "C17", "data.ptx_data has no effect without ppo.ptx_coef")
