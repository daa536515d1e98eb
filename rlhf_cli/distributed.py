"""Processes: how to start one of ours, and which of several this one is, by what a launcher told it."""

import logging
import os
import signal
import sys
from collections.abc import Sequence

from rlhf_cli.errors import RLHFError

# -P: a file of the working directory named like a library (yaml.py) is never imported in its place.
RLHF_COMMAND = (sys.executable, "-P", "-m", "rlhf_cli")
# Of torchrun, of a step that srun started (SLURM_NTASKS is the allocation's, one process may well use it), of mpirun.
WORLD_SIZE_VARIABLES = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
# What torchrun, and accelerate launch where it starts several, tell each process of a group.
GROUP_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# torchrun's agent waits this long, both for a step and checkpoint after a stop signal and for ranks whose peer was
# killed, which NCCL leaves hanging.
SECONDS_TO_STOP = 50


def world_size() -> int:
    """How many processes train together: 1 without a launcher."""
    return _number("WORLD_SIZE", 1)


def rank() -> int:
    """Which of them this is, from 0."""
    return _number("RANK", 0)


def local_rank() -> int:
    """Which of those on this machine this is, from 0: its GPU's number."""
    return _number("LOCAL_RANK", 0)


def local_world_size() -> int:
    """How many of them are on this machine."""
    return _number("LOCAL_WORLD_SIZE", world_size())


def is_main_process() -> bool:
    """Whether this process writes files and speaks: the others of a group do neither."""
    return rank() == 0


def check_group() -> None:
    """Raises RLHFError E04 where a launcher was asked for several processes, and these are not a group of so many.

    Each would train the same and write the same files. `accelerate launch --cpu` leaves MASTER_ADDR alone: it starts
    one process, whatever it was asked for. A variable that is empty is not set.
    """
    if world_size() > 1:
        missing = [name for name in GROUP_VARIABLES if not _told(name)]
        if missing:
            text = f"{world_size()} processes were asked for, and 1 came up by itself: {', '.join(missing)} is not set"
            raise _refusal("WORLD_SIZE", text)
        return
    for name in WORLD_SIZE_VARIABLES:
        if _told(name) not in ("", "1"):
            raise _refusal(name, f"{_told(name)} processes were asked for, and 1 came up, which knows no other")
    if _told("MASTER_ADDR") and not _told("WORLD_SIZE"):
        text = "MASTER_ADDR is set without WORLD_SIZE: a launcher was asked for several processes, and 1 came up"
        raise _refusal("MASTER_ADDR", text)


def require_single_process(command: str) -> None:
    """Raises RLHFError E04 where a launcher was asked for several processes, of a command that runs in one."""
    check_group()
    if world_size() > 1:
        text = f"{world_size()} processes were started, `rlhf {command}` runs in one"
        raise RLHFError("E04", text, where="WORLD_SIZE", hint="start it without a launcher; --nproc N is for stages")


def _number(name: str, otherwise: int) -> int:
    return int(_told(name)) if _told(name).isdecimal() else otherwise


def _told(name: str) -> str:
    return os.environ.get(name, "").strip()


def _refusal(name: str, text: str) -> RLHFError:
    hint = f"use --nproc N, or torchrun -m rlhf_cli; or, where no launcher runs, unset {name}"
    return RLHFError("E04", text, where=name, hint=hint)


def resolve_num_processes(asked: str) -> int:
    """How many processes `--nproc` means; `auto`: one for each GPU. Raises RLHFError C07, E04."""
    import torch

    gpus = torch.cuda.device_count()
    if asked == "auto":
        return max(1, gpus)
    if not asked.isdecimal() or int(asked) < 1:
        raise RLHFError("C07", f'"{asked}" is not a number of processes', where="--nproc", hint="e.g. 2, or auto")
    if gpus and int(asked) > gpus:
        text = f"{asked} processes were asked for, this machine has {gpus} GPUs"
        raise RLHFError("E04", text, where="--nproc", hint="--nproc auto starts one for each")
    return int(asked)


def launch_group(count: int, arguments: Sequence[str]) -> int:
    """Python with these arguments in `count` processes; returns their exit code. They speak for themselves.

    Raises RLHFError E04 where this is a process of a group already, R14 where one of them was killed.
    """
    if world_size() > 1:
        text = f"this is one of {world_size()} processes already, and each would start {count}"
        raise RLHFError("E04", text, where="--nproc", hint="leave --nproc out, or the launcher")
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SECONDS_TO_STOP))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # its tables of failures are not for users
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=count, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        run_id=f"rlhf-{os.getpid()}", max_restarts=0,
    )  # fmt: skip
    try:
        elastic_launch(config, RLHF_COMMAND[0])(*arguments)
    except SignalException as stopped:
        return 128 + stopped.sigval
    except ChildFailedError as failed:
        if 2 in (failure.exitcode for failure in failed.failures.values()):
            return 2  # what it said of its inputs is the cause; who waited for it in vain ends with 1
        rank, failure = failed.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode
        name = signal.Signals(-failure.exitcode).name
        text = f"process {rank} of {count} was ended by {name}"
        hint = "the same command goes on from the last state; SIGKILL is what a machine out of memory sends"
        raise RLHFError("R14", text, hint=hint) from failed
    return 0
