"""Runs Python code that a model wrote, with its tests: starts a process of sandboxed.py, and judges what it says.

What the process writes once its limits are set is the code's doing: wrong answers, at worst.
"""

import marshal
import os
import secrets
import select
import subprocess
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from threading import Lock
from typing import IO, Any

from rlhf_cli.rewards import sandboxed
from rlhf_cli.rewards.expected import Check, UnitTest, without_expected_values
from rlhf_cli.rewards.sandboxed import PASSED, SandboxError

START_SECONDS = 60.0  # for Python to start and to set the limits, on a busy machine
WAIT_SECONDS = 5.0  # by the clock, beside twice the CPU time
SPLITTING = Lock()  # catch_warnings is for one thread at a time
LINE_BYTES = 128  # that the process may write for each test and value
OTHER_BYTES = 2**20  # and this much more


def passed_tests(code: str, tests: list[str], *, seconds: float, megabytes: int) -> list[bool]:
    """Return for each test whether it ran after the code without an exception, and had the values that it expects.

    A test is Python text that sees the code's names. All tests share one process, which has `seconds` of CPU time,
    twice as long and 5 s by the clock, and `megabytes` of address space beside the tests. Those after a test that ends
    it have not passed. Raises SandboxError if the process could not limit itself.
    """
    split = _split(tuple(tests))
    said: dict[str, list[str]] = defaultdict(list)  # of a test, or of a value in it
    for line in _run(code, split, seconds, megabytes)[1]:
        match line.split(" "):
            case [about, text]:
                said[about].append(text)
    return [
        PASSED in said[str(index)]
        and all(_holds(check, said[f"{index}.{number}"]) for number, check in enumerate(test.checks))
        for index, test in enumerate(split)
    ]


def hides_files(*, seconds: float, megabytes: int) -> bool:
    """Try the limits. Return False if code can read other files than Python's. Raises SandboxError."""
    return _run("", (), seconds, megabytes)[0]


def on_all_cpus(function: Callable[..., Any], *rows: Iterable[Any]) -> list[Any]:
    """Return `map(function, *rows)`, as many calls at a time as this process may use CPUs."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(function, *rows))


@lru_cache(maxsize=64)  # rows, each of which has several responses
def _split(tests: tuple[str, ...]) -> tuple[UnitTest, ...]:
    with SPLITTING, warnings.catch_warnings(action="ignore"):
        return tuple(map(without_expected_values, tests))


def _holds(check: Check, texts: list[str]) -> bool:
    return bool(texts) and all(map(check, texts))


def _run(code: str, tests: tuple[UnitTest, ...], seconds: float, megabytes: int) -> tuple[bool, list[str]]:
    """Return whether files are hidden from the process, and the lines that it wrote with its token, without that."""
    if sys.platform != "linux":
        raise SandboxError(f"it needs Linux, this is {sys.platform}")
    token = secrets.token_hex(8)
    job = marshal.dumps((token, code, [test.code for test in tests], seconds, megabytes))
    environment = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    with open(os.memfd_create("job"), "w+b") as memory:
        memory.write(job)
        memory.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", sandboxed.__file__, str(os.getpid())],
            stdin=memory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            cwd="/", env=environment, start_new_session=True,
        )  # fmt: skip
    with process:
        assert process.stdout is not None
        size = LINE_BYTES * sum(1 + len(test.checks) for test in tests)
        try:
            output = _read(process.stdout, f"{token} limited ", seconds, size)
        finally:
            process.kill()
    mark = f"{token} "
    limited, *lines = [line.removeprefix(mark) for line in output.split("\n") if line.startswith(mark)]
    return limited == "limited 1", lines


def _read(pipe: IO[bytes], first: str, seconds: float, size: int) -> str:
    """Return what the process writes until it ends, its time is over or it has written too much."""
    chunks = [b""]
    for chunk in _chunks(pipe, START_SECONDS):
        chunks[0] += chunk
        if first.encode() in chunks[0]:
            break
    else:
        problem = chunks[0].decode(errors="replace").strip().rpartition("\n")[2]
        raise SandboxError(problem or "the process could not start")
    for chunk in _chunks(pipe, 2 * seconds + WAIT_SECONDS):
        chunks.append(chunk)
        size -= len(chunk)
        if size < -OTHER_BYTES:
            break
    return b"".join(chunks).decode(errors="replace")


def _chunks(pipe: IO[bytes], seconds: float) -> Iterator[bytes]:
    """Yield what is in the pipe until it is closed, for as long as `seconds`."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if poll.poll(1000 * left):
            chunk = os.read(pipe.fileno(), 2**16)
            if not chunk:
                return
            yield chunk
