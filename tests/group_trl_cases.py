"""Stages in two processes, for tests/test_group_trl.py: `torchrun group_trl_cases.py CONFIG...` runs them one by one.

`CONFIG@STEP` runs one to its end, then goes on from the checkpoint of that step; the folder of the straight run is kept
beside it as STAGE-straight.
"""

import shutil
import sys
from pathlib import Path
from types import ModuleType

import torch

from rlhf_cli.config import Options, load
from rlhf_cli.ppo.ranks import Ranks, group
from rlhf_cli.stages import reward, sft

STAGES: dict[str, ModuleType] = {"sft": sft, "reward": reward}


def run(path: Path, ranks: Ranks) -> None:
    STAGES[path.stem]._run(load(path.stem, path), Options(), ranks)  # type: ignore[arg-type]


def forget(folder: Path, step: int) -> None:
    """What was there when the checkpoint of the step had just been written."""
    shutil.copytree(folder, folder.with_name(f"{folder.name}-straight"))
    (folder / "manifest.json").unlink()
    shutil.rmtree(folder / "model")
    for state in (folder / "state").iterdir():
        if int(state.name.rpartition("-")[2]) > step:
            shutil.rmtree(state)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with group() as here:
        for word in sys.argv[1:]:
            name, _, step = word.partition("@")
            config = Path(name)
            run(config, here)
            if step:
                here.first(lambda config=config, step=step: forget(config.with_suffix(""), int(step)))  # type: ignore[misc]
                run(config, here)
