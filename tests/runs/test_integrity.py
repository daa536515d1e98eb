"""Parents that change while a stage reads them: it stops (M14)."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ppo_folder
import pytest
from fake_config import FakeConfig, make_stage, write_model
from ppo_folder import rlhf

from rlhf_cli import runs
from rlhf_cli.errors import RLHFError
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
