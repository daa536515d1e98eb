"""Runs Python code that a model wrote, with its tests, in a process that can only compute. Linux on x86-64 or Arm.

`sandbox.passed_tests` starts this file as a script, with the standard library alone. The process sets its limits, gives
up reading all files but Python's (Landlock, man 7 landlock) and all system calls but those listed in ALLOWED (seccomp,
man 2 seccomp), and only then runs the code: no process or thread can be started, no file opened for writing, no network
used, no signal sent. docs/security.md says what this does not promise.
"""

import ctypes
import hashlib
import marshal
import math
import os
import resource
import struct
import sys
import types
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from functools import partial

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
SIGKILL = 9  # the module signal, and typing, would take a third of the time to start
REPORT = "report a value"  # no name of Python
PASSED = "passed"  # what the process says of a test

# linux/bpf_common.h: the codes of a filter's instructions.
RETURN = 0x06
LOAD = 0x20
JUMP_EQUAL = 0x15
JUMP_GREATER_EQUAL = 0x35
JUMP_IF_SET = 0x45

# linux/seccomp.h and linux/prctl.h.
ALLOW = 0x7FFF0000
REFUSE = 0x00050001  # the call fails with EPERM
KILL = 0x80000000
PR_SET_PDEATHSIG = 1
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2

# linux/landlock.h: numbers of system calls, the same on all machines, and rights.
CREATE_RULESET = 444
ADD_RULE = 445
RESTRICT_SELF = 446
ALL_RIGHTS = 2**13 - 1
READ_FILE = 2**2
READ_FOLDER = 2**3
PATH_BENEATH = 1
READABLE = (
    "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/lib", "/lib64", "/etc/ld.so.cache",
    "/etc/localtime", "/dev/null", "/dev/urandom",
)  # fmt: skip


class SandboxError(Exception):
    """The limits cannot be set on this machine."""


def fingerprint(value: object) -> str:
    """Return a hash that is the same for values of built-in types if and only if they are equal; "-" for others."""
    try:
        return hashlib.sha256(_canonical(value).encode(errors="surrogatepass")).hexdigest()
    except TypeError:
        return "-"


def _canonical(value: object) -> str:
    if value is None or value is ...:
        return repr(value)
    if isinstance(value, complex):
        real = _canonical(value.real)
        return f"{real}+{_canonical(value.imag)}j" if value.imag else real
    if hasattr(value, "as_integer_ratio"):  # of all types of numbers: 1 == True == 1.0 == Fraction(1)
        try:
            above, below = value.as_integer_ratio()
            return f"{above:x}/{below:x}"
        except (OverflowError, ValueError):
            return repr(float(value))  # type: ignore[arg-type]  # inf or nan
    if isinstance(value, str):
        return str.__repr__(value)
    if isinstance(value, bytes | bytearray):
        return repr(bytes(value))
    if isinstance(value, list | tuple):
        items = ",".join(map(_canonical, value))
        return f"[{items}]" if isinstance(value, list) else f"({items})"
    if isinstance(value, Set):
        members = sorted(map(_canonical, value))
        return f"{{{','.join(members)}}}"
    if isinstance(value, Mapping):
        pairs = sorted(f"{_canonical(key)}:{_canonical(value[key])}" for key in value)
        return f"{{{','.join(pairs)}:}}"
    raise TypeError(type(value))


