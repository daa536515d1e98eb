"""One process at a time may write a stage's folder, and tells in its lock who it is; several may read it together.

Both lock the same file by flock, shared or alone. filelock's ReadWriteLock would be another file, of SQLite, which
`lock_folder` does not see.
"""

import errno
import fcntl
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from rlhf_cli import system
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.files import atomic_folder, list_files, read_json_object, sync_files
from rlhf_cli.terminal import duration

SAME = 5.0  # seconds between two readings of when a process began: elsewhere than on Linux a set clock moves them
_held: dict[Path, FileLock] = {}
_read: dict[Path, int] = {}  # descriptors of locks that are shared
ELSEWHERE = "name a folder that is not there yet, or an empty one"
PASSING, IN_SIGHT = ".export", "name a folder of your own: --out DIR"
TAKEN = (errno.EACCES, errno.EAGAIN, errno.EWOULDBLOCK)


@dataclass(frozen=True)
class LockOwner:
    """The process that has a folder."""

    pid: int
    host: str
    since: float  # seconds of the epoch

    def __str__(self) -> str:
        place = "" if self.host == platform.node() else f" on {self.host}"
        return f"process {self.pid}{place}, for {duration(max(0.0, time.time() - self.since))}"


def lock_path(folder: Path) -> Path:
    """The file that says who has a folder."""
    return folder.parent / f".{folder.name}.lock"


def lock_folder(folder: Path, *, hint: str = "wait for it to end, or set `run:` to another folder") -> None:
    """Take a folder for this process, until `release` or the end of the process, however it ends.

    The lock lies beside the folder, so that the folder itself can be moved. Raises C15 where another process has it,
    or reads it.
    """
    if folder in _held:
        return
    lock = FileLock(lock_path(folder))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if pids := _readers(folder):
            text = f"another process is reading {shown(folder)}: process {', '.join(map(str, pids))}"
            raise RLHFError("C15", text, hint=hint) from None
        raise _written_by_another(folder, hint) from None
    _held[folder] = lock
    me = LockOwner(os.getpid(), platform.node(), round(time.time(), 3))
    _note(folder, asdict(me) | {"started": _started(me.pid), "inode": lock_path(folder).stat().st_ino})


def is_locked_here(folder: Path) -> bool:
    """Whether this process writes a folder."""
    return folder in _held


def _written_by_another(folder: Path, hint: str) -> RLHFError:
    who = lock_owner(folder)
    text = f"another process is writing {shown(folder)}" + (f": {who}" if who else "")
    return RLHFError("C15", text, hint=hint)


def lock_folder_shared(folder: Path) -> None:
    """Take the shared lock of a folder until `release_shared`: other processes may read it, none may write it.

    Does nothing if the lock file cannot be opened (no permission, read-only disk) or the file system has no locks.
    Raises C15 if another process is writing the folder.
    """
    if folder in _read or folder in _held or (descriptor := _opened(lock_path(folder))) is None:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in TAKEN:
            raise _written_by_another(folder, "wait for it to end") from None
        return
    _read[folder] = descriptor


