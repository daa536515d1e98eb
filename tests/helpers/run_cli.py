"""Run `rlhf` or a script in this process or in another one."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rlhf_cli import cli, runs, terminal
from rlhf_cli.pipeline import children

ROOT = Path(__file__).parents[2]


def rlhf(*arguments: object, **options: Any) -> Result:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], **options)


def child(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return python("-m", "rlhf_cli", *arguments, **options)


def python(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments in another process, where this clone can be imported."""
    options["env"] = {**options.get("env", os.environ), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, **{"capture_output": True, "text": True, "check": False, **options})


def forked(
    *arguments: object, before: Callable[[], object] = lambda: None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `rlhf` in a fork of this process, which has all imported. `before` is called in it; no output if it dies."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        code = 1
        try:
            os.environ.update(variables)
            before()
            result = rlhf(*arguments)
            with os.fdopen(writer, "w") as pipe:
                json.dump([result.stdout, result.stderr], pipe)
            code = result.exit_code
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        output = json.loads(pipe.read() or '["", ""]')
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return subprocess.CompletedProcess(arguments, code, *output)


def run_here(*arguments: object) -> Result:
    """`rlhf run` whose checks and stages run in this process, each like in a new one. Its output has theirs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(children, "run_child", child_here)
        return rlhf("run", *arguments)


def child_here(command: Sequence[str]) -> int:
    """In place of `run_child` of `rlhf run`."""
    terminal.reset()
    result = rlhf(*command[4:])
    runs.release()
    sys.stdout.write(result.stdout)
    sys.stderr.write(result.stderr)
    return result.exit_code


def must_succeed(result: Any, *says: str) -> Any:
    """Return the result of a command or a process, which must have ended with exit code 0, and said this on stderr."""
    ended, output = end_of(result)
    assert ended == 0 and all(text in result.stderr for text in says), output
    return result


def fails(result: Any, code: str, *says: str, exit_code: int = 2) -> None:
    """Assert that a command or a process ended with this error, said this on stderr, and has no traceback."""
    ended, output = end_of(result)
    assert ended == exit_code and f"error[{code}]" in result.stderr, output
    assert all(text in result.stderr for text in says) and "Traceback" not in output, result.stderr


def end_of(result: Any) -> tuple[int, str]:
    if isinstance(result, Result):
        return result.exit_code, result.output
    return result.returncode, result.stdout + result.stderr


def is_one_error(result: Result, code: str, *texts: str, exit_code: int = 2) -> bool:
    """Return True for one error line with these texts, at most one hint, and nothing on stdout."""
    first, *rest = result.stderr.splitlines()
    assert first.startswith(f"error[{code}]: ") and all(text in result.stderr for text in texts), result.stderr
    assert len(rest) <= 1 and all(line.startswith("hint: ") for line in rest), result.stderr
    assert (result.exit_code, result.stdout) == (exit_code, ""), result.stderr
    return True
