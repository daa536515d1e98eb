"""`rlhf init`: what a preset writes, with which seed, and what it refuses."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_cli import config, presets, run_folders
from rlhf_cli.demo.world import Sizes
from rlhf_cli.errors import RLHFError

STAGES = ("sft", "reward", "ppo", "eval")
CONFIGS = Path(__file__).parent.parent / "configs"


class Child:
    """Stands in for the child process that makes the base model."""

    def __init__(self, code: int) -> None:
        self.code, self.command = code, [""]

    def __call__(self, command: list[str], **kwargs: Any) -> SimpleNamespace:
        self.command = command
        return SimpleNamespace(returncode=self.code)


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Child:
    """No base model is trained, and the demo's files are short."""
    child = Child(code=0)
    monkeypatch.setitem(presets.PRESETS, "demo", replace(presets.PRESETS["demo"], sizes=Sizes(50, 50, 50, 20)))
    monkeypatch.setattr(subprocess, "run", child)
    return child


def test_each_folder_of_configs_is_a_preset() -> None:
    assert set(presets.available()) == {path.name for path in CONFIGS.iterdir() if path.is_dir()}
    assert run_folders.configs_folder() == CONFIGS
    assert all("\n" not in text for text in presets.available().values())


@pytest.mark.parametrize("name", ["demo", "ci", "functions"])
def test_a_preset_loads_with_its_seed_and_all_its_data(name: str, tmp_path: Path, child: Child) -> None:
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
            assert next(source.rows()), key
    other = tmp_path / "other"
    presets.init(name, other, seed=12)
    assert (other / "data/sft.jsonl").read_bytes() != (folder / "data/sft.jsonl").read_bytes()


def test_the_demo_makes_its_base_model_in_a_child_and_fails_with_it(tmp_path: Path, child: Child) -> None:
    presets.init("demo", tmp_path / "run")
    assert child.command == [sys.executable, "-P", "-m", "rlhf_cli", "run", str(tmp_path / "run/base")]
    sft = config.load("sft", tmp_path / "run/sft.yaml")
    assert sft.model.path == str(config.load("sft", tmp_path / "run/base/sft.yaml").folder)
    child.code = 143
    with pytest.raises(SystemExit, match="143"):
        presets.init("demo", tmp_path / "stopped")


def test_ci_starts_from_fresh_weights_and_needs_no_base_model(tmp_path: Path, child: Child) -> None:
    presets.init("ci", tmp_path)
    assert child.command == [""] and not (tmp_path / "base").exists()
    assert config.load("sft", tmp_path / "sft.yaml").model.new


@pytest.mark.parametrize("there", ["ppo.yaml", "data/prompts.jsonl", "base/data/text.jsonl"])
def test_a_folder_that_holds_any_of_its_files_is_refused_untouched(there: str, tmp_path: Path, child: Child) -> None:
    (tmp_path / there).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / there).write_text("mine", encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RLHFError) as caught:
        presets.init("demo", tmp_path)
    assert caught.value.exit_code == 2 and caught.value.problems[0].code == "C15"
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / there).read_text(encoding="utf-8") == "mine"
    assert child.command == [""]


def test_files_of_its_own_do_not_stand_in_the_way(tmp_path: Path, child: Child) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    presets.init("ci", tmp_path)
    assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "mine"


def test_an_unknown_preset_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(RLHFError) as caught:
        presets.init("dmeo", tmp_path / "run")
    known = ", ".join(presets.available())
    assert str(caught.value) == f"error[C07]: no preset 'dmeo'; there are {known}\nhint: did you mean demo?"
    assert not (tmp_path / "run").exists()
