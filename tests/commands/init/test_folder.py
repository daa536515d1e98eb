"""The files of `rlhf init`: all of them, or none, also after a kill."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli import jsonl, runs
from rlhf_cli.commands.init import presets
from rlhf_cli.commands.init.folder import all_or_nothing, remove_leftovers
from rlhf_cli.demo import world
from rlhf_cli.demo.world import Sizes


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
