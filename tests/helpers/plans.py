"""`rlhf plan` of three small stages, and the parts of what it prints."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_inputs import foreign_scorer, replace
from typer.testing import CliRunner, Result

from rlhf_cli import progress
from rlhf_cli.cli import app
from rlhf_cli.commands.common.plan.advice import Advice
from rlhf_cli.commands.common.plan.stage_plan import PhasePlan, StagePlan
from rlhf_cli.files import file_sha256
from rlhf_cli.planning import duration

on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine computes on a GPU")
GPU = ("--gpu", "80")
KNOWN: dict[Any, dict[str, dict[str, Any]]] = {}  # plans by arguments and files


@pytest.fixture
def no_progress_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 1e9)


@pytest.fixture
def three(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change a folder of small stages to PPO of ten updates, with a reward model of another training.

    The speed of this machine is measured once.
    """
    monkeypatch.setattr(duration, "MAX_CALLS", 1)
    monkeypatch.setattr(duration, "MAX_ROUNDS", 1)
    foreign_scorer(folder)
    replace("ppo.yaml", "total_episodes: 64", "total_episodes: 640\n  response_length: 24")
    return folder


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


def plan_json(*arguments: str) -> dict[str, dict[str, Any]]:
    """Return stage -> its plan, at a fixed rate unless one is in the arguments, so that nothing is measured."""
    result = plan("--json", *(() if "--flops" in arguments else ("--flops", "1e9")), *arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    stages: dict[str, dict[str, Any]] = json.loads(result.stdout)["stages"]
    return stages


def planned(*arguments: str) -> dict[str, dict[str, Any]]:
    """Return plan_json, computed once for the same arguments and files."""
    files = frozenset((str(path), file_sha256(path)) for path in Path().rglob("*") if path.is_file())
    if (arguments, files) not in KNOWN:
        KNOWN[arguments, files] = plan_json(*arguments)
    return KNOWN[arguments, files]


def parsed(stage: dict[str, Any]) -> StagePlan:
    """Return the plan of a stage that --json printed."""
    phases = [PhasePlan(**each) for each in stage["phases"]]
    return StagePlan(**{**stage, "phases": phases, "advice": [Advice(**each) for each in stage["advice"]]})


def phase(stage: dict[str, Any], name: str) -> dict[str, Any]:
    (only,) = (each for each in stage["phases"] if each["name"] == name)
    return only


def size(stage: dict[str, Any], name: str) -> dict[str, int]:
    """Return the bytes of a phase by kind."""
    kinds: dict[str, int] = phase(stage, name)["bytes"]
    return kinds


def ppo(*arguments: str) -> dict[str, Any]:
    return planned("ppo.yaml", *arguments)["ppo"]
