"""Operating system: graceful shutdown on signals, limits of CPU time and memory, disk space and memory."""

import ctypes
import errno
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType

from rlhf_cli import distributed, terminal
from rlhf_cli.errors import RLHFError, first_names, shown

STOP_MESSAGE = b"\nstopping after this step, with a checkpoint; a second signal stops at once\n"
DEBOUNCE_S = 0.2  # a signal to a process group reaches a child twice, directly and through its parent
PR_SET_PDEATHSIG = 1  # linux/prctl.h
DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
# messages of safetensors and torch, which raise no OSError
DISK_FULL_MESSAGES = (
    "No space left on device",
    "File too large",
    "Disk quota exceeded",
    "file write failed",
    "unexpected pos",
)
# Variables of accelerate, which `accelerate launch` and its config file set: precision, sharding, compilation, device.
ACCELERATE_PREFIXES = ("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_")
NOT_COMPUTING = {
    "ACCELERATE_CPU_AFFINITY", "ACCELERATE_DEBUG_MODE", "ACCELERATE_ENABLE_RICH", "ACCELERATE_LOG_LEVEL",
}  # fmt: skip
OFF = {"", "0", "default", "false", "no", "none", "off"}  # in lower case; a plain `accelerate launch` sets no others
OUT_OF_MEMORY_MESSAGES = (
    "out of memory",
    "can't allocate memory",
    "Cannot allocate memory",
    "not enough memory",
    "bad_alloc",
    "can't start new thread",  # there is no memory for its stack, or the user may have no more threads
)


class GracefulStop:
    """Context that turns SIGINT, SIGTERM and SIGHUP into a request to stop after the step. Main thread only.

    `stop.sync(all_gather); if stop.requested: save; raise SystemExit(stop.exit_code)`. A second signal ends the
    process.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self._received: signal.Signals | None = None
        self._received_at = 0.0
        self._handlers: dict[signal.Signals, object] = {}

    @property
    def exit_code(self) -> int:
        """128 + the signal's number: 130 after SIGINT, 143 after SIGTERM, 129 after SIGHUP."""
        assert self.requested
        return 128 + self.requested

    def sync(self, all_gather: Callable[[signal.Signals | None], Iterable[signal.Signals | None]]) -> None:
        """Set `requested` on all ranks if any rank received a signal; `all_gather` collects the signals of the ranks.

        `requested` changes only here, because a signal reaches ranks at different times and all must stop at the same
        step.
        """
        if self.requested is None:
            self.requested = next((number for number in all_gather(self._received) if number), None)

    def __enter__(self) -> "GracefulStop":
        numbers = [number for number in self.SIGNALS if not is_nohup(number)]
        self._handlers = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._received is None:
            self._received = signal.Signals(number)
            self._received_at = time.monotonic()
            if distributed.is_main_process():
                with suppress(OSError):  # stderr may be closed
                    os.write(2, STOP_MESSAGE)  # unbuffered, because the signal may have interrupted a print
        elif time.monotonic() - self._received_at > DEBOUNCE_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


class Terminated(BaseException):
    """SIGTERM as an exception, so that open files and locks are closed on the way out."""


def raise_terminated(number: int, frame: FrameType | None) -> None:
    """Raise Terminated: a handler of SIGTERM."""
    raise Terminated


_fork = threading.local()  # mask: the signals that this thread blocked before it forks


def _hold_signals() -> None:
    """Block the signals until a fork is complete: a child would lose one that comes before its handlers are gone."""
    _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, GracefulStop.SIGNALS)


def _release_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)


def _restore_default_signals() -> None:
    """End on SIGTERM and SIGHUP in a forked child, such as a worker of a reward function's multiprocessing.Pool.

    A pool ends its workers by SIGTERM and waits for them: with our handlers they would go on. Ctrl-C reaches workers,
    too, and is left to the run, which finishes its step with their results.
    """
    for number in GracefulStop.SIGNALS:
        handler = signal.getsignal(number)
        if handler is raise_terminated or isinstance(getattr(handler, "__self__", None), GracefulStop):
            signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
    _release_signals()


os.register_at_fork(before=_hold_signals, after_in_parent=_release_signals, after_in_child=_restore_default_signals)


def is_nohup(number: signal.Signals) -> bool:
    """Return True if this is SIGHUP and the process was started to ignore it (nohup)."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def die_with_parent(parent: int) -> None:
    """Send this new child process SIGTERM when the process `parent` ends. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it has already ended
            os.kill(os.getpid(), signal.SIGTERM)


def remove_accelerate_variables() -> None:
    """Remove accelerate's settings from the environment. Warns E10 of those that would change what is computed.

    The config decides. accelerate would read them in TRL's trainers, and transformers where it loads weights.
    """
    names = [name for name in sorted(os.environ) if name.startswith(ACCELERATE_PREFIXES) and name not in NOT_COMPUTING]
    values = {name: os.environ.pop(name) for name in names}
    ignored = {name: value for name, value in values.items() if value.lower() not in OFF}
    if ignored:
        settings = first_names([f"{name}={value}" for name, value in ignored.items()])
        text = f"{settings} in the environment: accelerate's settings are ignored, the config decides what is computed"
        hint = "set precision, sharding and batches in the YAML (bf16, trainer, gradient_accumulation_steps); or unset "
        terminal.warn("E10", text, hint=hint + first_names(list(ignored)))


