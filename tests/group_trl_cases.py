"""Stages in two processes, for tests/test_group_trl.py: `torchrun group_trl_cases.py CONFIG...` runs them one by one.

`CONFIG@STEP` runs one to its end, then goes on from the checkpoint of that step; the folder of the straight run is kept
beside it as STAGE-straight.
"""

import shutil
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers

from rlhf_cli import runs
from rlhf_cli.config.base import Options
from rlhf_cli.config.loading import load
from rlhf_cli.models.parallel import ProcessGroup, open_process_group
from rlhf_cli.stages import eval, reward, sft

STAGES: dict[str, ModuleType] = {"sft": sft, "reward": reward, "eval": eval}


def run(path: Path, process_group: ProcessGroup) -> None:
    STAGES[path.stem]._run(load(path.stem, path), Options(), process_group)  # type: ignore[arg-type]


def forget(folder: Path, step: int) -> None:
    """Leave what was there when the checkpoint of the step had just been written."""
    shutil.copytree(folder, folder.with_name(f"{folder.name}-straight"))
    (folder / "manifest.json").unlink()
    shutil.rmtree(folder / "model")
    for state in (folder / "state").iterdir():
        if int(state.name.rpartition("-")[2]) > step:
            shutil.rmtree(state)


def dawdle(rank: int) -> None:
    """From now on rank 0 is slow to begin a checkpoint, and the other to write its part of it."""

    def slowly(do: Any) -> Any:
        return lambda *args: (time.sleep(0.1), do(*args))[1]

    if rank == 0:
        runs.prepare_state_folder = slowly(runs.prepare_state_folder)
    else:
        transformers.Trainer._save_rng_state = slowly(transformers.Trainer._save_rng_state)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with open_process_group() as here:
        for word in sys.argv[1:]:
            name, _, step = word.partition("@")
            config = Path(name)
            run(config, here)
            if step:
                dawdle(here.rank)
                here.first(lambda config=config, step=step: forget(config.with_suffix(""), int(step)))  # type: ignore[misc]
                run(config, here)
