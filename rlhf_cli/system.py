"""SIGTERM, SIGINT and SIGHUP as a wish, not a blow: the loop ends at its next safe place.

A second signal ends the process at once. And a bound on work that others decide the length of.
"""

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

import psutil

from rlhf_cli import distributed
from rlhf_cli.errors import RLHFError, shown

STOP_MESSAGE = b"\nstopping after this step, with a checkpoint; a second signal ends it at once\n"
DEBOUNCE_S = 0.2  # seconds: what stops a whole group of processes reaches a child twice, itself and through its parent


class GracefulStop:
    """`with StopWish() as stop:` ...

    `stop.sync(all_gather); if stop.requested: save; raise SystemExit(stop.exit_code)`. Only in the main thread.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self._heard: signal.Signals | None = None
        self._heard_at = 0.0
        self._before: dict[signal.Signals, object] = {}

    @property
    def exit_code(self) -> int:
        """128 + the signal's number: 130 after SIGINT, 143 after SIGTERM, 129 after SIGHUP."""
        assert self.requested
        return 128 + self.requested

    def sync(self, told: Callable[[signal.Signals | None], Iterable[signal.Signals | None]]) -> None:
        """Make a signal that came to any process of a group by now the wish of all; `told` says what each one heard.

        The wish changes here alone. A signal comes at any time, to one of them, and all must end at the same place.
        """
        if self.requested is None:
            self.requested = next((heard for heard in told(self._heard) if heard), None)

    def __enter__(self) -> "GracefulStop":
        numbers = [number for number in self.SIGNALS if not is_nohup(number)]
        self._before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._heard is None:
            self._heard, self._heard_at = signal.Signals(number), time.monotonic()
            if distributed.is_main_process():
                with suppress(OSError):  # whoever read it may be gone
                    os.write(2, STOP_MESSAGE)  # straight to the terminal: a print may be what was interrupted
        elif time.monotonic() - self._heard_at > DEBOUNCE_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def is_nohup(number: signal.Signals) -> bool:
    """Whether this is the hang-up of a terminal, and somebody asked to outlive it."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int) -> None:
    """In a new child of the process `parent`: SIGTERM when that one is gone, however it went. On Linux alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it was quicker
            os.kill(os.getpid(), signal.SIGTERM)


class CPUTimeExceeded(Exception):
    """Work took longer than `cpu_time_limit` lets it."""


@contextmanager
def cpu_time_limit(seconds: float) -> Iterator[None]:
    """Within, TooLong after so many seconds of the process's own computing; waiting, or a busy machine, does not count.

    Only in the main thread, which alone hears signals; in another one there is no bound.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise CPUTimeExceeded

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
# safetensors and torch tell it in words of their own, where no error of the system's stands behind.
FULL_WORDS = ("No space left on device", "File too large", "Disk quota exceeded", "file write failed", "unexpected pos")
MEMORY_WORDS = ("out of memory", "can't allocate memory", "Cannot allocate memory", "not enough memory", "bad_alloc")


class OutOfResources(RLHFError):
    """E03 on the way, where nothing could be checked any more: the command failed, its beginning was right."""

    @property
    def exit_code(self) -> int:
        """1: the command had begun."""
        return 1


@contextmanager
def translate_resource_errors(folder: Path) -> Iterator[None]:
    """Within, what any library raises on a full disk, or out of memory, becomes OutOfRoom; `folder` is written."""
    try:
        yield
    except Exception as error:
        told = None if isinstance(error, RLHFError) else _told(error, folder)
        if told is None:
            raise
        raise told from error


def free_disk_bytes(folder: Path) -> int | None:
    """Bytes that are free where `folder` is, or is to be; None where the file system does not tell its size."""
    usage = shutil.disk_usage(nearest_existing(folder))
    return usage.free if usage.total else None


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder, as far as they can be seen; links are not followed."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # gone by now
                total += os.lstat(os.path.join(where, name)).st_size
    return total


def nearest_existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))


def require_writable(folder: Path, *, where: str | None = None, hint: str) -> None:
    """Raises RLHFError E03 where the folder cannot be made, or written."""
    above = nearest_existing(folder)
    if not (above.is_dir() and os.access(above, os.W_OK)):
        reason = "is read-only" if above.is_dir() else "is a file"
        text = f"{shown(folder)} cannot be written: {shown(above)} {reason}"
        raise RLHFError("E03", text, where=where, hint=hint)


def total_memory() -> int:
    """Bytes of this machine's memory, or fewer where a container is allowed fewer."""
    whole = psutil.virtual_memory().total
    try:
        return min(whole, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no such group, no limit ("max"), or no Linux
        return whole


def process_memory() -> int:
    """Bytes of memory that this process holds now."""
    return psutil.Process().memory_info().rss


def format_bytes(count: float) -> str:
    """Bytes in words."""
    units = ["bytes", "kB", "MB", "GB"]
    power = min(len(units) - 1, int(math.log10(max(count, 1)) / 3))
    return f"{count / 1000**power:.{0 if power == 0 else 1}f} {units[power]}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the memory is full, in whatever words."""
    return isinstance(error, MemoryError) or any(word in str(error) for word in MEMORY_WORDS)


def _told(error: Exception, folder: Path) -> OutOfResources | None:
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    if any(map(is_out_of_memory, causes)):
        text = f"the memory is full: {' '.join(str(error).split())[:160] or 'nothing more could be taken'}"
        hint = "lower the batch size or the lengths, or use a smaller model"
        return OutOfResources("E03", text, where=shown(folder), hint=hint)
    for one in causes:
        number = one.errno if isinstance(one, OSError) else None
        if number in FULL or any(word in str(one) for word in FULL_WORDS):
            said = (os.strerror(number) if number else " ".join(str(one).split()))[:160]
            left = free_disk_bytes(folder)
            text = f"the disk cannot take what is to be written: {said}"
            text += "" if left is None else f"; {format_bytes(left)} are free there"
            hint = "make room there; the same command then goes on, a stage from its last state"
            return OutOfResources("E03", text, where=shown(folder), hint=hint)
    return None
