"""How long `rlhf --help` takes, and whether it loads torch."""

import os
import subprocess
from typing import Any

from benchmarks.speed.children import ROOT, surroundings
from rlhf_cli.distributed import RLHF_COMMAND

TIMES = 5
HEAVY = ("torch", "transformers")


def measure() -> dict[str, Any]:
    """CPU seconds of the child itself, user and system, the best of some; and which heavy modules it imports."""
    command, environment = [*RLHF_COMMAND, "--help"], surroundings(threads=1)
    seconds = []
    for _ in range(TIMES):
        child = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {child.returncode}")
        seconds.append(used.ru_utime + used.ru_stime)
    timed = environment | {"PYTHONPROFILEIMPORTTIME": "1"}
    said = subprocess.run(command, env=timed, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    imported = {line.rpartition("|")[2].strip() for line in said.stderr.splitlines()}
    return {"cpu_s": round(min(seconds), 3), "heavy": [name for name in HEAVY if name in imported]}
