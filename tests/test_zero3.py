"""configs/zero3.yaml: DeepSpeed's ZeRO-3 in SFT and reward training, beside one process without it."""

import os
import signal
from pathlib import Path
from typing import Any

import group_trl_cases
import pytest
import torch
import yaml
from conftest import World
from ppo_folder import lines
from test_group_trl import child, config, stage, started, weights, when, workers

from rlhf_cli.config.loading import load
from rlhf_cli.models.parallel import SINGLE_PROCESS

LINES = yaml.safe_load((Path(__file__).parents[1] / "configs/zero3.yaml").read_text())
STAGES = ("sft", "reward")


def cut_up(path: Path) -> Path:
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | LINES))
    return path


def logged(folder: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key != "time_s"} for line in lines(folder / "metrics.jsonl")]


@pytest.mark.parametrize("name", STAGES)
def test_the_lines_fit_the_config(world: World, tmp_path: Path, name: str) -> None:
    assert load(name, cut_up(config(world, tmp_path / "run", (name, {}, {}), 2))).trainer == LINES["trainer"]


@pytest.mark.distributed
@pytest.mark.parametrize("name", STAGES)
def test_two_processes_with_parts_learn_what_one_learns_and_go_on_to_the_same_bytes(
    world: World, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is the user's to install: pip install deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    case = (name, {}, {"max_steps": 60, "eval_steps": 30})
    alone = config(world, tmp_path / "one", case, 1)
    group_trl_cases.run(alone, SINGLE_PROCESS)
    straight, stopped = (cut_up(config(world, tmp_path / folder, case, 2)) for folder in ("straight", "stopped"))
    result = child(*stage(straight))
    assert result.returncode == 0, result.stderr
    one, two = alone.with_suffix(""), straight.with_suffix("")
    for mine, theirs in zip(logged(one), logged(two), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-4)
    apart = (weights(one) - weights(two)).norm() / weights(one).norm()
    assert apart < 1e-5, apart
    process = started(stopped)
    when(stopped, 6, process)
    os.kill(workers(process)[1], signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 143, said
    again = child(*stage(stopped))
    assert again.returncode == 0 and "resumes at step" in again.stderr, again.stderr
    resumed = stopped.with_suffix("")
    assert torch.equal(weights(two), weights(resumed)) and logged(two) == logged(resumed)
