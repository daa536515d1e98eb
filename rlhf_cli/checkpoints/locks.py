"""One process at a time may write a stage's folder, and tells in its lock who it is: others look, and take nothing."""

import json
import os
import platform
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from rlhf_cli.checkpoints.files import read_object
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.times import duration

_held: dict[Path, FileLock] = {}


@dataclass(frozen=True)
class Holder:
    """The process that has a folder."""

    pid: int
    host: str
    since: float  # seconds of the epoch

    def __str__(self) -> str:
        place = "" if self.host == platform.node() else f" on {self.host}"
        return f"process {self.pid}{place}, for {duration(max(0.0, time.time() - self.since))}"


def lock_of(folder: Path) -> Path:
    """The file that says who has a folder."""
    return folder.parent / f".{folder.name}.lock"


def hold(folder: Path, *, hint: str = "wait for it to end, or set `run:` to another folder") -> None:
    """Take a folder for this process, until `release` or the end of the process, however it ends.

    The lock lies beside the folder, so that the folder itself can be moved. Raises C15 where another process has it.
    """
    if folder in _held:
        return
    lock = FileLock(lock_of(folder))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        who = holder(folder)
        text = f"another process is writing {shown(folder)}" + (f": {who}" if who else "")
        raise RLHFError("C15", text, hint=hint) from None
    _held[folder] = lock
    me = Holder(os.getpid(), platform.node(), round(time.time(), 3))
    _note(folder, asdict(me) | {"started": _started(me.pid), "inode": lock_of(folder).stat().st_ino})


def release(folder: Path | None = None) -> None:
    """Let one folder go, or all that this process holds."""
    for path in [folder] if folder else list(_held):
        if lock := _held.pop(path, None):
            _note(path, None)
            lock.release()


def holder(folder: Path) -> Holder | None:
    """The process that has a folder, as its lock tells; None where that process is gone. Takes and changes nothing.

    One of another machine cannot be asked whether it still runs: it is believed.
    """
    told = read_object(lock_of(folder)) or {}
    pid, host, since = told.get("pid"), told.get("host"), told.get("since")
    if not (isinstance(pid, int) and 0 < pid < 2**31 and isinstance(host, str)):
        return None
    if not (isinstance(since, int | float) and 0 <= since < 2**32):
        return None
    with suppress(OSError):
        # Another inode: the copy of a folder that was being written.
        here = host == platform.node()
        if told.get("inode") == lock_of(folder).stat().st_ino and (not here or _runs(pid, told.get("started"))):
            return Holder(pid, host, since)
    return None


def _note(folder: Path, who: dict[str, Any] | None) -> None:
    """Write into the lock who holds it. A file that is gone stays gone, and what cannot be told hinders nobody."""
    with suppress(OSError), open(lock_of(folder), "r+b") as file:
        if (first := file.read(1)) and first != b"{":
            return  # where the file system knows no locks the file itself is the lock, in filelock's words
        file.truncate(0)
        file.seek(0)
        file.write(json.dumps(who).encode() if who else b"")


def _runs(pid: int, started: Any) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's
    return _started(pid) == started


def _started(pid: int) -> str | None:
    """When a process began, in ticks since the machine did: a number given again is another process. Linux alone."""
    try:
        told = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *fields = told.rpartition(")")[2].split()
    return None if state == "Z" else fields[18]  # proc(5): the 22nd of all, the name may hold spaces
