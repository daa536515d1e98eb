"""CPU time of a child process, as a multiple of what the import of typer, pydantic and yaml costs on this machine.

A limit in seconds fails on a machine that is slower or busy; both are measured in turn, and the least of each counts.
"""

import os
import resource
import subprocess
import sys
from collections.abc import Callable

REFERENCE = [sys.executable, "-c", "import typer, pydantic, yaml"]


def cost(child: Callable[[], object], turns: int = 4) -> float:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    pairs = [
        (cpu_seconds(child), cpu_seconds(lambda: subprocess.run(REFERENCE, check=True, env=env))) for _ in range(turns)
    ]
    return min(own for own, _ in pairs) / min(reference for _, reference in pairs)


def cpu_seconds(child: Callable[[], object]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    child()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
