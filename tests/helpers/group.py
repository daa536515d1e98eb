"""Stages in several processes: start one, stop or kill it or one of its ranks, and resume it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rlhf_cli.distributed import RLHF_COMMAND

HELPERS = Path(__file__).parent
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(HELPERS), str(HELPERS.parents[1])]), "OMP_NUM_THREADS": "1"}

# A sitecustomize.py, which Python imports when it starts: 4 processes seem to be on two machines of 2 each.
TWO_MACHINES = """
import os

if "RANK" in os.environ:
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(int(os.environ["RANK"]) % 2)}
"""


def imported_at_start(folder: Path, code: str) -> str:
    """Return the PYTHONPATH of processes that run this code when they start."""
    (folder / "site").mkdir(exist_ok=True)
    with (folder / "site/sitecustomize.py").open("a") as file:
        file.write(code)
    return os.pathsep.join([str(folder / "site"), ENVIRONMENT["PYTHONPATH"]])


def child(*command: object, timeout: float = 240, **variables: str) -> subprocess.CompletedProcess[str]:
    words, environment = [str(word) for word in command], {**os.environ, **ENVIRONMENT, **variables}
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout, env=environment, check=False)


def command(config: Path, *more: str, processes: int = 2) -> list[str]:
    return [*RLHF_COMMAND, config.stem, "-c", str(config), "--nproc", str(processes), *more]


def ranks(launcher: int) -> dict[int, int]:
    """Return the process ids of the ranks."""
    pids = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    variables = [(int(pid), word) for pid in pids for word in Path(f"/proc/{pid}/environ").read_text().split("\0")]
    return {int(word.removeprefix("RANK=")): pid for pid, word in variables if word.startswith("RANK=")}


def stop_and_resume(
    config: Path,
    state: str,
    number: int,
    rank: int | None = None,
    resume: Sequence[object] = (),
    *,
    processes: int = 2,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Send a signal to the launcher or a rank once a checkpoint exists; all must end soon. Return the resumed run."""
    environment = {**os.environ, **ENVIRONMENT, **variables}
    process = subprocess.Popen(
        command(config, processes=processes), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    until = time.monotonic() + 120
    while not (config.with_suffix("") / "state" / state / "state.json").exists():
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        time.sleep(0.01)
    pids = ranks(process.pid)
    os.kill(process.pid if rank is None else pids[rank], number)
    _, output = process.communicate(timeout=60)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values()) and "Traceback" not in output, output
    if number == signal.SIGKILL:
        assert process.returncode == 1 and "error[R00]" not in output, output
        assert f"error[R14]: process {rank} of {processes} was killed by SIGKILL" in output, output
    else:
        assert process.returncode == 128 + number, output
        assert output.count("saved; the same command resumes") == 1, output
    resumed = child(*(resume or command(config, processes=processes)), **variables)
    assert resumed.returncode == 0 and resumed.stderr.count("resumes at step") == 1, resumed.stderr
    return resumed
