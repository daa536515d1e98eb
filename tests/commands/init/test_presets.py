"""`rlhf init`: what a preset writes, with which seed, and what it rejects.

Modules: `cli/init.py`.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from run_cli import child, must_succeed

from rlhf_cli import config
from rlhf_cli.commands.init import presets
from rlhf_cli.data.sources import raw_rows
from rlhf_cli.demo.world import Sizes
from rlhf_cli.errors import RLHFError
from rlhf_cli.runs import layout

STAGES = ("sft", "reward", "ppo", "eval")
CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of child processes, which are not run: no base model is trained, and the demo's files are short."""
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=143 if "stopped" in command[-1] else 0)

    monkeypatch.setitem(presets.PRESETS, "demo", replace(presets.PRESETS["demo"], world_sizes=Sizes(50, 50, 50, 20)))
    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_each_folder_of_configs_is_a_preset() -> None:
    assert presets.PRESETS.keys() == {path.name for path in CONFIGS.iterdir() if path.is_dir()}
    assert layout.configs_folder() == CONFIGS
    assert all("\n" not in text for text in (preset.description for preset in presets.PRESETS.values()))
    texts = [path.read_text() for path in CONFIGS.rglob("*.yaml*")]
    assert not any(f"\n# {key}:" in text for key in ("select", "require") for text in texts), "indent them"


@pytest.mark.parametrize("name", ["demo", "ci", "functions"])
def test_a_preset_loads_with_its_seed_and_all_its_data(name: str, tmp_path: Path, commands: list[list[str]]) -> None:
    folder = tmp_path / "a run"
    presets.init(name, folder, seed=11)
    stages = [stage for stage in STAGES if name != "functions" or stage != "reward"]
    files = [(stage, folder / f"{stage}.yaml") for stage in stages]
    assert (folder / "data/pairs.jsonl").exists() == (folder / "reward.yaml").exists() == ("reward" in stages)
    if name == "demo":
        files.append(("sft", folder / "base/sft.yaml"))
    for stage, file in files:
        loaded = config.load(stage, file)
        assert (loaded.seed, loaded.folder) == (11, file.parent / stage)
        for key, source in loaded.sources().items():
            assert next(raw_rows(source)), key
    other = tmp_path / "other"
    presets.init(name, other, seed=12)
    assert (other / "data/sft.jsonl").read_bytes() != (folder / "data/sft.jsonl").read_bytes()


def test_only_the_demo_trains_a_base_model_in_a_child_and_exits_with_its_code(
    tmp_path: Path, commands: list[list[str]]
) -> None:
    presets.init("ci", tmp_path / "ci")
    assert commands == [] and config.load("sft", tmp_path / "ci/sft.yaml").model.new
    presets.init("demo", tmp_path / "run")
    assert commands == [[sys.executable, "-P", "-m", "rlhf_cli", "run", str(tmp_path / "run/base")]]
    sft = config.load("sft", tmp_path / "run/sft.yaml")
    assert sft.model.path == str(config.load("sft", tmp_path / "run/base/sft.yaml").folder)
    with pytest.raises(SystemExit, match="143"):
        presets.init("demo", tmp_path / "stopped")


@pytest.mark.parametrize("there", ["ppo.yaml", "data/prompts.jsonl", "base/data/text.jsonl"])
def test_a_folder_with_another_such_file_is_refused(there: str, tmp_path: Path, commands: list[list[str]]) -> None:
    (tmp_path / there).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / there).write_text("mine", encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RLHFError) as caught:
        presets.init("demo", tmp_path)
    assert caught.value.exit_code == 2 and caught.value.problems[0].code == "C15"
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / there).read_text(encoding="utf-8") == "mine"
    assert commands == []


# The demo


def rlhf(*arguments: str, cwd: Path) -> str:
    done = must_succeed(child(*arguments, cwd=cwd))
    return done.stdout


@pytest.mark.slow
def test_the_demo_keeps_its_promises(tmp_path: Path) -> None:
    rlhf("init", "demo", "demo", cwd=tmp_path)
    shown = rlhf("run", "demo", cwd=tmp_path)
    report = json.loads((tmp_path / "demo/eval/report.json").read_text())
    sft, ppo, rates = report["models"]["sft"], report["models"]["ppo"], report["win_rate"]
    assert rates["ppo_vs_sft"]["gold"]["value"] >= 0.75 and rates["ppo_vs_sft"]["gold"]["ci95"][0] > 0.65
    assert rates["sft_vs_base"]["gold"]["value"] >= 0.75
    assert sft["eos_fraction"] >= 0.9 and ppo["eos_fraction"] >= 0.9
    assert 0.70 <= report["reward_model"]["accuracy"] <= 0.95
    assert ppo["kl"] <= 20 and ppo["distinct_fraction"] >= 0.5
    assert 0.5 <= ppo["response_length_mean"] / sft["response_length_mean"] <= 2
    assert "PPO over SFT" in shown and shown.count("prompt  ") >= 3

    again = rlhf("run", "demo", cwd=tmp_path)
    assert again.count("up to date") == 4 and "PPO over SFT" in again
    config = tmp_path / "demo/ppo.yaml"
    config.write_text(config.read_text().replace("kl_coef: 0.05", "kl_coef: 0.1"))
    planned = rlhf("run", "demo", "--dry-run", cwd=tmp_path)
    assert "ppo.kl_coef 0.05 -> 0.1" in planned
    assert all(f"{stage:<8} up to date" in planned for stage in ("sft", "reward")), planned
