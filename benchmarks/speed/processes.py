"""Run measurements in subprocesses, and cache their results in files."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rlhf_cli import terminal

ROOT = Path(__file__).parent.parent.parent


def child_environment(threads: int, **variables: str) -> dict[str, str]:
    """Return the environment of a child: thread limits, no Hugging Face Hub, the repository on PYTHONPATH."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(paths),
        **variables,
    }


def run_command(command: Sequence[str], environment: dict[str, str]) -> str:
    """Return the stdout of a command. Raises RuntimeError with the end of its stderr if it fails."""
    with tempfile.TemporaryFile("w+") as stderr:
        result = subprocess.run(command, env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=stderr)
        if result.returncode:
            stderr.seek(0)
            raise RuntimeError(f"{' '.join(command)} exited with {result.returncode}:\n{stderr.read()[-2000:]}")
    return result.stdout


def run_module(
    module: str, *arguments: str | Path, python: str | Path = sys.executable, threads: int = 1, **variables: str
) -> Any:
    """Run a module in its own process, and return the JSON of its last line of stdout.

    `python` may belong to another environment; `variables` are added to the child's environment.
    Raises RuntimeError with the end of its stderr if it fails.
    """
    command = [str(python), "-m", module, *map(str, arguments)]
    return json.loads(run_command(command, child_environment(threads, **variables)).splitlines()[-1])


def fail(text: str) -> int:
    """Print why a benchmark cannot start, and return the exit code 2."""
    print(f"bench: {text}", file=sys.stderr)
    return 2


def code_sha256() -> str:
    """Return a short hash of the source of rlhf_cli."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "rlhf_cli").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


class ResultCache:
    """Results of measurements, one JSON file each. Results of other code are used, and listed in `stale`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.code, self.stale = folder, code_sha256(), set[str]()

    def drop(self, part: str) -> None:
        """Delete the results of a part, so that it is measured again."""
        (self.folder / f"{part}.json").unlink(missing_ok=True)
        shutil.rmtree(self.folder / part, ignore_errors=True)

    def has(self, names: Iterable[str]) -> bool:
        return all((self.folder / f"{name}.json").exists() for name in names)

    def get(self, name: str, measure: Callable[[], Any]) -> Any:
        """Return the cached result, or measure it and write it to the cache."""
        path = self.folder / f"{name}.json"
        if path.exists():
            cached = json.loads(path.read_text(encoding="utf-8"))
            if cached["code"] != self.code and "peer" not in name:
                self.stale.add(name)
            return cached["found"]
        terminal.say(f"bench    {name}")
        result = measure()
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps({"code": self.code, "found": result}, indent=1), encoding="utf-8")
        temporary.replace(path)
        return result

    def report_stale(self) -> None:
        """Print which results were measured with other code."""
        if self.stale:
            terminal.out(f"measured with other code: {', '.join(sorted(self.stale))}; --fresh measures again")
