"""`rlhf init`: what a preset writes, with which seed, and what it rejects.

Modules: `cli/init.py`, `commands/init/folder.py`.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from run_cli import child, must_succeed

from rlhf_cli import config, jsonl, runs
from rlhf_cli.commands.init import presets
from rlhf_cli.commands.init.folder import all_or_nothing, remove_leftovers
from rlhf_cli.data.sources import raw_rows
from rlhf_cli.demo import world
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


class Killed(BaseException):
    """Stands for SIGKILL."""


def steps_of_init(folder: Path, monkeypatch: pytest.MonkeyPatch, kill_at: int | None) -> int:
    """Run `rlhf init ci`, killed before its change number `kill_at` of the disk; return the number of changes."""
    count = 0

    def counting(real: Any) -> Any:
        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if kill_at is not None and count >= kill_at:
                raise Killed  # also during clean-up
            return real(*args, **kwargs)

        return step

    with monkeypatch.context() as patch:
        for name in ("link", "rename", "mkdir", "rmdir", "unlink"):
            patch.setattr(os, name, counting(getattr(os, name)))
        patch.setattr(Path, "write_text", counting(Path.write_text))
        patch.setattr(jsonl, "write_jsonl", counting(jsonl.write_jsonl))
        patch.setattr(shutil, "rmtree", counting(shutil.rmtree))
        patch.setitem(presets.PRESETS, "ci", replace(presets.PRESETS["ci"], world_sizes=Sizes(0, 4, 4, 2)))
        patch.setattr(world, "write_jsonl", jsonl.write_jsonl)
        try:
            presets.init("ci", folder, seed=3)
        except Killed:
            assert kill_at is not None
    runs.release()
    return count


@pytest.mark.full
@pytest.mark.parametrize("there", [False, True])
def test_a_killed_init_can_be_repeated(there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new folder is complete or absent, and the second command succeeds."""

    def files(folder: Path) -> dict[str, bytes]:
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def prepared(name: str) -> Path:
        if there:
            (tmp_path / name).mkdir()
            (tmp_path / name / "notes.txt").write_text("mine")
        return tmp_path / name

    complete = prepared("complete")
    count = steps_of_init(complete, monkeypatch, None)
    expected = files(complete)
    assert count > 12 and "data/pairs.jsonl" in expected and ".schema/sft.json" in expected
    steps = range(1, count + 1, 3 if there else 1)  # an existing folder takes three times as many
    for step in steps:
        folder = prepared(f"killed{step}")
        steps_of_init(folder, monkeypatch, step)
        left = files(folder)
        assert there or left in ({}, expected), step
        assert not there or left["notes.txt"] == b"mine"
        assert steps_of_init(folder, monkeypatch, None) and files(folder) == expected, step
    assert steps_of_init(complete, monkeypatch, None) and files(complete) == expected  # and a finished one
    names = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")}
    assert names == {"complete", *(f"killed{step}" for step in steps)}


def test_files_of_a_killed_init_are_removed_and_earlier_files_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes that come from a measurement differ each time: the second command must not meet the first one's files."""
    (tmp_path / "earlier").write_text("same")
    link, placed = os.link, []

    def killed_later(source: Path, target: Path) -> None:
        if placed:
            raise Killed
        placed.append(target)
        link(source, target)

    monkeypatch.setattr(os, "link", killed_later)
    with pytest.raises(Killed), all_or_nothing(tmp_path) as scratch:
        (scratch / "data").mkdir()
        for name in ("data/new", "earlier", "later"):
            (scratch / name).write_text("same")
    assert placed == [tmp_path / "data/new"] and placed[0].read_text() == "same"
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == ["earlier"]


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
