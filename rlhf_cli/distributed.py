"""Processes of a group: rank and world size from the environment, and the launcher of `--nproc`."""

import logging
import math
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rlhf_cli.errors import RLHFError

# -P: never import a file of the working directory that is named like a library (yaml.py)
NPROC_VARIABLE = "RLHF_NPROC"  # the default of --nproc
RLHF_COMMAND = (sys.executable, "-P", "-m", "rlhf_cli")
# set by torchrun, by srun for a step (SLURM_NTASKS is that of the allocation), and by the mpirun of Open MPI, MPICH and
# MVAPICH; accelerate reads the last three
WORLD_SIZE_VARIABLES = (
    "WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"
)  # fmt: skip
# with what a launcher sets beside them: with a LOCAL_RANK, accelerate opens a group even for one process
RANK_VARIABLES = {"RANK": ("WORLD_SIZE",), "LOCAL_RANK": ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
# set by torchrun, and by accelerate launch for several processes, in each process of a group
GROUP_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# torchrun's agent waits this long, both for a step and checkpoint after a stop signal and for ranks whose peer was
# killed, which NCCL leaves hanging; and longer for a large checkpoint.
SECONDS_TO_STOP = 50
CHECKPOINT_PER_WEIGHTS = 6  # bytes for a byte of weight files: bfloat16 weights become float32 with AdamW's two moments
CHECKPOINT_RATE = 2e8  # bytes/s to a slow network file system, hashed
_alone = False


@contextmanager
def alone() -> Iterator[None]:
    """Context manager in which this process is in no group, whatever a launcher or the shell has set.

    It is for commands that train nothing: each prints and writes for itself.
    """
    global _alone
    before = _alone
    _alone = True
    try:
        yield
    finally:
        _alone = before


def world_size() -> int:
    """Return the number of processes that train together: 1 without a launcher."""
    return 1 if _alone else _launched()


def rank() -> int:
    """Return this process's rank in the group, from 0. A RANK without a group counts for nothing."""
    return _integer("RANK", 0) if world_size() > 1 else 0


def local_rank() -> int:
    """Return this process's rank on its machine, from 0: the index of its GPU."""
    return _integer("LOCAL_RANK", 0) if world_size() > 1 else 0


def local_world_size() -> int:
    """Return the number of processes on this machine."""
    return max(1, _integer("LOCAL_WORLD_SIZE", world_size())) if world_size() > 1 else 1


def num_machines() -> int:
    """Return the number of machines that the processes of the group are on."""
    return -(-world_size() // local_world_size())


def is_main_process() -> bool:
    """Return True on rank 0, the only process that writes files and prints."""
    return rank() == 0


def check_group() -> None:
    """Raise RLHFError E04 if a launcher was asked for several processes but these do not form a group of that size.

    Otherwise each would train the same model and write the same files. `accelerate launch --cpu` sets MASTER_ADDR only:
    it starts one process, whatever was requested. A RANK without WORLD_SIZE may be that of one of several processes.
    An empty variable counts as unset.
    """
    if (count := _launched()) > 1:
        missing = [name for name in GROUP_VARIABLES if not _variable(name)]
        if missing:
            text = f"{count} processes were requested, but 1 started on its own, without {', '.join(missing)}"
            raise _refusal("WORLD_SIZE", text)
        if _integer("RANK", count) >= count:
            raise _refusal("RANK", f"RANK is {_variable('RANK')} in a group of {count} processes, which count from 0")
        return
    for name in WORLD_SIZE_VARIABLES:
        if _variable(name) not in ("", "1"):
            raise _refusal(name, f"{_variable(name)} processes were requested, but 1 started, outside any group")
    if _variable("MASTER_ADDR") and not _variable("WORLD_SIZE"):
        text = "MASTER_ADDR is set without WORLD_SIZE: a launcher was asked for several processes, but 1 started"
        raise _refusal("MASTER_ADDR", text)
    for name, others in RANK_VARIABLES.items():
        missing = [other for other in others if not _variable(other)]
        if _variable(name) and missing:
            raise _refusal(name, f"{name} is {_variable(name)}, without {', '.join(missing)}")
        if _variable(name) not in ("", "0"):
            raise _refusal(name, f"{name} is {_variable(name)} in a group of one process, which counts from 0")


def require_single_process(command: str) -> None:
    """Raise RLHFError E04 if a command that runs in one process was started in several."""
    check_group()
    if (count := _launched()) > 1:
        text = f"{count} processes were started, `rlhf {command}` runs in one"
        raise RLHFError("E04", text, where="WORLD_SIZE", hint="start it without a launcher; --nproc N is for stages")


def _launched() -> int:
    return _integer("WORLD_SIZE", 1)


def _integer(name: str, default: int) -> int:
    return int(_variable(name)) if _variable(name).isdecimal() else default


def _variable(name: str) -> str:
    return os.environ.get(name, "").strip()


def _refusal(name: str, text: str) -> RLHFError:
    hint = f"use --nproc N, or torchrun -m rlhf_cli; or, where no launcher runs, unset {name}"
    return RLHFError("E04", text, where=name, hint=hint)


def resolve_num_processes(requested: str) -> int:
    """Return the number of processes that `--nproc` requests; `auto` is one per GPU. Raises RLHFError C07, E04."""
    import torch

    gpus = torch.cuda.device_count()
    if requested == "auto":
        return max(1, gpus)
    if not requested.isdecimal() or int(requested) < 1:
        raise RLHFError("C07", f'"{requested}" is not a number of processes', where="--nproc", hint="e.g. 2, or auto")
    if gpus and int(requested) > gpus:
        text = f"{requested} processes were requested, but this machine has {gpus} GPUs"
        raise RLHFError("E04", text, where="--nproc", hint="--nproc auto starts one for each")
    return int(requested)


def launch_group(count: int, arguments: Sequence[str], *, weights_bytes: int = 0) -> int:
    """Run Python with these arguments in `count` processes, and return their exit code. They print their own errors.

    `weights_bytes` is the size of their input models' files; they have the longer to write a checkpoint and stop.
    Raises RLHFError E04 if this process is part of a group already, R14 if one of them was killed.
    """
    if world_size() > 1:
        text = f"this is one of {world_size()} processes already, and each would start {count}"
        raise RLHFError("E04", text, where="--nproc", hint="use either --nproc or the launcher")
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.pop(NPROC_VARIABLE, None)  # each process of the group is one
    seconds = SECONDS_TO_STOP + math.ceil(CHECKPOINT_PER_WEIGHTS * weights_bytes / CHECKPOINT_RATE)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(seconds))
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
            return 2  # an input error is the cause; ranks that waited for it exit with 1
        rank, failure = failed.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode
        text = f"process {rank} of {count} was killed by {signal.Signals(-failure.exitcode).name}"
        hint = "the same command resumes from the last checkpoint; SIGKILL is what a machine out of memory sends"
        raise RLHFError("R14", text, hint=hint) from failed
    return 0
