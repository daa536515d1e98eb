"""States to resume from: whole or not there, verified before they are believed."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli import runs, terminal
from rlhf_cli.errors import RLHFError


def put(text: str) -> Any:
    return lambda folder: (folder / "weights").write_text(text)


def test_states_are_kept_newest_first_and_pruned(tmp_path: Path) -> None:
    for step in (5, 10, 15, 100):
        runs.commit_state(tmp_path, f"step_{step:06}", put(f"{step:06}"), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000015", "step_000100"]
    latest = runs.latest_state(tmp_path)
    assert latest == tmp_path / "step_000100"
    assert (latest / "weights").read_text() == "000100"


def test_no_states_are_no_state(tmp_path: Path) -> None:
    assert runs.latest_state(tmp_path / "state") is None
    assert runs.newest_step(tmp_path / "state") is None


def harm(state: Path, how: str) -> None:
    weights = state / "weights"
    content = bytearray(weights.read_bytes())
    content[0] ^= 1
    manifest = (state / "state.json").read_text()
    runs.commit_state(state.parent / "other", "step_000007", put("of step 7"), keep=2)
    {
        "flipped": lambda: weights.write_bytes(content),
        "shorter": lambda: weights.write_bytes(content[:-1]),
        "missing": weights.unlink,
        "no manifest": (state / "state.json").unlink,
        "a word of the manifest": lambda: (state / "state.json").write_text(manifest.replace('"bytes"', '"Bytes"')),
        "a number of the manifest": lambda: (state / "state.json").write_text(
            manifest.replace('"schema": 2', '"schema": 3')
        ),
        "another step's": lambda: shutil.copytree(state.parent / "other/step_000007", state, dirs_exist_ok=True),
        "half a manifest": lambda: (state / "state.json").write_text('{"files": {'),
    }[how]()


HARMS = (
    "flipped",
    "shorter",
    "missing",
    "no manifest",
    "half a manifest",
    "a word of the manifest",
    "a number of the manifest",
    "another step's",
)


@pytest.mark.parametrize("how", HARMS)
def test_a_damaged_state_is_passed_over_with_a_warning(
    tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal.reset()
    for step in (1, 2):
        runs.commit_state(tmp_path, f"step_{step:06}", put(f"state {step}"), keep=2)
    harm(tmp_path / "step_000002", how)
    assert runs.latest_state(tmp_path) == tmp_path / "step_000001"
    said = capsys.readouterr().err
    assert said.startswith("warning[M05]: ")
    assert "step_000002" in said and "resuming from step_000001" in said
    harm(tmp_path / "step_000001", how)
    assert runs.latest_state(tmp_path) is None
    assert "starting from the beginning" in capsys.readouterr().err


def test_a_state_that_cannot_be_written_leaves_the_older_ones_alone(tmp_path: Path) -> None:
    runs.commit_state(tmp_path, "step_000001", put("one"), keep=2)

    def fail(folder: Path) -> None:
        (folder / "weights").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        runs.commit_state(tmp_path, "step_000002", fail, keep=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


def test_states_beyond_the_one_just_written_were_passed_over_and_go(tmp_path: Path) -> None:
    for step in (1, 2, 8):
        runs.commit_state(tmp_path, f"step_{step:06}", put("x"), keep=3)
    harm(tmp_path / "step_000008", "flipped")
    runs.commit_state(tmp_path, "step_000003", put("x"), keep=2)
    assert runs.state_steps(tmp_path) == [2, 3]


def test_only_whole_states_count_as_kept(tmp_path: Path) -> None:
    for step in (10, 20):
        runs.commit_state(tmp_path, f"step_{step:06}", put("x"), keep=2)
    (tmp_path / "step_000025").mkdir()  # killed in the middle of it, by a program that writes in place
    runs.commit_state(tmp_path, "step_000030", put("x"), keep=2)
    assert runs.state_steps(tmp_path) == [20, 30]


def test_a_folder_that_another_program_writes_counts_from_its_seal_on(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        name = f"checkpoint-{step}"
        runs.prepare_state_folder(tmp_path, name)
        (tmp_path / name).mkdir()
        put(str(step))(tmp_path / name)
        assert runs.latest_state(tmp_path) == (tmp_path / f"checkpoint-{step - 10}" if step > 10 else None)
        runs.seal_state(tmp_path / name, keep=2, spare={"checkpoint-10"} if step < 30 else ())
        assert runs.latest_state(tmp_path) == tmp_path / name
    assert runs.state_steps(tmp_path) == [20, 30]
    runs.seal_state(tmp_path / "checkpoint-30", keep=1, spare={"checkpoint-20"})
    assert runs.state_steps(tmp_path) == [20, 30]
    runs.prepare_state_folder(tmp_path, "checkpoint-30")  # it is going to be written once more
    assert runs.latest_state(tmp_path) == tmp_path / "checkpoint-20"


def test_the_same_step_can_be_written_again(tmp_path: Path) -> None:
    for text in ("first", "second"):
        runs.commit_state(tmp_path, "step_000001", put(text), keep=2)
    latest = runs.latest_state(tmp_path)
    assert latest and (latest / "weights").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


def test_what_a_killed_process_left_is_cleared_and_never_a_candidate(tmp_path: Path) -> None:
    for name in (".tmp-step_000009-1", ".trash-step_000001-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text("half")
    assert runs.latest_state(tmp_path) is None
    runs.commit_state(tmp_path, "step_000002", put("two"), keep=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000002"]


@pytest.mark.parametrize("name", ["../step_000001", "a/b", "", ".hidden", "x" * 65])
def test_a_state_name_that_could_leave_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RLHFError, match="S03"):
        runs.commit_state(tmp_path / "state", name, put("x"), keep=2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("moment", ["write", "describe", "rename"])
def test_a_kill_at_any_moment_leaves_a_whole_state(tmp_path: Path, moment: str) -> None:
    """A child process dies inside its second commit: the first state, or the whole second one, is what is found."""
    script = f"""
import os, sys, pathlib
from rlhf_cli.runs import checkpoints as states
folder = pathlib.Path(sys.argv[1])
states.commit_state(folder, "step_000001", lambda path: (path / "weights").write_text("1"), keep=1)
def die(*a, **k): os._exit(137)
write = lambda path: (path / "weights").write_text("2")
if {moment!r} == "write": write = die
if {moment!r} == "describe": states.hash_files = die
def rename(path, to):
    os.rename(path, to)
    if to.is_dir(): die()
if {moment!r} == "rename": pathlib.Path.rename = rename
states.commit_state(folder, "step_000002", write, keep=1)
"""
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False).returncode == 137
    latest = runs.latest_state(tmp_path)
    assert latest and latest.name == ("step_000002" if moment == "rename" else "step_000001")
