"""A run's folder for the tests of the command line, and stages that train nothing."""

from pathlib import Path

import pytest

from rlhf_cli import config
from rlhf_cli.cli import stage
from rlhf_cli.config.base import Options

SFT = "model: {path: ./base}\ndata: {train: rows.jsonl}\nsft:\n  learning_rate: 1e-5\n"


@pytest.fixture
def folder(here: Path) -> Path:
    """A run's folder with an SFT config, its data, a base model, and a PPO config."""
    (here / "sft.yaml").write_text(SFT)
    (here / "ppo.yaml").write_text("data: {prompts: rows.jsonl}\nppo: {total_episodes: 64}\n")
    (here / "rows.jsonl").write_text("{}\n")
    (here / "base").mkdir()
    (here / "base/config.json").write_text("{}")
    return here


@pytest.fixture
def stage_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[config.Config, Options]]:
    """Stages that only record their arguments."""
    calls: list[tuple[config.Config, Options]] = []
    monkeypatch.setattr(stage, "_runner", lambda name: lambda *arguments: calls.append(arguments))
    return calls
