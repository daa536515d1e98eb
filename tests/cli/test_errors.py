"""Errors of commands become messages and exit codes: unexpected failures, --debug, signals."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from run_cli import ROOT, is_one_error, rlhf

from rlhf_cli.cli import stage
from rlhf_cli.errors import RLHFError


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run(*_: Any) -> None:
        raise error

    monkeypatch.setattr(stage, "_runner", lambda name: run)


def test_an_unexpected_failure_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, ZeroDivisionError("division\n by zero"))
    result = rlhf("sft", "-c", "sft.yaml")
    assert is_one_error(result, "R00", exit_code=1)
    assert result.stderr.startswith("error[R00]: ZeroDivisionError: division by zero\nhint: ")


@pytest.mark.parametrize(
    ("error", "code"), [(ZeroDivisionError(), 1), (RLHFError("M10", "not ready"), 2), (RLHFError("R01", "nan"), 1)]
)
def test_debug_shows_the_traceback_and_keeps_the_exit_code(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    failing(monkeypatch, error)
    assert "Traceback" not in rlhf("sft", "-c", "sft.yaml").stderr
    result = rlhf("sft", "-c", "sft.yaml", "--debug")
    assert "Traceback" in result.stderr and result.exit_code == code


@pytest.mark.full
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_command_in_good_order(folder: Path, number: int, code: int) -> None:
    script = """
import signal, time
from rlhf_cli import cli
from rlhf_cli.cli import stage
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
def wait(*_):
    try:
        print("up", flush=True)
        time.sleep(60)
    finally:
        print("closed", flush=True)
stage._runner = lambda name: wait
cli.app(["sft", "-c", "sft.yaml"])
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], env=environment, text=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == "up\n"
        process.send_signal(number)
        output, complaint = process.communicate(timeout=30)
    assert (process.returncode, output) == (code, "closed\n")
    assert "Traceback" not in complaint
