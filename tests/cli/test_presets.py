"""`rlhf init`: what a preset writes, with which seed, and what it refuses."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_cli import config, jsonl, runs
from rlhf_cli.commands import init
from rlhf_cli.commands.init import all_or_nothing, remove_leftovers
from rlhf_cli.data.sources import read_rows
from rlhf_cli.demo import world
from rlhf_cli.demo.world import Sizes
from rlhf_cli.errors import RLHFError
from rlhf_cli.runs import discover

STAGES = ("sft", "reward", "ppo", "eval")
CONFIGS = Path(__file__).parents[2] / "configs"


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
    monkeypatch.setitem(init.PRESETS, "demo", replace(init.PRESETS["demo"], sizes=Sizes(50, 50, 50, 20)))
    monkeypatch.setattr(subprocess, "run", child)
    return child


def test_each_folder_of_configs_is_a_preset() -> None:
    assert set(init.available()) == {path.name for path in CONFIGS.iterdir() if path.is_dir()}
    assert discover.configs_folder() == CONFIGS
    assert all("\n" not in text for text in init.available().values())


@pytest.mark.parametrize("name", ["demo", "ci", "functions"])
def test_a_preset_loads_with_its_seed_and_all_its_data(name: str, tmp_path: Path, child: Child) -> None:
    folder = tmp_path / "a run"
    init.init(name, folder, seed=11)
    stages = [stage for stage in STAGES if name != "functions" or stage != "reward"]
    files = [(stage, folder / f"{stage}.yaml") for stage in stages]
    assert (folder / "data/pairs.jsonl").exists() == (folder / "reward.yaml").exists() == ("reward" in stages)
    if name == "demo":
        files.append(("sft", folder / "base/sft.yaml"))
    for stage, file in files:
        loaded = config.load(stage, file)
        assert (loaded.seed, loaded.folder) == (11, file.parent / stage)
        for key, source in loaded.sources().items():
            assert next(read_rows(source)), key
    other = tmp_path / "other"
    init.init(name, other, seed=12)
    assert (other / "data/sft.jsonl").read_bytes() != (folder / "data/sft.jsonl").read_bytes()


def test_the_demo_makes_its_base_model_in_a_child_and_fails_with_it(tmp_path: Path, child: Child) -> None:
    init.init("demo", tmp_path / "run")
    assert child.command == [sys.executable, "-P", "-m", "rlhf_cli", "run", str(tmp_path / "run/base")]
    sft = config.load("sft", tmp_path / "run/sft.yaml")
    assert sft.model.path == str(config.load("sft", tmp_path / "run/base/sft.yaml").folder)
    child.code = 143
    with pytest.raises(SystemExit, match="143"):
        init.init("demo", tmp_path / "stopped")


def test_ci_starts_from_fresh_weights_and_needs_no_base_model(tmp_path: Path, child: Child) -> None:
    init.init("ci", tmp_path)
    assert child.command == [""] and not (tmp_path / "base").exists()
    assert config.load("sft", tmp_path / "sft.yaml").model.new


@pytest.mark.parametrize("there", ["ppo.yaml", "data/prompts.jsonl", "base/data/text.jsonl"])
def test_a_folder_that_holds_any_of_its_files_is_refused_untouched(there: str, tmp_path: Path, child: Child) -> None:
    (tmp_path / there).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / there).write_text("mine", encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RLHFError) as caught:
        init.init("demo", tmp_path)
    assert caught.value.exit_code == 2 and caught.value.problems[0].code == "C15"
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / there).read_text(encoding="utf-8") == "mine"
    assert child.command == [""]


def test_files_that_init_wrote_before_are_no_obstacle(tmp_path: Path, child: Child) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    init.init("ci", tmp_path)
    assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "mine"


def test_an_unknown_preset_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(RLHFError) as caught:
        init.init("dmeo", tmp_path / "run")
    known = ", ".join(init.available())
    assert str(caught.value) == f"error[C07]: no preset 'dmeo'; there are {known}\nhint: did you mean demo?"
    assert not (tmp_path / "run").exists()


class Killed(BaseException):
    """Stands for SIGKILL: what is in the middle of something stays in the middle."""


def steps_of_init(folder: Path, monkeypatch: pytest.MonkeyPatch, kill_at: int | None) -> int:
    """`rlhf init ci`, killed before its change number `kill_at` of the disk; returns how many changes it came to."""
    count = 0

    def counting(real: Any) -> Any:
        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if kill_at is not None and count >= kill_at:
                raise Killed  # also while it cleans up: nothing runs after a SIGKILL
            return real(*args, **kwargs)

        return step

    with monkeypatch.context() as patch:
        for name in ("link", "rename", "mkdir", "rmdir", "unlink"):
            patch.setattr(os, name, counting(getattr(os, name)))
        patch.setattr(Path, "write_text", counting(Path.write_text))
        patch.setattr(jsonl, "write_jsonl", counting(jsonl.write_jsonl))
        patch.setattr(shutil, "rmtree", counting(shutil.rmtree))
        patch.setitem(init.PRESETS, "ci", replace(init.PRESETS["ci"], sizes=Sizes(0, 4, 4, 2)))
        patch.setattr(world, "write_jsonl", jsonl.write_jsonl)
        try:
            init.init("ci", folder, seed=3)
        except Killed:
            assert kill_at is not None
    runs.release()
    return count


@pytest.mark.parametrize("there", [False, True])
def test_a_killed_init_can_be_given_again(there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every step: a folder that was not there is there whole or not at all, and the second command succeeds."""

    def files(folder: Path) -> dict[str, bytes]:
        found = [path for path in folder.rglob("*") if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}

    def prepared(name: str) -> Path:
        if there:
            (tmp_path / name).mkdir()
            (tmp_path / name / "notes.txt").write_text("mine")
        return tmp_path / name

    whole = prepared("whole")
    count = steps_of_init(whole, monkeypatch, None)
    expected = files(whole)
    assert count > 12 and "data/pairs.jsonl" in expected and ".schema/sft.json" in expected
    steps = range(1, count + 1, 3 if there else 1)  # a folder that is there takes some three times as many
    for step in steps:
        folder = prepared(f"killed{step}")
        steps_of_init(folder, monkeypatch, step)
        left = files(folder)
        assert there or left in ({}, expected), step
        assert not there or left["notes.txt"] == b"mine"
        assert steps_of_init(folder, monkeypatch, None) and files(folder) == expected, step
    assert steps_of_init(whole, monkeypatch, None) and files(whole) == expected  # and a finished one
    names = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")}
    assert names == {"whole", *(f"killed{step}" for step in steps)}


def test_what_a_killed_init_placed_is_taken_back_and_what_it_found_there_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes that come from a measurement differ each time: the second command must not meet the first one's files."""
    (tmp_path / "found").write_text("same")
    link, placed = os.link, []

    def killed_later(source: Path, target: Path) -> None:
        if placed:
            raise Killed
        placed.append(target)
        link(source, target)

    monkeypatch.setattr(os, "link", killed_later)
    with pytest.raises(Killed), all_or_nothing(tmp_path) as scratch:
        (scratch / "data").mkdir()
        for name in ("data/new", "found", "later"):
            (scratch / name).write_text("same")
    assert placed == [tmp_path / "data/new"] and placed[0].read_text() == "same"
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == ["found"]
