"""Finished stages that came to harm: who reads them refuses, and the stage itself does not call itself finished."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from damage_chain import Chain, refusal, rlhf
from damages import ALONE, OTHER_RUN, PROPERTY, SAME, SILENT, Matrix, harm

from rlhf_cli.files import MODEL_CARDS

pytestmark = pytest.mark.training

READER = {"sft": "reward", "reward": "ppo", "ppo": "eval"}
AGAIN, FINISHED = "made again", "finished already"


def cell(chain: Chain, other: Chain, stage: str, run: Path, name: str, how: str) -> str:
    """What the next stage says of a damaged finished one, and what the stage itself says."""
    folder = chain.finished(stage, run)
    if not harm(folder / name, how, other.folder / stage / name):
        return SAME
    reader = READER[stage]
    text = (chain.folder / f"{reader}.yaml").read_text()
    (run / f"{reader}.yaml").write_text(text.replace(f"{chain.folder / stage}\n", f"{folder}\n"))
    read = "not read" if name.startswith("value/") else _said(rlhf(reader, run))
    itself = _said(rlhf(stage, run))
    if itself == AGAIN and not chain.ends_alike(stage, run):
        itself = f"{SILENT}, WRONG END"
    unseen = f"{SILENT}: " if read == AGAIN or itself == FINISHED else ""
    return f"{unseen}{read} / {itself}"


def _said(result: Any) -> str:
    if result.exit_code:
        return refusal(result).removeprefix("refused, ")
    return FINISHED if FINISHED in result.stderr else AGAIN


@pytest.mark.parametrize(("stage", "part"), [*((stage, "model") for stage in READER), ("ppo", "value")])
def test_a_bit_of_the_weights_is_missed(chain: Chain, tmp_path: Path, stage: str, part: str) -> None:
    what = cell(chain, chain, stage, tmp_path / "weights", f"{part}/model.safetensors", "4 bytes flipped")
    assert what == ("not read / M05" if part == "value" else "M10 / M05")
    assert cell(chain, chain, stage, tmp_path / "manifest", "manifest.json", "4 bytes flipped") == "M10 / M05"


@pytest.mark.damage
@pytest.mark.parametrize("stage", READER)
def test_every_file_of_a_finished_stage_and_every_damage(
    chain: Chain, other_chain: Chain, tmp_path: Path, stage: str, record_property: Any
) -> None:
    matrix = Matrix(
        f"rlhf {stage}, finished: what rlhf {READER[stage]} says of it / what rlhf {stage} says",
        "M10: will not load it; M05: says it is damaged, --fresh makes it again; made again: from its checkpoints, in "
        "the same bytes",
    )
    whole = chain.folder / stage
    names = [path.relative_to(whole).as_posix() for part in ("model", "value") for path in (whole / part).rglob("*")]
    names = [name for name in names if not name.endswith(MODEL_CARDS)]  # a card may be edited
    for name in [*sorted(names), "manifest.json"]:
        for how in (*ALONE, OTHER_RUN):
            run = tmp_path / how / name
            matrix.put(name, how, cell(chain, other_chain, stage, run, name, how))
            shutil.rmtree(run)
    record_property(PROPERTY, matrix.as_json())
    assert not matrix.silent()
    assert matrix.cells["manifest.json"]["missing"] == f"M10 / {AGAIN}"
    assert set(matrix.damages()) <= {"M10 / M05", "not read / M05", f"M10 / {AGAIN}"}
