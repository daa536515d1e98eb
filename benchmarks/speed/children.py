"""Measurements run in processes of their own, so that none pays for what another one loaded."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent


def surroundings(threads: int, **more: str) -> dict[str, str]:
    """The environment of a child: so many threads for every library, no hub, and the repository on the path."""
    count = str(threads)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(paths),
        **more,
    }


def ask(module: str, *arguments: str | Path, python: str | Path = sys.executable, threads: int = 1, **more: str) -> Any:
    """What a module of ours prints as JSON on its last line, run by itself; `python` may be another environment's.

    `more` goes into the child's environment.

    Raises RuntimeError, with the end of what it said, where it fails.
    """
    command = [str(python), "-m", module, *map(str, arguments)]
    return json.loads(output(command, surroundings(threads, **more)).splitlines()[-1])


def output(command: Sequence[str], environment: dict[str, str]) -> str:
    """A command's stdout. Raises RuntimeError, with the end of its stderr, where it fails."""
    with tempfile.TemporaryFile("w+") as said:
        done = subprocess.run(command, env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=said)
        said.seek(0)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{said.read()[-2000:]}")
    return done.stdout
