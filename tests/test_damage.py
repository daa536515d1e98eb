"""Checkpoints that came to harm: all of it is found, none trained on, and the checkpoint before is used.

`pytest -m damage` does every damage to every file and prints the matrix; a few cells are in every run of the tests.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
from damage_chain import STATE_FILES, Chain
from damages import DAMAGES, OTHER, PROPERTY, SAME, SILENT, Matrix, harm

from rlhf_cli.checkpoints import states

pytestmark = pytest.mark.training

STAGES = ("sft", "reward", "ppo")
FOUND = "found, from step 2"


def files_of(state: Path) -> list[str]:
    return sorted(path.relative_to(state).as_posix() for path in state.rglob("*") if path.is_file())


def cell(chain: Chain, stage: str, run: Path, name: str, how: str) -> str:
    """What a run that was killed after step 4 makes of a damage to one file of its newest checkpoint."""
    newest = chain.killed(stage, run)
    before = min((run / stage / "state").iterdir())
    if not harm(newest / name, how, before / name):
        return SAME
    return chain.verdict(stage, run, newest, (name,), start=f"resuming from {before.name}")


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("stage", STAGES)
def test_a_damage_is_found_and_the_checkpoint_before_is_used(
    chain: Chain, tmp_path: Path, stage: str, how: str
) -> None:
    names = STATE_FILES[stage]
    first = DAMAGES.index(how) + STAGES.index(stage)  # another file for each
    for number in range(len(names)):
        name = names[(first + number) % len(names)]
        if (what := cell(chain, stage, tmp_path / name, name, how)) != SAME:
            break
    assert what == FOUND


def test_the_matrix_can_fail(chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the verification of checkpoints switched off, damages are trained on, and the cells say so."""
    monkeypatch.setattr(states, "_problem", lambda state: None)
    matrix = Matrix("unverified")
    harms = [("model.safetensors", "4 bytes flipped"), ("scheduler.pt", "missing"), ("rng_state.pth", OTHER)]
    for name, how in harms:
        matrix.put(name, how, cell(chain, "sft", tmp_path / name, name, how))
    matrix.put("tensors.safetensors", OTHER, cell(chain, "ppo", tmp_path / "ppo", "tensors.safetensors", OTHER))
    assert len(matrix.silent()) == 4 and all(what == f"{SILENT}, WRONG END" for what in matrix.damages())


def folder_cell(chain: Chain, stage: str, run: Path, how: str) -> str:
    """The same of a damage to the whole checkpoint."""
    newest = chain.killed(stage, run)
    before = min((run / stage / "state").iterdir())
    files = [newest / name for name in files_of(newest)]
    if how in ("missing", OTHER):
        shutil.rmtree(newest)
    if how == OTHER:
        shutil.copytree(before, newest)
    for path in {"empty": files, "half": files[::2]}.get(how, []):
        path.unlink()
    return chain.verdict(stage, run, newest, ("state.json",), start=f"resuming from {before.name}")


@pytest.mark.damage
@pytest.mark.parametrize("stage", STAGES)
def test_every_file_of_a_checkpoint_and_every_damage(
    chain: Chain, tmp_path: Path, stage: str, record_property: Any
) -> None:
    newest = chain.killed(stage, tmp_path / "undamaged")
    assert chain.verdict(stage, tmp_path / "undamaged", newest, (), start="") == f"{SILENT}, right"
    matrix = Matrix(
        f"rlhf {stage}: killed after step 4 of 6, its newest checkpoint damaged",
        "found: M05 names the file, the checkpoint before is used, the end is byte for byte that of the straight run",
    )
    for name in files_of(newest):
        for how in DAMAGES:
            matrix.put(name, how, cell(chain, stage, tmp_path / how / name, name, how))
            shutil.rmtree(tmp_path / how / name)
    for how in ("missing", "empty", "half", OTHER):
        matrix.put("the whole folder", how, folder_cell(chain, stage, tmp_path / how / "folder", how))
    record_property(PROPERTY, matrix.told())
    assert set(matrix.cells) >= {*STATE_FILES[stage]}
    assert not matrix.silent()
    assert set(matrix.damages()) == {FOUND}