def _opened(lock: Path) -> int | None:
    for flags in (os.O_RDWR | os.O_CREAT, os.O_RDONLY):
        with suppress(OSError):
            return os.open(lock, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    return None


def release_shared() -> None:
    """Let go of all folders that this process reads."""
    while _read:
        _, descriptor = _read.popitem()
        os.close(descriptor)


def _readers(folder: Path) -> list[int]:
    """The processes that share a folder's lock, as Linux knows them (proc_locks(5)); none are known elsewhere."""
    try:
        inode = str(lock_path(folder).stat().st_ino)
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    found = [line.split() for line in lines]
    # By the inode alone: a subvolume has another device number in this file.
    held = [words for words in found if words[1:4] == ["FLOCK", "ADVISORY", "READ"]]
    pids = {int(words[4]) for words in held if words[5].rpartition(":")[2] == inode}
    return sorted(pids - {os.getpid()})


def release(folder: Path | None = None) -> None:
    """Let one folder go, or all that this process holds or reads."""
    if folder is None:
        release_shared()
    for path in [folder] if folder else list(_held):
        if lock := _held.pop(path, None):
            _note(path, None)
            lock.release()


def lock_owner(folder: Path) -> LockOwner | None:
    """The process that has a folder, as its lock tells; None where that process is gone. Takes and changes nothing.

    One of another machine cannot be asked whether it still runs: it is believed.
    """
    told: dict[str, Any] = {}
    with suppress(RLHFError):  # a lock that may not be read names nobody
        told = read_json_object(lock_path(folder)) or {}
    pid, host, since = told.get("pid"), told.get("host"), told.get("since")
    if not (isinstance(pid, int) and 0 < pid < 2**31 and isinstance(host, str)):
        return None
    if not (isinstance(since, int | float) and 0 <= since < 2**32):
        return None
    with suppress(OSError):
        # Another inode: the copy of a folder that was being written.
        here = host == platform.node()
        if told.get("inode") == lock_path(folder).stat().st_ino and (not here or _runs(pid, told.get("started"))):
            return LockOwner(pid, host, since)
    return None


def _note(folder: Path, who: dict[str, Any] | None) -> None:
    """Write into the lock who holds it. A file that is gone stays gone, and what cannot be told hinders nobody."""
    with suppress(OSError), open(lock_path(folder), "r+b") as file:
        if (first := file.read(1)) and first != b"{":
            return  # where the file system knows no locks the file itself is the lock, in filelock's words
        file.truncate(0)
        file.seek(0)
        file.write(json.dumps(who).encode() if who else b"")


def _runs(pid: int, started: Any) -> bool:
    """Whether a process runs that began at `started`: a number given again is another process."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return not isinstance(started, int | float) or abs(_since_boot(process) - started) < SAME
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True  # somebody else's, and it is there


def _started(pid: int) -> float | None:
    """When a process began, in seconds since the system did."""
    try:
        return _since_boot(psutil.Process(pid))
    except psutil.Error:
        return None


def _since_boot(process: psutil.Process) -> float:
    """psutil adds the clock's time of the start of the system, which changes as the clock is set: it cancels here."""
    return process.create_time() - psutil.boot_time()


def require_empty(folder: Path) -> None:
    """Raises RLHFError C15 where something is in the folder, E03 where it cannot be written."""
    if folder == Path.cwd():
        text = f"{folder} is the working directory, which a new folder would take the place of"
        raise RLHFError("C15", text, hint="name a folder that is not there yet, e.g. one inside of it")
    if folder.is_file():
        raise RLHFError("C15", f"{shown(folder)} is a file", hint=ELSEWHERE)
    if found := sorted(path.name for path in folder.glob("*")):
        more = f" and {len(found) - 1} more" if found[1:] else ""
        text = f"{shown(folder)} is not empty: it holds {found[0]}{more}; nothing is overwritten"
        raise RLHFError("C15", text, hint=ELSEWHERE)
    system.require_writable(folder, hint="name a folder elsewhere")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Within, a hidden folder beside `folder` to write into; at the end it is forced to the disk, and takes its place.

    Whatever is raised within comes through, and leaves nothing. A process that is killed leaves the hidden folder: the
    next one for the same place deletes it. Raises RLHFError as `require_empty`, C15 where another process is at it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock_folder(folder, hint="wait for it to end, or name another folder")
    try:
        require_empty(folder)
        for path in folder.parent.glob(".tmp-*"):
            if re.fullmatch(rf"\.tmp-{re.escape(folder.name)}-\d+", path.name):
                shutil.rmtree(path, ignore_errors=True)
        with atomic_folder(folder) as scratch:
            yield scratch
            sync_files(scratch, list_files(scratch))
    finally:
        lock_path(folder).unlink(missing_ok=True)  # first: whoever takes a new lock finds what is done
        release(folder)


@contextmanager
def scratch_folder(run: Path) -> Iterator[Path]:
    """Within, the path of a hidden folder in a run, for what goes elsewhere; nothing is there yet.

    At the end it is deleted. Where an RLHFError is raised within, which may tell of it, it stays until the next time.
    Raises RLHFError E03 where nothing can be written there, C15 where another process is at it.
    """
    folder, place = run / PASSING, run / PASSING.lstrip(".")
    system.require_writable(folder, hint=IN_SIGHT)
    lock_folder(place, hint=f"wait for it to end, or {IN_SIGHT}")
    try:
        if folder.exists():
            shutil.rmtree(folder)
        yield folder
        shutil.rmtree(folder)
    except RLHFError:
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        lock_path(place).unlink(missing_ok=True)
        release(place)