def _filter(machine: str) -> bytes:
    """Return the seccomp program, 8 bytes an instruction: (code, jumps if true and if false, constant)."""
    if machine not in AUDIT_ARCH:
        raise SandboxError(f"no list of system calls for {machine}")
    is_arm = machine == "aarch64"
    program = [
        (LOAD, 0, 0, 4),  # the architecture
        (JUMP_EQUAL, 1, 0, AUDIT_ARCH[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, 0),  # the number of the call
        (JUMP_GREATER_EQUAL, 0, 1, 0x40000000),  # x32's numbers
        (RETURN, 0, 0, REFUSE),
    ]
    for on_x86, on_arm in ALLOWED.values():
        number = on_arm if is_arm else on_x86
        if number is not None:
            program += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    for on_x86, on_arm, argument in OPEN.values():
        number = on_arm if is_arm else on_x86
        if number is not None:
            program += [
                (JUMP_EQUAL, 0, 4, number),
                (LOAD, 0, 0, 16 + 8 * argument),  # the flags
                (JUMP_IF_SET, 1, 0, WRITING),
                (RETURN, 0, 0, ALLOW),
                (RETURN, 0, 0, REFUSE),
            ]
    program.append((RETURN, 0, 0, REFUSE))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def _limit_this_process(parent: int, seconds: float, size: int) -> bool:
    """Set the limits for good. Returns False if other files than Python's can still be read. Raises SandboxError."""
    _prctl(PR_SET_PDEATHSIG, SIGKILL)  # a sleeping process does not outlive the run
    if os.getppid() != parent:
        raise SandboxError("the run has ended")

    program = _filter(os.uname().machine)
    text = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("HP", len(program) // 8, ctypes.addressof(text)))
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    hidden = _hide_files()

    limits = {
        resource.RLIMIT_CPU: math.ceil(seconds),
        resource.RLIMIT_STACK: 64 * 2**20,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: 32,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_AS: size,
    }
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(kind, (value, value))

    _prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(header))
    with suppress(PermissionError):
        os.fork()
        raise SandboxError("a process or file could still be started")
    with suppress(PermissionError):
        os.open("/tmp", os.O_WRONLY | os.O_TMPFILE)
        raise SandboxError("a process or file could still be written")
    return hidden


def _prctl(*arguments: int) -> None:
    values = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:5]]
    if ctypes.CDLL(None, use_errno=True).prctl(*values):
        raise SandboxError(f"prctl: {os.strerror(ctypes.get_errno())}")


def _hide_files() -> bool:
    """Give up opening files but READABLE and Python's, and what Linux shows of other processes. False: it cannot."""
    rights = struct.pack("Q", ALL_RIGHTS)
    rules = _landlock(CREATE_RULESET, rights, len(rights), 0)
    if rules < 0:
        return False
    library = os.path.dirname(os.path.dirname(os.__file__))  # with the C libraries that its modules load
    libraries = (library, *sys.path, *os.environ.get("LD_LIBRARY_PATH", "").split(":"))
    for path in filter(os.path.isabs, (*READABLE, *libraries)):
        with suppress(OSError):
            file = os.open(path, os.O_PATH)
            allowed = READ_FILE | READ_FOLDER if os.path.isdir(path) else READ_FILE
            _landlock(ADD_RULE, rules, PATH_BENEATH, struct.pack("=Qi", allowed, file), 0)
            os.close(file)
    hidden = _landlock(RESTRICT_SELF, rules, 0) == 0
    os.close(rules)
    return hidden


def _landlock(number: int, *arguments: int | bytes) -> int:
    values = [each if isinstance(each, bytes) else ctypes.c_long(each) for each in arguments]
    return int(ctypes.CDLL(None).syscall(ctypes.c_long(number), *values))


def _run_job() -> None:
    """Read a job from stdin. Write a line to stdout once the limits are set, and for each value and passed test."""
    job = sys.stdin.buffer.read()
    token, code, tests, seconds, megabytes = marshal.loads(job)
    result = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)
    try:
        hidden = _limit_this_process(int(sys.argv[1]), seconds, megabytes * 2**20 + 2 * len(job))
    except Exception as error:
        os.write(result, str(error).encode())
        raise SystemExit(1) from error
    os.write(result, f"{token} limited {hidden:d}\n".encode())
    _run(code, tests, partial(_say, os.write, result, token))


def _say(write: Callable[[int, bytes], int], result: int, token: str, *words: str | int) -> None:
    line = " ".join(map(str, (token, *words)))
    write(result, f"{line}\n".encode())


def _run(code: str, tests: list[bytes], say: Callable[..., None]) -> None:
    module = types.ModuleType("response")
    sys.modules["response"] = module  # pickle and dataclasses look for it
    names = module.__dict__
    run = exec  # the code may replace those of the modules
    load = marshal.loads
    run(compile(code, "response", "exec"), names)
    for index, test in enumerate(tests):
        with suppress(Exception):
            names[REPORT] = partial(_report, say, index)
            run(load(test), names)
            say(index, PASSED)


def _report(say: Callable[..., None], test: int, assertion: int, value: object, is_number: bool) -> None:
    text = float(value - 0).hex() if is_number else fingerprint(value)  # type: ignore[operator]  # no text is a number
    say(f"{test}.{assertion}", text)


if __name__ == "__main__":
    _run_job()
