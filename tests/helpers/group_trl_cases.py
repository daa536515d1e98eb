"""Stages in two processes, for tests/distributed/test_trl_stages.py: `torchrun group_trl_cases.py CONFIG...` runs each.

`CONFIG@STEP` runs one to its end, then resumes from the checkpoint of that step; the straight run is kept as
STAGE-straight.
"""

import shutil
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import transformers

from rlhf_cli import runs
from rlhf_cli.config.base import Options
from rlhf_cli.config.loading import load
from rlhf_cli.models.parallel import ProcessGroup, open_process_group
from rlhf_cli.stages import dpo, sft
from rlhf_cli.stages.common import lifecycle
from rlhf_cli.stages.eval import run as eval_stage
from rlhf_cli.stages.reward import run as reward_stage

STAGES: dict[str, ModuleType] = {"sft": sft, "reward": reward_stage, "dpo": dpo, "eval": eval_stage}


def run(path: Path, process_group: ProcessGroup) -> None:
    """Run a stage in an existing process group."""
    with patch.object(lifecycle, "open_process_group", lambda: nullcontext(process_group)):
        STAGES[path.stem].run(load(path.stem, path), Options())


def forget(folder: Path, step: int) -> None:
    """Restore the folder as it was after the checkpoint of the step."""
    shutil.copytree(folder, folder.with_name(f"{folder.name}-straight"))
    (folder / "manifest.json").unlink()
    shutil.rmtree(folder / "model")
    for state in (folder / "state").iterdir():
        if int(state.name.rpartition("-")[2]) > step:
            shutil.rmtree(state)


def dawdle(rank: int) -> None:
    """Make rank 0 slow to start a checkpoint, and the other rank slow to write its part."""

    def slowly(do: Any) -> Any:
        return lambda *args: (time.sleep(0.1), do(*args))[1]

    if rank == 0:
        runs.begin_state = slowly(runs.begin_state)
    else:
        transformers.Trainer._save_rng_state = slowly(transformers.Trainer._save_rng_state)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with open_process_group() as process_group:
        for word in sys.argv[1:]:
            name, _, step = word.partition("@")
            config = Path(name)
            run(config, process_group)
            if step:
                dawdle(process_group.rank)
                process_group.run_on_main(partial(forget, config.with_suffix(""), int(step)))
                run(config, process_group)
