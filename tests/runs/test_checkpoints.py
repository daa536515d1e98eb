"""Checkpoints to resume from: complete or ignored, and used only after their hashes were checked."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from run_cli import python

from rlhf_cli import runs
from rlhf_cli.errors import RLHFError


def put(text: str) -> Any:
    return lambda folder: (folder / "weights").write_text(text)


def commit(folder: Path, *steps: int, keep: int | None = 2, text: str = "") -> None:
    for step in steps:
        runs.commit_state(folder, f"step_{step:06}", put(text or f"state {step}"), keep=keep)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    assert runs.latest_state(tmp_path / "state") is None and runs.newest_step(tmp_path / "state") is None
    commit(tmp_path, 5, 10, 15, 100)
    assert names(tmp_path) == ["step_000015", "step_000100"]
    assert runs.latest_state(tmp_path) == tmp_path / "step_000100"
    assert (tmp_path / "step_000100/weights").read_text() == "state 100"
    commit(tmp_path, 100, text="the same step again")
    assert (tmp_path / "step_000100/weights").read_text() == "the same step again"
    assert names(tmp_path) == ["step_000015", "step_000100"]


def edit(name: str, old: bytes, new: bytes) -> Any:
    def damage(state: Path) -> None:
        content = (state / name).read_bytes()
        assert old in content
        (state / name).write_bytes(content.replace(old, new))

    return damage


def another_steps(state: Path) -> None:
    commit(state.parent / "other", 7)
    shutil.copytree(state.parent / "other/step_000007", state, dirs_exist_ok=True)


DAMAGES = {
    "flipped": edit("weights", b"state", b"State"),
    "shorter": edit("weights", b"state", b"stat"),
    "missing": lambda state: (state / "weights").unlink(),
    "no manifest": lambda state: (state / "state.json").unlink(),
    "half a manifest": lambda state: (state / "state.json").write_text('{"files": {'),
    "a word of the manifest": edit("state.json", b'"bytes"', b'"Bytes"'),
    "a number of the manifest": edit("state.json", b'"schema": 2', b'"schema": 3'),
    "another step's": another_steps,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_with_a_warning(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    commit(tmp_path, 1, 2)
    DAMAGES[damage](tmp_path / "step_000002")
    assert runs.latest_state(tmp_path) == tmp_path / "step_000001"
    error = capsys.readouterr().err
    assert error.startswith("warning[M05]: ")
    assert "step_000002" in error and "resuming from step_000001" in error
    DAMAGES[damage](tmp_path / "step_000001")
    assert runs.latest_state(tmp_path) is None
    assert "starting from the beginning" in capsys.readouterr().err


def test_a_checkpoint_that_cannot_be_written_leaves_the_older_ones_unchanged(tmp_path: Path) -> None:
    commit(tmp_path, 1)

    def fail(folder: Path) -> None:
        (folder / "weights").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        runs.commit_state(tmp_path, "step_000002", fail, keep=2)
    assert names(tmp_path) == ["step_000001"]


def test_later_damaged_and_unfinished_checkpoints_are_deleted(tmp_path: Path) -> None:
    """The run has resumed before them, so only complete ones up to the one just written count."""
    commit(tmp_path, 1, 2, 8, keep=3)
    DAMAGES["flipped"](tmp_path / "step_000008")
    (tmp_path / "step_000002.5").mkdir()
    (tmp_path / "checkpoint-2").mkdir()  # a program that writes in place was killed
    for name in (".tmp-step_000009-1", ".trash-step_000011-1"):
        shutil.copytree(tmp_path / "step_000002", tmp_path / name)
    assert runs.latest_state(tmp_path) == tmp_path / "step_000002"
    commit(tmp_path, 3)
    assert names(tmp_path) == ["step_000002", "step_000002.5", "step_000003"]


def test_a_checkpoint_of_another_program_counts_once_it_is_sealed(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        name = f"checkpoint-{step}"
        runs.begin_state(tmp_path, name)
        put(str(step))(tmp_path / name)
        assert runs.latest_state(tmp_path) == (tmp_path / f"checkpoint-{step - 10}" if step > 10 else None)
        runs.seal_state(tmp_path / name, keep=2, spare={"checkpoint-10"} if step < 30 else ())
        assert runs.latest_state(tmp_path) == tmp_path / name
    assert runs.state_steps(tmp_path) == [20, 30]
    runs.seal_state(tmp_path / "checkpoint-30", keep=1, spare={"checkpoint-20"})
    assert runs.state_steps(tmp_path) == [20, 30]
    runs.begin_state(tmp_path, "checkpoint-30")  # it is written again
    assert runs.latest_state(tmp_path) == tmp_path / "checkpoint-20"


@pytest.mark.parametrize("name", ["../step_000001", "a/b", "", ".hidden", "x" * 65])
def test_a_state_name_that_could_leave_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RLHFError, match="S03"):
        runs.commit_state(tmp_path / "state", name, put("x"), keep=2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("moment", ["write", "describe", "rename"])
def test_a_kill_at_any_moment_leaves_a_complete_checkpoint(tmp_path: Path, moment: str) -> None:
    """A child process dies in its second commit: the first checkpoint, or the complete second one, is found."""
    script = f"""
import os, sys, pathlib
from rlhf_cli.runs import checkpoints as states
folder = pathlib.Path(sys.argv[1])
states.commit_state(folder, "step_000001", lambda path: (path / "weights").write_text("1"), keep=1)
def die(*a, **k): os._exit(137)
write = lambda path: (path / "weights").write_text("2")
if {moment!r} == "write": write = die
if {moment!r} == "describe": states.files.hash_files = die
def rename(path, to):
    os.rename(path, to)
    if to.is_dir(): die()
if {moment!r} == "rename": pathlib.Path.rename = rename
states.commit_state(folder, "step_000002", write, keep=1)
"""
    assert python("-c", script, tmp_path).returncode == 137
    latest = runs.latest_state(tmp_path)
    assert latest and latest.name == ("step_000002" if moment == "rename" else "step_000001")
