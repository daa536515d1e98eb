"""Processes: how to start one of ours, and how many a launcher was asked for, where this version runs in one."""

import os
import sys

from rlhf_cli.errors import RLHFError

# -P: a file of the working directory named like a library (yaml.py) is never imported in its place.
OURSELVES = (sys.executable, "-P", "-m", "rlhf_cli")
ALONE = "start it without a launcher: this version trains in one process, on one GPU where there is one"
# Of torchrun, of a step that srun started (SLURM_NTASKS is the allocation's, one process may well use it), of mpirun.
COUNTS = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")


def refuse_several() -> None:
    """Raises RLHFError E04 where a variable of COUNTS is not 1, or MASTER_ADDR is set without WORLD_SIZE.

    Each process would train the same and write the same files. `accelerate launch --cpu` leaves MASTER_ADDR alone: it
    starts one process, whatever it was asked for. A variable that is empty is not set.
    """
    found = {name: value for name in (*COUNTS, "MASTER_ADDR") if (value := os.environ.get(name, "").strip())}
    for name in COUNTS:
        if found.get(name, "1") != "1":
            text = f"{found[name]} processes were asked for, 1 is all that this version runs in"
            raise _refusal(name, text)
    if "MASTER_ADDR" in found and "WORLD_SIZE" not in found:
        text = "MASTER_ADDR is set without WORLD_SIZE: a launcher was asked for several processes, and 1 came up"
        raise _refusal("MASTER_ADDR", text)


def _refusal(name: str, text: str) -> RLHFError:
    return RLHFError("E04", text, where=name, hint=f"{ALONE}; or, where no launcher runs, unset {name}")
