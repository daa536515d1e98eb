"""Parents that change or move while a stage reads them: it stops (M14), or they stay where they are (C15).

Modules: `runs/integrity.py`.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ppo_folder
import pytest
from fake_config import FakeConfig, make_stage, other_process, write_model
from permissions import taken_away
from ppo_folder import rlhf

from rlhf_cli import runs
from rlhf_cli.errors import RLHFError
from rlhf_cli.runs import locks
from rlhf_cli.runs.locks import lock_path
from rlhf_cli.runs.stage_folder import detect_moved_folder
from rlhf_cli.stages.common import model_loading

WEIGHTS = "model.safetensors"


def opened(folder: Path, *, hashed: bool = True) -> dict[str, runs.Parent]:
    parent = runs.open_parent(str(folder), expect=("sft",), key="model.path", where="w", hashed=hashed)
    return {"model.path": parent}


def swap(file: Path) -> None:
    """Replace a file by another one of the same size and date, as `mv` does."""
    other, old = file.with_suffix(".new"), file.stat()
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    other.write_bytes(raw)
    os.utime(other, ns=(old.st_atime_ns, old.st_mtime_ns))
    other.rename(file)


def in_its_place(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)


@pytest.fixture(params=["foreign", "stage"])
def parent(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A parent's folder, and that of its model: foreign, or of a stage."""
    if request.param == "stage":
        folder = make_stage(tmp_path / "before", "sft")
        return folder, folder / "model"
    write_model(tmp_path / "base")
    return tmp_path / "base", tmp_path / "base"


@pytest.mark.parametrize("change", [swap, in_its_place, lambda file: file.with_name("tokenizer.json").write_text("{}")])
def test_m14_a_change_after_hashing(change: Callable[[Path], Any], parent: tuple[Path, Path]) -> None:
    parents = opened(parent[0])
    runs.require_unchanged(parents)
    change(parent[1] / WEIGHTS)
    with pytest.raises(RLHFError, match=r"error\[M14\]: model.path: .* changed while it was read \(") as caught:
        runs.require_unchanged(parents)
    assert caught.value.exit_code == 1


def test_other_dates_and_a_deleted_folder_are_no_change(parent: tuple[Path, Path]) -> None:
    """A copy over itself, and a cache that was cleared after all was read."""
    parents = opened(parent[0])
    (parent[1] / "notes.json").write_text("{}")  # all was loaded before
    runs.require_unchanged(parents, loaded=True)
    (parent[1] / "notes.json").unlink()
    for path in parent[1].iterdir():
        os.utime(path, (1, 1))
    runs.require_unchanged(parents)
    shutil.rmtree(parent[0])
    runs.require_unchanged(parents)


def test_m14_nothing_is_finished_on_a_parent_that_changed(tmp_path: Path) -> None:
    write_model(tmp_path / "base")
    parents, config = opened(tmp_path / "base"), FakeConfig(tmp_path / "run")
    identity = runs.compute_identity(config, parents, {})
    runs.start_stage(config, identity, parents, fresh=False)
    write_model(config.folder / "model")
    swap(tmp_path / "base" / WEIGHTS)
    with pytest.raises(RLHFError, match="M14"):
        runs.complete_stage(config, identity, parents=parents, fields={})
    assert not (config.folder / "manifest.json").exists()


def swapped_before_loading(patch: pytest.MonkeyPatch, file: Path) -> None:
    """Replace a parent's weights after they were hashed and before the first model is loaded."""
    load, swapped = model_loading.load_tokenizer, []

    def later(*arguments: Any) -> Any:
        if not swapped:
            swapped.append(swap(file))
        return load(*arguments)

    patch.setattr(model_loading, "load_tokenizer", later)


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_m14_in_a_stage_before_it_trains(stage: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swapped_before_loading(monkeypatch, folder / "model" / WEIGHTS)
    refused(rlhf(stage, "--config", f"{stage}.yaml"), "model.path")
    assert not (folder / stage / "manifest.json").exists() and not (folder / stage / "metrics.jsonl").exists()
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    assert "error" not in rlhf(stage, "--config", f"{stage}.yaml", "--dry-run").stderr


@pytest.mark.parametrize("name", ["sft_model", "reward_model"])
def test_m14_in_ppo(name: str, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swapped_before_loading(monkeypatch, run_folder / name / WEIGHTS)
    key = {"sft_model": "models.sft", "reward_model": "models.reward"}[name]
    refused(rlhf("ppo", "--config", run_folder / "ppo.yaml"), key)
    assert not (run_folder / "ppo/metrics.jsonl").exists()


@pytest.mark.full
def test_m14_in_an_evaluation(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ppo_folder.as_stage(run_folder, "ppo", run_folder / "sft_model", ppo_folder.PPO)
    swapped_before_loading(monkeypatch, run_folder / "reward_model" / WEIGHTS)
    refused(rlhf("eval", "--config", run_folder / "eval.yaml", "-s", "eval.best_of=[]"), "models.reward")
    assert not (run_folder / "eval/report.json").exists()


def refused(result: Any, key: str) -> None:
    errors = [line for line in result.stderr.splitlines() if line.startswith("error[")]
    assert len(errors) == 1 and errors[0].startswith(f"error[M14]: {key}: "), result.stderr
    assert result.exit_code == 1


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


def test_e08_a_run_that_is_deleted_while_it_is_written(tmp_path: Path) -> None:
    config = FakeConfig(tmp_path)
    runs.start_stage(config, runs.compute_identity(config, {}, {}), {}, fresh=False)
    with pytest.raises(RLHFError, match=r"E08.*sft was moved or deleted while"), detect_moved_folder(config.folder):
        shutil.rmtree(config.folder)
        (config.folder / "metrics.jsonl").open("a")
    runs.release()
    with pytest.raises(FileNotFoundError), detect_moved_folder(config.folder):  # a folder that was never this process's
        (config.folder / "metrics.jsonl").open("a")


def test_old_with_other_names_and_old_that_is_a_file(tmp_path: Path) -> None:
    config = FakeConfig(tmp_path)
    identity = runs.compute_identity(config, {}, {})
    make_stage(tmp_path, "sft")
    for name in ("sft-backup2", "sft-2b", "sft-٣", "sft-7", "sft-"):
        (tmp_path / ".old" / name).mkdir(parents=True)
    runs.start_stage(config, identity, {}, fresh=True)
    assert (tmp_path / ".old/sft-8/manifest.json").is_file()
    shutil.rmtree(tmp_path / ".old")
    (tmp_path / ".old").write_text("mine")
    with pytest.raises(RLHFError, match=r"C15.*\.old is a file"):
        runs.start_stage(config, identity, {}, fresh=True)
    assert (tmp_path / ".old").read_text() == "mine" and (tmp_path / "sft/identity.json").is_file()


def test_s03_a_run_whose_name_is_too_long(folder: Path) -> None:
    for name in ("r" * 300, "é" * 130, "/".join(["deep"] * 800)):
        for command in (["check", "sft.yaml"], ["sft", "--config", "sft.yaml"]):
            result = rlhf(*command, "-s", f"run={name}")
            assert result.exit_code == 2 and result.stderr.startswith("error[S03]: --set run: "), result.output
    assert rlhf("check", "sft.yaml", "-s", f"run={'r' * 255}").exit_code == 0
