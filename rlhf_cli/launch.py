"""`--nproc N`: a command again, as a group of processes that torchrun's own agent starts and watches."""

import logging
import os
import signal
from collections.abc import Sequence

from rlhf_cli import processes
from rlhf_cli.errors import RLHFError

# The agent's two reasons to wait share it: a step to end and a state to be saved after a stop signal; and processes
# whose peer was killed, which NCCL lets hang.
SECONDS_TO_STOP = 50


def number(asked: str) -> int:
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


def run(count: int, arguments: Sequence[str]) -> int:
    """Python with these arguments in `count` processes; returns their exit code. They speak for themselves.

    Raises RLHFError E04 where this is a process of a group already, R14 where one of them was killed.
    """
    if processes.count() > 1:
        text = f"this is one of {processes.count()} processes already, and each would start {count}"
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
        elastic_launch(config, processes.OURSELVES[0])(*arguments)
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
