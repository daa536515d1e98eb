"""Links in a run that lead elsewhere: what lies there is neither deleted nor changed, unless this run wrote it."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import ppo_folder
import pytest
from bad_inputs import replace
from fake_config import FakeConfig, begin, make_stage
from ppo_folder import ppo, stop_in_update
from run_cli import fails, forked, is_one_error, must_succeed, rlhf
from typer.testing import Result

from rlhf_cli import runs
from rlhf_cli.errors import RLHFError
from rlhf_cli.files import read_checked_json, write_checked_json, write_json
from rlhf_cli.runs.checkpoints import OWNER


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def move_to_scratch(folder: Path) -> Path:
    """Move a folder of a run to another place, which others use too, and link it."""
    scratch = folder.parents[1] / "scratch" / folder.name
    scratch.parent.mkdir(exist_ok=True)
    folder.rename(scratch)
    folder.symlink_to(scratch)
    return scratch


def put_strangers(scratch: Path, own: Path, prefix: str) -> dict[str, bytes]:
    """Add what others may have there: checkpoints, a valid one of another run too, half written ones, and files."""
    valid = scratch / f"{prefix}900"
    shutil.copytree(own, valid)
    (valid / OWNER).write_text("0123456789abcdef\n")
    if own.parent.name == "state":
        manifest, problem = read_checked_json(valid / "state.json")
        assert not problem
        write_checked_json(valid / "state.json", {**manifest, "name": valid.name})
    for name in (f"{prefix}1000/pytorch_model.bin", f".tmp-{prefix}1000-1/half", ".trash-x-1/rest", "notes.txt"):
        (scratch / name).parent.mkdir(exist_ok=True)
        (scratch / name).write_text(f"years of work: {name}")
    strangers = (f"{prefix}900", f"{prefix}1000", ".tmp-", ".trash-", "notes")
    return {name: content for name, content in contents(scratch).items() if name.startswith(strangers)}


def checkpoints(scratch: Path) -> set[str]:
    return {path.name for path in scratch.iterdir() if not path.name.startswith(".") and path.is_dir()}


# Checkpoints


def killed(stage: str) -> Path:
    """Kill a stage of 8 steps at the seal of step 6's checkpoint; return its folder of checkpoints: 2, 4 and half of 6.

    An unfinished checkpoint of this run is replaced, and deleted if it is a later one.
    """
    replace(f"{stage}.yaml", "max_steps: 1", "max_steps: 8")
    with Path(f"{stage}.yaml").open("a") as file:
        file.write("output: {save_steps: 2, keep: 2}\nrun: run\n")
    seal = runs.seal_state

    def die(state: Path, **options: Any) -> None:
        if state.name == "checkpoint-6":
            os._exit(137)
        seal(state, **options)

    assert forked(stage, "-c", f"{stage}.yaml", before=lambda: setattr(runs, "seal_state", die)).returncode == 137
    return Path("run").absolute() / stage / "state"


@pytest.mark.full
@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_strangers_checkpoints_behind_a_linked_state_stay(folder: Path, stage: str) -> None:
    """Through resume, prune and --fresh; the run ends as one without a link, and its own checkpoints are pruned."""
    state = killed(stage)
    shutil.copytree("run", "plain")
    must_succeed(rlhf(stage, "-c", f"{stage}.yaml", "-s", "run=plain"), "resumes at step 4 of 8")
    straight = json.loads(Path("plain", stage, "manifest.json").read_text())

    scratch = move_to_scratch(state)
    strangers = put_strangers(scratch, scratch / "checkpoint-2", "checkpoint-")
    must_succeed(rlhf(stage, "-c", f"{stage}.yaml"), "resumes at step 4 of 8")
    after = contents(scratch)
    assert {name: after.get(name) for name in strangers} == strangers
    assert checkpoints(scratch) == {"checkpoint-6", "checkpoint-8", "checkpoint-900", "checkpoint-1000"}
    assert json.loads(Path("run", stage, "manifest.json").read_text())["model_sha256"] == straight["model_sha256"]

    must_succeed(rlhf(stage, "-c", f"{stage}.yaml", "--fresh"))
    assert contents(scratch) == after and Path(f"run/.old/{stage}-1/state").is_symlink()
    assert checkpoints(state) == {"checkpoint-6", "checkpoint-8"} and not state.is_symlink()


@pytest.mark.full
def test_a_stage_with_nothing_but_a_linked_state_starts_over(folder: Path) -> None:
    """Its status is new, as after a user has deleted the rest: the logs of the first steps are gone."""
    state = killed("sft")
    scratch = move_to_scratch(state)
    shutil.rmtree(state.parent)
    state.parent.mkdir()
    state.symlink_to(scratch)
    assert "resumes" not in must_succeed(rlhf("sft", "-c", "sft.yaml")).output
    assert checkpoints(scratch) == {"checkpoint-6", "checkpoint-8"}


@pytest.mark.full
def test_a_name_that_a_stranger_has_stops_the_run_before_it_trains(folder: Path) -> None:
    scratch = move_to_scratch(killed("sft"))
    (scratch / "checkpoint-4" / OWNER).write_text("0123456789abcdef\n")
    before = contents(scratch)
    assert is_one_error_of(rlhf("sft", "-c", "sft.yaml"), "C15", "checkpoint-4 is not of this run")
    assert contents(scratch) == before
    shutil.rmtree(scratch)
    assert is_one_error_of(rlhf("sft", "-c", "sft.yaml"), "C15", "state is a link to nothing")
    assert not scratch.exists()


@pytest.mark.full
def test_strangers_behind_links_of_a_ppo_run_stay(run_folder: Path) -> None:
    """Checkpoints and snapshots; also those of another run of rlhf, from which it must not resume."""
    ppo_folder.write(run_folder, "ppo", {**ppo_folder.PPO, "output": {"save_steps": 1, "snapshots": 2, "keep": 2}})
    stop_in_update(run_folder, 2)
    shutil.copytree(run_folder / "ppo", run_folder / "stopped")
    must_succeed(ppo(run_folder))
    straight, own = ppo_folder.weights(run_folder), checkpoints(run_folder / "ppo/snapshots")
    shutil.rmtree(run_folder / "ppo")
    (run_folder / "stopped").rename(run_folder / "ppo")

    folders = [move_to_scratch(run_folder / "ppo" / name) for name in ("state", "snapshots")]
    strangers = [put_strangers(scratch, next(scratch.glob("step_*")), "step_000") for scratch in folders]
    must_succeed(ppo(run_folder), "resumes at step 2 of 4")
    assert ppo_folder.weights(run_folder) == straight
    after = [contents(scratch) for scratch in folders]
    for found, kept in zip(after, strangers, strict=True):
        assert {name: found.get(name) for name in kept} == kept
    others = {"step_000900", "step_0001000"}
    assert checkpoints(folders[0]) == {"step_000003", "step_000004"} | others
    assert checkpoints(folders[1]) == own | others
    must_succeed(ppo(run_folder, "--fresh"))
    assert [contents(scratch) for scratch in folders] == after


def test_a_run_that_an_older_version_began_keeps_what_has_no_manifest(tmp_path: Path) -> None:
    """It wrote no ids. In its own folders everything is its own, as ever; what has another's id is another's."""
    state = tmp_path / "run/ppo/state"
    state.mkdir(parents=True)
    write_json(state.parent / "identity.json", {"stage": "ppo"})
    scratch = move_to_scratch(state)
    for name in ("step_000001", "step_000900", "checkpoint-7", ".tmp-step_000001-9"):
        (scratch / name).mkdir()
        (scratch / name / "weights").write_text("mine")
    other = tmp_path / "other/ppo/state"
    other.mkdir(parents=True)
    write_json(other.parent / "identity.json", {"stage": "ppo", "run_id": "0123456789abcdef"})
    runs.commit_state(other, "step_000009", lambda path: (path / "w").touch(), keep=2)
    shutil.move(other / "step_000009", scratch)
    for step in (2, 3, 4):
        runs.commit_state(state, f"step_{step:06d}", lambda path: (path / "w").touch(), keep=2)
    assert runs.state_steps(state) == [3, 4] and (scratch / "step_000009/w").is_file()
    assert runs.latest_state(state) == state / "step_000004"
    with pytest.raises(RLHFError, match=r"C15.*step_000001 is not of this run"):
        runs.commit_state(state, "step_000001", lambda path: (path / "w").touch(), keep=2)
    mine = {path.name for path in scratch.iterdir() if (path / "weights").is_file()}
    assert mine == {"step_000001", "step_000900", "checkpoint-7", ".tmp-step_000001-9"}


def test_a_copy_without_hidden_files_keeps_its_checkpoints(tmp_path: Path) -> None:
    """Sync tools leave them out. In the run itself only another's id is another's."""
    state = tmp_path / "run/ppo/state"
    state.mkdir(parents=True)
    write_json(state.parent / "identity.json", {"stage": "ppo", "run_id": "0123456789abcdef"})
    for step in (1, 2):
        runs.commit_state(state, f"step_{step:06d}", lambda path: (path / "w").touch(), keep=2)
    (state / "step_000001" / OWNER).unlink()
    (state / "step_000002" / OWNER).write_text("fedcba9876543210")
    assert runs.state_steps(state) == [1]


def test_leftovers_of_another_run_behind_a_link_two_levels_up_stay(tmp_path: Path) -> None:
    """RUN/ppo/engine/policy, of which engine is a link."""
    engine = tmp_path / "shared"
    engine.mkdir()
    ids = {"one": "1" * 16, "two": "2" * 16}
    for run in ids:
        (tmp_path / run / "ppo").mkdir(parents=True)
        write_json(tmp_path / run / "ppo/identity.json", {"run_id": ids[run]})
        (tmp_path / run / "ppo/engine").symlink_to(engine)
    half_written = engine / f"policy/.tmp-{ids['one']}-step_000001-7"
    half_written.mkdir(parents=True)
    runs.commit_state(tmp_path / "two/ppo/engine/policy", "step_000001", lambda path: (path / "w").touch(), keep=1)
    assert half_written.is_dir()


@pytest.mark.parametrize("linked", ["state", "."])
def test_a_relative_link_of_an_old_output_leads_to_the_same_place(here: Path, linked: str) -> None:
    folder = make_stage(here, "sft")
    (folder / "state").mkdir(exist_ok=True)
    path = folder if linked == "." else folder / "state"
    scratch = here / "elsewhere" / path.name
    scratch.parent.mkdir()
    path.rename(scratch)
    path.symlink_to(os.path.relpath(scratch, path.parent))
    begin(FakeConfig(here), fresh=True)
    moved = here / ".old/sft-1"
    assert (moved if linked == "." else moved / "state").resolve() == scratch


def test_links_made_before_the_first_start_are_used(here: Path) -> None:
    (here / "scratch").mkdir()
    (here / "sft").mkdir()
    (here / "sft/state").symlink_to(here / "scratch")
    assert begin(FakeConfig(here)) == "new"
    runs.commit_state(here / "sft/state", "step_000001", lambda path: (path / "w").touch(), keep=1)
    assert (here / "scratch/step_000001/w").is_file()


# Logs


def is_one_error_of(result: Result, code: str, *texts: str) -> bool:
    """Return True for a command that ended with one error, whatever it said before."""
    fails(result, code, *texts)
    return result.stderr.count("error[") == 1 and "R00" not in result.output


@pytest.mark.full
@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "watchdog.jsonl"])
def test_s03_a_log_that_leads_out_of_its_folder_is_not_changed(run_folder: Path, name: str) -> None:
    stop_in_update(run_folder, 2)
    log, target = run_folder / "ppo" / name, run_folder / f"mine-{name}"
    content = log.read_bytes() if log.exists() else b""
    target.write_bytes(content + b'{"step": 3, "mine": 1}\n')
    log.unlink(missing_ok=True)
    log.symlink_to(target)
    before = target.read_bytes()
    assert is_one_error_of(ppo(run_folder), "S03", f"{name} is a link to {target}")
    assert target.read_bytes() == before
    log.unlink()
    shutil.copy(target, log)
    must_succeed(ppo(run_folder), "resumes at step 2")


@pytest.mark.full
def test_an_evaluation_replaces_links_and_not_what_they_lead_to(trained_folder: Path) -> None:
    ppo_folder.evaluate(trained_folder)
    (trained_folder / "eval/manifest.json").unlink()  # as if killed
    for name in ("samples.jsonl", "report.json"):
        (trained_folder / f"mine-{name}").write_text("mine")
        (trained_folder / "eval" / name).unlink()
        (trained_folder / "eval" / name).symlink_to(trained_folder / f"mine-{name}")
    ppo_folder.evaluate(trained_folder)
    for name in ("samples.jsonl", "report.json"):
        assert (trained_folder / f"mine-{name}").read_text() == "mine"
        assert not (trained_folder / "eval" / name).is_symlink()


# The old output


@pytest.mark.parametrize("kind", ["a file", "a link to a file", "a link to nothing", "another disk"])
def test_c15_old_output_that_cannot_be_moved_stays(here: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    folder, old = make_stage(here, "sft"), here / ".old"
    before = contents(folder)
    if kind == "a file":
        old.write_text("mine")
    elif kind == "another disk":
        old.mkdir()
        real = os.rename

        def rename(path: Any, to: Any, *more: Any, **options: Any) -> None:
            if Path(path) == folder:
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(path))
            real(path, to, *more, **options)

        monkeypatch.setattr(os, "rename", rename)
    else:
        target = here / "elsewhere"
        old.symlink_to(target)
        if kind == "a link to a file":
            target.write_text("mine")
    with pytest.raises(RLHFError, match=r"error\[C15\]: \.?"):
        begin(FakeConfig(here), fresh=True)
    assert contents(folder) == before


@pytest.mark.parametrize("name", ["eval-backup2", "sft-1", "sft-", "sft-9999999999999", "sft-²"])
def test_a_linked_old_folder_and_names_of_the_user_in_it(here: Path, name: str) -> None:
    make_stage(here, "sft")
    (here / "elsewhere" / name).mkdir(parents=True)
    (here / "elsewhere" / name / "notes").write_text("mine")
    (here / ".old").symlink_to(here / "elsewhere")
    assert begin(FakeConfig(here), fresh=True) == "new"
    assert (here / "elsewhere" / name / "notes").read_text() == "mine"
    moved = "sft-2" if name == "sft-1" else "sft-1"
    assert (here / "elsewhere" / moved / "manifest.json").is_file()


# `rlhf init`


@pytest.mark.full
@pytest.mark.parametrize("target", [".", "..", "data", "nothing"])
@pytest.mark.parametrize("name", [".tmp-init", ".tmp-init-placed"])
def test_c15_init_deletes_nothing_through_a_link(here: Path, name: str, target: str) -> None:
    """A link to the folder itself made all its files look like those of a killed `rlhf init`."""
    must_succeed(rlhf("init", "ci", "run"))
    (here / "run" / name).symlink_to(target)
    before = contents(here)
    assert is_one_error(rlhf("init", "ci", "run"), "C15", f"{name} was not made by rlhf")
    assert contents(here) == before and (here / "run" / name).is_symlink()
