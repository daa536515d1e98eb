"""Processes of the sandbox: limits, what reaches the code, and that none outlives its run."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli.rewards import sandbox
from tests.rewards.test_verifiers import processes_of, scores


@pytest.mark.full
def test_code_that_never_ends_is_stopped_by_its_cpu_time_or_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "WAIT_SECONDS", 1.0)
    for code, at_least, at_most in (("while True: pass", 0.8, 9), ("import time\ntime.sleep(999)", 3, 20)):
        before = time.perf_counter()
        assert sandbox.passed_tests(code, [""], seconds=1.0, megabytes=128) == [False]
        assert at_least < time.perf_counter() - before < at_most
    assert not processes_of(os.getpid())


RUN = """
from rlhf_cli.rewards.sandbox import on_all_cpus, passed_tests
on_all_cpus(lambda n: passed_tests("import time; time.sleep(99)", [""], seconds=60.0, megabytes=64), range(9))
"""


@pytest.mark.parametrize("seconds", [0, 0.3])
def test_no_process_outlives_a_run_that_is_killed(seconds: float) -> None:
    """While it starts, or sleeps."""
    with subprocess.Popen([sys.executable, "-c", RUN]) as run:
        wait_until(lambda: processes_of(run.pid))
        time.sleep(seconds)
        run.kill()
    wait_until(lambda: not processes_of(run.pid))


def wait_until(holds: Callable[[], Any]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_what_the_caller_set_for_python_and_its_secrets_do_not_reach_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("sitecustomize", "usercustomize", "marshal", "json", "mine"):
        (tmp_path / f"{module}.py").write_text("import os; os._exit(3)")
    (tmp_path / "secret").write_text("planted")
    paths = ("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONPLATLIBDIR")
    values = {"PYTHONSTARTUP": "mine.py", "PYTHONOPTIMIZE": "1", "PYTHONINSPECT": "1", "MY_KEY": "planted"}
    for name, value in {**dict.fromkeys(paths, str(tmp_path)), **values, "LD_LIBRARY_PATH": ".:"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    code = f"""
import json, os, sys
seen = [text for text in [*os.environ, *os.environ.values(), *sys.path] if "PY" in text or "planted" in text]
for path in {str(tmp_path / "secret")!r}, "/etc/passwd", f"/proc/{{os.getppid()}}/environ", "/proc/self/cmdline":
    try:
        seen.append(open(path).read())
    except OSError:
        pass
"""
    assert scores("unit_tests", [(code, ["assert seen == []", "assert json.loads('[]') == []"])]) == [1]


def test_a_machine_too_busy_to_start_a_process_is_no_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "START_SECONDS", 0.0)
    with pytest.raises(sandbox.SandboxError, match="could not start"):
        sandbox.passed_tests("", ["1"], seconds=1.0, megabytes=64)


def test_as_many_processes_at_once_as_this_one_has_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container or a scheduler may give it fewer than the machine has."""
    sizes: list[int] = []
    monkeypatch.setattr(sandbox.os, "sched_getaffinity", lambda process: {0, 5, 7})
    monkeypatch.setattr(sandbox, "ThreadPoolExecutor", lambda size: sizes.append(size) or ThreadPoolExecutor(size))
    assert scores("unit_tests", [("a = 1", "assert a")]) == [1] and sizes == [3]