class CPUTimeExceeded(Exception):
    """Code in `cpu_time_limit` used more CPU time than allowed."""


@contextmanager
def cpu_time_limit(seconds: float) -> Iterator[None]:
    """Raise CPUTimeExceeded after `seconds` of this process's CPU time; waiting does not count.

    It is raised again until the code stops, which may catch it. Where Python never gets to raise it, SIGVTALRM ends the
    process after three times as long and a second, of its time outside the system. Without effect outside the main
    thread, the only one that receives signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    is_limited = True

    def stop(number: int, frame: FrameType | None) -> None:
        if is_limited:
            raise CPUTimeExceeded

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds, 0.1)
    signal.setitimer(signal.ITIMER_VIRTUAL, 3 * seconds + 1)
    try:
        try:
            yield
        finally:
            is_limited = False
    finally:  # also if it was raised just before
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGPROF, before)


@contextmanager
def memory_limit(max_bytes: int) -> Iterator[None]:
    """Raise MemoryError where this process would map `max_bytes` more than now.

    Without effect outside the main thread, and on other systems than Linux.
    """
    if sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        yield
        return
    import psutil

    process = psutil.Process()
    soft, hard = process.rlimit(psutil.RLIMIT_AS)
    limits = [limit for limit in (soft, hard) if limit != psutil.RLIM_INFINITY]
    process.rlimit(psutil.RLIMIT_AS, (min([process.memory_info().vms + max_bytes, *limits]), hard))
    try:
        yield
    finally:
        process.rlimit(psutil.RLIMIT_AS, (soft, hard))


class OutOfResources(RLHFError):
    """E03 raised at run time, when disk or memory ran out."""

    exit_code = 1  # the command had started


@contextmanager
def translate_resource_errors(folder: Path) -> Iterator[None]:
    """Turn the errors that libraries raise on a full disk or memory into OutOfResources; `folder` is being written."""
    try:
        yield
    except RLHFError:
        raise
    except Exception as error:
        causes: list[BaseException] = []
        cause: BaseException | None = error
        while cause is not None and cause not in causes:
            causes.append(cause)
            cause = cause.__cause__ or cause.__context__
        if any(map(is_out_of_memory, causes)):
            text = f"out of memory: {' '.join(str(error).split())[:160] or 'allocation failed'}"
            hint = "lower the batch size or the lengths, or use a smaller model"
            raise OutOfResources("E03", text, where=shown(folder), hint=hint) from error
        for cause in causes:
            number = cause.errno if isinstance(cause, OSError) else None
            if number in DISK_FULL or any(message in str(cause) for message in DISK_FULL_MESSAGES):
                reason = (os.strerror(number) if number else " ".join(str(cause).split()))[:160]
                available = free_disk_bytes(folder)
                text = f"could not write to disk: {reason}"
                text += "" if available is None else f"; {format_bytes(available)} are free there"
                hint = "free some disk space and run the same command again; a stage resumes from its last checkpoint"
                raise OutOfResources("E03", text, where=shown(folder), hint=hint) from error
        raise


def free_disk_bytes(folder: Path) -> int | None:
    """Return the free bytes on the disk of `folder`, which may not exist yet; None if the size is not reported."""
    usage = shutil.disk_usage(nearest_existing(folder))
    return usage.free if usage.total else None


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all readable files below a folder, without following links."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # deleted meanwhile
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def nearest_existing(folder: Path) -> Path:
    """Return the folder, or its closest parent that exists."""
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))


def require_writable(folder: Path, *, where: str | None = None, hint: str) -> None:
    """Raise RLHFError E03 if the folder cannot be created or written."""
    existing = nearest_existing(folder)
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        reason = "is read-only" if existing.is_dir() else "is a file"
        raise RLHFError("E03", f"{shown(folder)} cannot be written: {shown(existing)} {reason}", where=where, hint=hint)


def total_memory() -> int:
    """Return the bytes of this machine's memory, or of the container's limit."""
    import psutil  # not needed by the library

    total = psutil.virtual_memory().total
    with suppress(OSError, ValueError):  # no cgroup, no limit ("max"), or not Linux
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


def process_memory() -> int:
    """Return the resident memory of this process in bytes."""
    import psutil

    return psutil.Process().memory_info().rss


def format_bytes(count: float) -> str:
    """Return a number of bytes as text."""
    units = ["bytes", "kB", "MB", "GB"]
    power = min(len(units) - 1, int(math.log10(max(count, 1)) / 3))
    return f"{count / 1000**power:.{0 if power == 0 else 1}f} {units[power]}"


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for the out-of-memory errors of Python and the libraries."""
    return isinstance(error, MemoryError) or any(message in str(error) for message in OUT_OF_MEMORY_MESSAGES)
