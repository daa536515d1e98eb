"""Processes: how to start one of ours, and which of several this one is, by what a launcher told it."""

import os
import sys

from rlhf_cli.errors import RLHFError

# -P: a file of the working directory named like a library (yaml.py) is never imported in its place.
OURSELVES = (sys.executable, "-P", "-m", "rlhf_cli")
# Of torchrun, of a step that srun started (SLURM_NTASKS is the allocation's, one process may well use it), of mpirun.
COUNTS = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
# What torchrun, and accelerate launch where it starts several, tell each process of a group.
GROUP = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def count() -> int:
    """How many processes train together: 1 without a launcher."""
    return _number("WORLD_SIZE", 1)


def rank() -> int:
    """Which of them this is, from 0."""
    return _number("RANK", 0)


def local_rank() -> int:
    """Which of those on this machine this is, from 0: its GPU's number."""
    return _number("LOCAL_RANK", 0)


def local_count() -> int:
    """How many of them are on this machine."""
    return _number("LOCAL_WORLD_SIZE", count())


def is_first() -> bool:
    """Whether this process writes files and speaks: the others of a group do neither."""
    return rank() == 0


def check_group() -> None:
    """Raises RLHFError E04 where a launcher was asked for several processes, and these are not a group of so many.

    Each would train the same and write the same files. `accelerate launch --cpu` leaves MASTER_ADDR alone: it starts
    one process, whatever it was asked for. A variable that is empty is not set.
    """
    if count() > 1:
        missing = [name for name in GROUP if not _told(name)]
        if missing:
            text = f"{count()} processes were asked for, and 1 came up by itself: {', '.join(missing)} is not set"
            raise _refusal("WORLD_SIZE", text)
        return
    for name in COUNTS:
        if _told(name) not in ("", "1"):
            raise _refusal(name, f"{_told(name)} processes were asked for, and 1 came up, which knows no other")
    if _told("MASTER_ADDR") and not _told("WORLD_SIZE"):
        text = "MASTER_ADDR is set without WORLD_SIZE: a launcher was asked for several processes, and 1 came up"
        raise _refusal("MASTER_ADDR", text)


def refuse_several(command: str) -> None:
    """Raises RLHFError E04 where a launcher was asked for several processes, of a command that runs in one."""
    check_group()
    if count() > 1:
        text = f"{count()} processes were started, `rlhf {command}` runs in one"
        raise RLHFError("E04", text, where="WORLD_SIZE", hint="start it without a launcher; --nproc N is for stages")


def _number(name: str, otherwise: int) -> int:
    return int(_told(name)) if _told(name).isdecimal() else otherwise


def _told(name: str) -> str:
    return os.environ.get(name, "").strip()


def _refusal(name: str, text: str) -> RLHFError:
    hint = f"use --nproc N, or torchrun -m rlhf_cli; or, where no launcher runs, unset {name}"
    return RLHFError("E04", text, where=name, hint=hint)
