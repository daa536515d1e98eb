"""Checkpoints that came to harm: all of it is found, none trained on, and the checkpoint before is used.

`pytest -m damage` does every damage to every file and prints the matrix; a few cells are in every run of the tests.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
from damage_chain import FOUND, STATE_FILES, Chain, refusal, reported_damage, rlhf
from damages import ALONE, DAMAGES, OTHER, OTHER_RUN, PROPERTY, SAME, SILENT, Matrix, harm
from ppo_folder import untimed

from rlhf_cli.runs import checkpoints

pytestmark = pytest.mark.training

EARLIER = "as if stopped before"
STAGES = ("sft", "reward", "ppo")


def files_of(state: Path) -> list[str]:
    return sorted(path.relative_to(state).as_posix() for path in state.rglob("*") if path.is_file())


def cell(chain: Chain, stage: str, run: Path, name: str, how: str) -> str:
    """What a run that was killed after step 4 makes of a damage to one file of its newest checkpoint."""
    newest = chain.killed(stage, run)
    before = min((run / stage / "state").iterdir())
    if not harm(newest / name, how, before / name):
        return SAME
    return chain.verdict(stage, run, newest, name, before=before)


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
    monkeypatch.setattr(checkpoints, "_problem", lambda state, content=True: None)
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
    if how == "missing":  # no damage that could be told, the run was stopped earlier
        result = rlhf(stage, run)
        stopped = result.exit_code == 0 and "resumes at step 2 " in result.stderr and chain.ends_alike(stage, run)
        return EARLIER if stopped else f"{SILENT}, WRONG END"
    return chain.verdict(stage, run, newest, "", before=before)


@pytest.mark.damage
@pytest.mark.parametrize("stage", STAGES)
def test_every_file_of_a_checkpoint_and_every_damage(
    chain: Chain, tmp_path: Path, stage: str, record_property: Any
) -> None:
    newest = chain.killed(stage, tmp_path / "undamaged")
    assert chain.verdict(stage, tmp_path / "undamaged", newest, "", before=None) == f"{SILENT}, right"
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
    record_property(PROPERTY, matrix.as_json())
    assert set(matrix.cells) >= {*STATE_FILES[stage]}
    assert not matrix.silent()
    assert set(matrix.damages()) == {FOUND, EARLIER}


LOGS = {"sft": ["metrics.jsonl"], "reward": ["metrics.jsonl"], "ppo": ["metrics.jsonl", "samples.jsonl"]}
LINES = {"a line removed": lambda lines: lines[1:], "last line cut": lambda lines: [*lines[:-1], lines[-1][:-9]]}
REPORTED = "reported"


def log_cell(chain: Chain, stage: str, run: Path, name: str, how: str) -> str:
    """What a resumed run makes of a damage to its log, which has lines of steps after the checkpoint too."""
    chain.killed(stage, run)
    path = run / stage / name
    if how in LINES:
        path.write_bytes(b"".join(LINES[how](path.read_bytes().splitlines(keepends=True))))
    else:
        harm(path, how, path)
    result = rlhf(stage, run)
    if result.exit_code:
        return refusal(result)
    if chain.ends_alike(stage, run):
        return "made again"
    whole, left = (untimed(folder / stage / name) for folder in (chain.folder, run))
    if not chain.ends_alike(stage, run, logs=False) or left[-1] != whole[-1]:
        return f"{SILENT}, WRONG END"
    return REPORTED if any(name in line for line in reported_damage(result)) else f"{SILENT}, log only"


def start_cell(chain: Chain, other: Chain, stage: str, run: Path, name: str, how: str) -> str:
    """What a run makes of a damage to what it wrote at its very start."""
    chain.killed(stage, run)
    if not harm(run / stage / name, how, other.folder / stage / name):
        return SAME
    result = rlhf(stage, run)
    if result.exit_code:
        return refusal(result)
    return "written again" if chain.ends_alike(stage, run) else f"{SILENT}, WRONG END"


def both_cell(chain: Chain, stage: str, run: Path, how: str) -> str:
    """What becomes of a run whose checkpoints are all damaged."""
    newest = chain.killed(stage, run)
    name = {"ppo": "tensors.safetensors"}.get(stage, "model.safetensors")
    for state in (run / stage / "state").iterdir():
        harm(state / name, how, chain.folder / stage / "state" / newest.name.replace("4", "6") / name)
    return chain.verdict(stage, run, newest, name, before=None)


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_not_a_checkpoint(chain: Chain, tmp_path: Path, stage: str) -> None:
    for name in LOGS[stage]:
        assert log_cell(chain, stage, tmp_path / name, name, "a line removed") == REPORTED
    assert start_cell(chain, chain, stage, tmp_path / "identity", "identity.json", "half") == "refused, C15"
    assert both_cell(chain, stage, tmp_path / "both", "4 bytes flipped") == FOUND


@pytest.mark.damage
@pytest.mark.parametrize("stage", STAGES)
def test_what_is_not_a_checkpoint_and_every_damage(
    chain: Chain, other_chain: Chain, tmp_path: Path, stage: str, record_property: Any
) -> None:
    matrix = Matrix(
        f"rlhf {stage}: the rest of the same run, damaged",
        "reported: M05 names the log, whose steps from the checkpoint on are made again, and the model is that of the "
        "straight run; found: both checkpoints are named, the run starts over and ends in the same bytes",
    )
    for name in LOGS[stage]:
        for how in (*ALONE, *LINES):
            matrix.put(name, how, log_cell(chain, stage, tmp_path / how / name, name, how))
    for name in ("identity.json", "config.yaml"):
        for how in (*ALONE, OTHER_RUN):
            matrix.put(name, how, start_cell(chain, other_chain, stage, tmp_path / how / name, name, how))
    for how in DAMAGES:
        matrix.put("both checkpoints", how, both_cell(chain, stage, tmp_path / how / "both", how))
    record_property(PROPERTY, matrix.as_json())
    assert not matrix.silent()
    assert set(matrix.damages()) <= {REPORTED, FOUND, "made again", "written again", "refused, C15"}
    assert matrix.cells["identity.json"][OTHER_RUN] == "refused, C15"
    assert set(matrix.cells["both checkpoints"].values()) == {FOUND}
