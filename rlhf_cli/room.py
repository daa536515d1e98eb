"""Room on the disk and in memory: how much there is, and what the libraries call it when there is none left (E03)."""

import errno
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from rlhf_cli.errors import RLHFError, shown

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
# safetensors and torch tell it in words of their own, where no error of the system's stands behind.
FULL_WORDS = ("No space left on device", "File too large", "Disk quota exceeded", "file write failed", "unexpected pos")
MEMORY_WORDS = ("out of memory", "can't allocate memory", "Cannot allocate memory", "not enough memory", "bad_alloc")


class OutOfRoom(RLHFError):
    """E03 on the way, where nothing could be checked any more: the command failed, its beginning was right."""

    @property
    def exit_code(self) -> int:
        """1: the command had begun."""
        return 1


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Within, what any library raises on a full disk, or out of memory, becomes OutOfRoom; `folder` is written."""
    try:
        yield
    except Exception as error:
        told = None if isinstance(error, RLHFError) else _told(error, folder)
        if told is None:
            raise
        raise told from error


def free(folder: Path) -> int | None:
    """Bytes that are free where `folder` is, or is to be; None where the file system does not tell its size."""
    usage = shutil.disk_usage(existing(folder))
    return usage.free if usage.total else None


def used(folder: Path) -> int:
    """Bytes of all files below a folder, as far as they can be seen; links are not followed."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # gone by now
                total += os.lstat(os.path.join(where, name)).st_size
    return total


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))


def require_writable(folder: Path, *, where: str | None = None, hint: str) -> None:
    """Raises RLHFError E03 where the folder cannot be made, or written."""
    above = existing(folder)
    if not (above.is_dir() and os.access(above, os.W_OK)):
        reason = "is read-only" if above.is_dir() else "is a file"
        text = f"{shown(folder)} cannot be written: {shown(above)} {reason}"
        raise RLHFError("E03", text, where=where, hint=hint)


def memory() -> int:
    """Bytes of this machine's memory, or fewer where a container is allowed fewer."""
    whole = psutil.virtual_memory().total
    try:
        return min(whole, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no such group, no limit ("max"), or no Linux
        return whole


def resident() -> int:
    """Bytes of memory that this process holds now."""
    return psutil.Process().memory_info().rss


def size(count: float) -> str:
    """Bytes in words."""
    units = ["bytes", "kB", "MB", "GB"]
    power = min(len(units) - 1, int(math.log10(max(count, 1)) / 3))
    return f"{count / 1000**power:.{0 if power == 0 else 1}f} {units[power]}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the memory is full, in whatever words."""
    return isinstance(error, MemoryError) or any(word in str(error) for word in MEMORY_WORDS)


def _told(error: Exception, folder: Path) -> OutOfRoom | None:
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    if any(map(is_out_of_memory, causes)):
        text = f"the memory is full: {' '.join(str(error).split())[:160] or 'nothing more could be taken'}"
        hint = "lower the batch size or the lengths, or use a smaller model"
        return OutOfRoom("E03", text, where=shown(folder), hint=hint)
    for one in causes:
        number = one.errno if isinstance(one, OSError) else None
        if number in FULL or any(word in str(one) for word in FULL_WORDS):
            said = (os.strerror(number) if number else " ".join(str(one).split()))[:160]
            left = free(folder)
            text = f"the disk cannot take what is to be written: {said}"
            text += "" if left is None else f"; {size(left)} are free there"
            hint = "make room there; the same command then goes on, a stage from its last state"
            return OutOfRoom("E03", text, where=shown(folder), hint=hint)
    return None
