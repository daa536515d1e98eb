"""configs/zero3.yaml: DeepSpeed's ZeRO-3 in SFT and reward training equals one process without it."""

import signal
from pathlib import Path
from typing import Any

import group_trl_cases
import pytest
import torch
import yaml
from group import child, command, stop_and_resume
from ppo_folder import lines, must_succeed

from rlhf_cli.config.loading import load
from rlhf_cli.models.parallel import SINGLE_PROCESS
from tests.conftest import World
from tests.distributed.test_trl_stages import config, weights

LINES = yaml.safe_load((Path(__file__).parents[2] / "configs/zero3.yaml").read_text())
STAGES = ("sft", "reward")


def with_zero3(path: Path) -> Path:
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | LINES))
    return path


def logged(folder: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key != "time_s"} for line in lines(folder / "metrics.jsonl")]


@pytest.mark.parametrize("name", STAGES)
def test_the_lines_are_a_valid_config(world: World, tmp_path: Path, name: str) -> None:
    assert load(name, with_zero3(config(world, tmp_path / "run", (name, {}, {}), 2))).trainer == LINES["trainer"]


@pytest.mark.distributed
@pytest.mark.parametrize("name", STAGES)
def test_sharded_training_equals_one_process_and_resumes_exactly(
    world: World, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is the user's to install: pip install deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    case = (name, {}, {"max_steps": 60, "eval_steps": 30})
    alone = config(world, tmp_path / "one", case, 1)
    group_trl_cases.run(alone, SINGLE_PROCESS)
    straight, stopped = (with_zero3(config(world, tmp_path / folder, case, 2)) for folder in ("straight", "stopped"))
    must_succeed(child(*command(straight)))
    one, two = alone.with_suffix(""), straight.with_suffix("")
    for line, expected in zip(logged(one), logged(two), strict=True):
        assert line == pytest.approx(expected, rel=1e-3, abs=1e-4)
    difference = (weights(one) - weights(two)).norm() / weights(one).norm()
    assert difference < 1e-5, difference
    stop_and_resume(stopped, "checkpoint-6", signal.SIGTERM, 1)
    resumed = stopped.with_suffix("")
    assert torch.equal(weights(two), weights(resumed)) and logged(two) == logged(resumed)
