"""Runs Python code that a model wrote, with its tests, in a process that can only compute. Linux on x86-64 or Arm.

`passed_tests` starts this file as a script, with the standard library alone. The process sets its limits, gives up all
system calls but those listed in ALLOWED (seccomp, man 2 seccomp), and only then runs the code: no process or thread can
be started, no file opened for writing, no network used, no signal sent. docs/reliability.md says what this does not
promise.
"""

import ctypes
import json
import math
import os
import platform
import resource
import secrets
import signal
import struct
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import IO, Any

# Name of each allowed system call: its number on x86-64 and on Arm; None where there is none.
ALLOWED: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63), "readv": (19, 65), "pread64": (17, 67), "write": (1, 64), "writev": (20, 66), "close": (3, 57),
    "lseek": (8, 62), "stat": (4, None), "fstat": (5, 80), "lstat": (6, None), "newfstatat": (262, 79),
    "statx": (332, 291), "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439), "readlink": (89, None),
    "readlinkat": (267, 78), "getdents64": (217, 61), "getcwd": (79, 17), "poll": (7, None), "ppoll": (271, 73),
    "select": (23, None), "pselect6": (270, 72), "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215),
    "mremap": (25, 216), "brk": (12, 214), "madvise": (28, 233), "futex": (202, 98), "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132), "getrandom": (318, 278),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "nanosleep": (35, 101),
    "gettimeofday": (96, 169), "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178), "getuid": (102, 174),
    "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "uname": (63, 160), "sysinfo": (99, 179),
    "getrusage": (98, 165), "times": (100, 153), "sched_yield": (24, 124),
    "rseq": (334, 293), "exit": (60, 93), "exit_group": (231, 94),
}  # fmt: skip
OPEN = {"open": (2, None, 1), "openat": (257, 56, 2)}  # numbers, and which argument has the flags
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
RETURN, LOAD, JUMP_EQUAL, JUMP_GREATER_EQUAL, JUMP_IF_SET = 0x06, 0x20, 0x15, 0x35, 0x45  # of linux/bpf_common.h
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050001, 0x80000000  # of linux/seccomp.h; REFUSE: the call fails with EPERM
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 1, 22, 38, 2
MAX_RESULT_BYTES = 2**20  # that the process may write, to the file of its result: about 20 a test


class SandboxError(Exception):
    """The limits cannot be set on this machine."""


def passed_tests(code: str, tests: list[str], *, seconds: float, megabytes: int) -> list[bool]:
    """Return for each test whether it ran after the code without an exception.

    A test is Python text that sees the code's names. All tests share one process, which has `seconds` of CPU time,
    twice as long and 5 s by the clock, and `megabytes` of address space. Those after a test that ends it have not
    passed. Raises SandboxError if the process could not limit itself.
    """
    if sys.platform != "linux":
        raise SandboxError(f"it needs Linux, this is {sys.platform}")
    token = secrets.token_hex(8)
    job = {"code": code, "tests": tests, "seconds": seconds, "megabytes": megabytes, "token": token}
    environment = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    with tempfile.TemporaryFile() as result, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", __file__], stdin=subprocess.PIPE, stdout=result, stderr=errors,
            cwd="/", env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            with suppress(subprocess.TimeoutExpired):
                process.communicate(json.dumps(job).encode(), timeout=2 * seconds + 5)
        finally:
            process.kill()
            process.wait()
        limited, *lines = _text(result).split("\n")
        if limited != "limited":
            raise SandboxError(_text(errors).strip().rpartition("\n")[2] or "the process could not start")
    return [f"{token} {index}" in lines for index in range(len(tests))]


def on_all_cpus(function: Callable[..., Any], *rows: Iterable[Any]) -> list[Any]:
    """Return `map(function, *rows)`, as many calls at a time as this process may use CPUs."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(function, *rows))


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(MAX_RESULT_BYTES).decode(errors="replace")


def _filter(machine: str) -> bytes:
    """Return the seccomp program, 8 bytes an instruction: (code, jumps if true and if false, constant)."""
    if machine not in AUDIT_ARCH:
        raise SandboxError(f"no list of system calls for {machine}")
    arm = machine == "aarch64"
    program = [
        (LOAD, 0, 0, 4), (JUMP_EQUAL, 1, 0, AUDIT_ARCH[machine]), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0),
        (JUMP_GREATER_EQUAL, 0, 1, 0x40000000), (RETURN, 0, 0, REFUSE),  # x32's numbers
    ]  # fmt: skip
    for numbers in ALLOWED.values():
        number = numbers[arm]
        if number is not None:
            program += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    for *both, argument in OPEN.values():
        number = both[arm]
        if number is not None:
            flags = (LOAD, 0, 0, 16 + 8 * argument)
            allow_reading = [flags, (JUMP_IF_SET, 1, 0, WRITING), (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)]
            program += [(JUMP_EQUAL, 0, len(allow_reading), number), *allow_reading]
    program.append((RETURN, 0, 0, REFUSE))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def _limit_this_process(seconds: float, megabytes: int) -> None:
    """Set the limits for good. Raises SandboxError."""
    limits = {
        "CPU": math.ceil(seconds), "AS": megabytes * 2**20, "STACK": 64 * 2**20, "FSIZE": MAX_RESULT_BYTES,
        "NOFILE": 32, "NPROC": 0, "CORE": 0,
    }  # fmt: skip
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    program = _filter(platform.machine())
    text = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("HP", len(program) // 8, ctypes.addressof(text)))
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a sleeping process does not outlive the run
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    _prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(header))
    for name, attempt in (("started", os.fork), ("written", lambda: os.open("/tmp", os.O_WRONLY | os.O_TMPFILE))):
        with suppress(PermissionError):
            attempt()
            raise SandboxError(f"a process or file could still be {name}")


def _prctl(*arguments: int) -> None:
    values = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:5]]
    if ctypes.CDLL(None, use_errno=True).prctl(*values):
        raise SandboxError(f"prctl: {os.strerror(ctypes.get_errno())}")


def _run_job() -> None:
    """Read a job from stdin, and write a line to stdout when the limits are set and after each test that passed."""
    job: dict[str, Any] = json.load(sys.stdin)
    result = os.dup(1)
    sys.stdin, sys.stdout = open(os.devnull), open(os.devnull, "w")  # noqa: SIM115  open to the end
    _limit_this_process(job["seconds"], job["megabytes"])
    os.write(result, b"limited\n")
    module = sys.modules["response"] = types.ModuleType("response")  # pickle and dataclasses look for it
    names, run, build, write = module.__dict__, exec, compile, os.write  # the code may replace those of the modules
    run(build(job["code"], "response", "exec"), names)
    for index, test in enumerate(job["tests"]):
        with suppress(Exception):
            run(build(test, f"test {index}", "exec"), names)
            write(result, f"{job['token']} {index}\n".encode())


if __name__ == "__main__":
    _run_job()
