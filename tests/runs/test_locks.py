"""Locks of folders: they name their process, readers share them, and a folder that is read stays where it is (C15)."""

import json
import os
import time
from pathlib import Path

import pytest
from fake_config import FakeConfig, begin, make_stage, other_process, write_model
from permissions import taken_away
from run_cli import is_one_error, must_succeed, rlhf

from rlhf_cli import runs
from rlhf_cli.errors import RLHFError
from rlhf_cli.runs import locks
from rlhf_cli.runs.locks import lock_folder, lock_owner, lock_path
from tests.runs.test_integrity import opened


def test_a_folder_that_is_read_is_not_moved(tmp_path: Path) -> None:
    folder = make_stage(tmp_path, "sft")
    identity = runs.compute_identity(FakeConfig(tmp_path), {}, {})
    reward = FakeConfig(tmp_path, "reward")
    with other_process("lock_folder_shared", folder) as other:
        # Two readers do not know of one another.
        assert runs.start_stage(reward, identity, opened(folder), fresh=False) == "new"
        locks.release_shared()
        assert runs.start_stage(FakeConfig(tmp_path), identity, {}, fresh=False) == "finished"
        with pytest.raises(RLHFError, match=r"C15.*another process is reading .*sft"):
            runs.start_stage(FakeConfig(tmp_path), identity, {}, fresh=True)
        other.kill()
    assert runs.start_stage(FakeConfig(tmp_path), identity, {}, fresh=True) == "new"
    assert (tmp_path / ".old/sft-1").is_dir()


def test_a_folder_that_is_written_is_not_read(tmp_path: Path) -> None:
    folder = make_stage(tmp_path, "sft")
    parents, reward = opened(folder), FakeConfig(tmp_path, "reward")
    identity = runs.compute_identity(reward, parents, {})
    with other_process("lock_folder", folder) as other:
        with pytest.raises(RLHFError, match=rf"C15.*another process is writing .*sft: process {other.pid}"):
            runs.start_stage(reward, identity, parents, fresh=False)
        other.kill()
    assert runs.start_stage(reward, identity, parents, fresh=False) == "new"
    write_model(reward.folder / "model")
    runs.complete_stage(reward, identity, parents=parents, fields={})
    assert not locks._shared  # a stage that is finished keeps nothing


def test_a_read_only_folder_is_read_without_a_lock(tmp_path: Path) -> None:
    folder = make_stage(tmp_path / "theirs", "sft")
    lock_path(folder).unlink()
    parents, reward = opened(folder), FakeConfig(tmp_path / "mine", "reward")
    identity = runs.compute_identity(reward, parents, {})
    with taken_away(tmp_path / "theirs", mode=0o500):
        assert runs.start_stage(reward, identity, parents, fresh=False) == "new"
    assert not lock_path(folder).exists()


def test_a_lock_names_its_process_as_long_as_it_runs(tmp_path: Path) -> None:
    config, folder, lock = FakeConfig(tmp_path), tmp_path / "sft", lock_path(tmp_path / "sft")
    assert lock_owner(folder) is None
    with other_process("lock_folder", folder) as other:
        before = lock.read_bytes()
        owner = lock_owner(folder)
        assert owner and owner.pid == other.pid and abs(owner.since - time.time()) < 60
        with pytest.raises(RLHFError, match=f"C15.*another process is writing {folder}: process {other.pid}, for "):
            begin(config)
        assert lock.read_bytes() == before  # the refused process does not change it
        lock_path(tmp_path / "copy").write_bytes(before)
        assert lock_owner(tmp_path / "copy") is None  # no process writes the copy
        other.kill()
        deadline = time.monotonic() + 10
        while lock_owner(folder) and time.monotonic() < deadline:  # a zombie until it is waited for
            time.sleep(0.01)
        assert lock_owner(folder) is None and lock.read_bytes() == before
    lock_folder(folder)
    owner = lock_owner(folder)
    assert owner and owner.pid == os.getpid()
    record = json.loads(lock.read_text())
    lock.write_text(json.dumps(record | {"started": 1.0}))  # the process has ended, and its number was reused
    assert lock_owner(folder) is None
    lock.write_text(json.dumps(record | {"host": "elsewhere", "pid": 2**22 + 1}))
    assert str(lock_owner(folder)).startswith("process 4194305 on elsewhere, for ")
    runs.release()
    assert lock.read_bytes() == b"" and lock_owner(folder) is None
    assert begin(config) == "new"
    runs.release()


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_c15_a_lock_that_is_no_file(here: Path, kind: str) -> None:
    must_succeed(rlhf("init", "ci", "run"))
    lock = here / "run/.init.lock"
    if kind == "link":
        lock.symlink_to(here / "mine")
    else:
        lock.mkdir()
    assert is_one_error(rlhf("init", "ci", "run"), "C15", ".init.lock is a link or a folder")
    assert os.path.lexists(lock) and not (here / "mine").exists()
