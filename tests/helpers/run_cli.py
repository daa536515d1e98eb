"""Run `rlhf` in this process or in another one."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from rlhf_cli import cli

ROOT = Path(__file__).parents[2]


def rlhf(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def child(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlhf_cli", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, **options)


def is_one_error(result: Result, code: str, exit_code: int = 2) -> bool:
    """One error line, at most one hint, on stderr alone."""
    first, *rest = result.stderr.splitlines()
    assert result.stdout == ""
    assert len(rest) <= 1 and all(line.startswith("hint: ") for line in rest), result.stderr
    assert "Traceback" not in result.stderr
    assert (first.startswith(f"error[{code}]: "), result.exit_code) == (True, exit_code), result.stderr
    return True
