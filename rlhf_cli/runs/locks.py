"""Locks of folders, exclusive for one writer and shared for readers, and output folders written under a lock.

Both kinds lock the same file with flock. filelock's ReadWriteLock would use another file (SQLite), which `lock_folder`
does not see.
"""

import errno
import fcntl
import os
import platform
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from filelock import FileLock, Timeout
from pydantic import BaseModel, Field

from rlhf_cli import system
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.files import atomic_folder, list_files, read_json_object, remove, sync_files
from rlhf_cli.terminal import duration

START_TIME_TOLERANCE_S = 2.0
_exclusive: dict[Path, FileLock] = {}
_shared: dict[Path, int] = {}  # file descriptors
NEW_FOLDER_HINT = "name a new or an empty folder"
SCRATCH_NAME = ".export"
OUT_HINT = "name another folder: --out DIR"
LOCKED = (errno.EACCES, errno.EAGAIN, errno.EWOULDBLOCK)


class LockOwner(BaseModel):
    """The process that has locked a folder, as the lock file records it."""

    pid: int = Field(gt=0, lt=2**31)
    host: str
    since: float = Field(ge=0, lt=2**32)  # seconds of the epoch
    started: float | None = None  # of the process, in seconds after the start of the machine
    inode: int  # of the lock file: a copy of a folder that is being written has another

    @property
    def is_elsewhere(self) -> bool:
        """Return True for a process of another machine: whether it has ended cannot be seen from here."""
        return self.host != platform.node()

    def __str__(self) -> str:
        place = f" on {self.host}" if self.is_elsewhere else ""
        return f"process {self.pid}{place}, for {duration(max(0.0, time.time() - self.since))}"


def lock_path(folder: Path) -> Path:
    """Return the lock file of a folder."""
    return folder.parent / f".{folder.name}.lock"


def lock_folder(folder: Path, *, hint: str = "wait for it to end, or set `run:` to another folder") -> None:
    """Lock a folder for writing until `release` or the end of the process, however it ends.

    The lock is beside the folder, so that the folder can be moved. Raises C15 if another process writes or reads it,
    or if its name is taken by a link or a folder.
    """
    if folder in _exclusive:
        return
    lock = FileLock(lock_path(folder))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise _used_by_another(folder, hint) from None
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR):
            raise
        text = f"{shown(lock_path(folder))} is a link or a folder, and rlhf needs that name for a lock"
        raise RLHFError("C15", text, hint="move it away, then run the same command again") from error
    _exclusive[folder] = lock
    inode = lock_path(folder).stat().st_ino
    started = _since_boot(psutil.Process())
    owner = LockOwner(pid=os.getpid(), host=platform.node(), since=round(time.time(), 3), started=started, inode=inode)
    _note(folder, owner.model_dump_json())


@contextmanager
def locked(folder: Path, *, hint: str) -> Iterator[None]:
    """Lock a folder for writing, and delete the lock file at the end. Raises C15 as `lock_folder`."""
    lock_folder(folder, hint=hint)
    try:
        yield
    finally:
        lock_path(folder).unlink(missing_ok=True)  # before release: the next owner of a lock sees the result
        release(folder)


def is_locked_here(folder: Path) -> bool:
    """Return True if this process has locked the folder for writing."""
    return folder in _exclusive


def is_writing() -> bool:
    """Return True if this process has locked any folder for writing."""
    return bool(_exclusive)


def _used_by_another(folder: Path, hint: str) -> RLHFError:
    owner = lock_owner(folder)  # only writers are recorded
    text = f"another process is {'writing' if owner else 'reading'} {shown(folder)}" + (f": {owner}" if owner else "")
    return RLHFError("C15", text, hint=hint)


def lock_folder_shared(folder: Path) -> None:
    """Take the shared lock of a folder until `release_shared`: other processes may read it, none may write it.

    Does nothing if the lock file cannot be opened (no permission, read-only disk) or the file system has no locks.
    Raises C15 if another process is writing the folder.
    """
    if folder in _shared or folder in _exclusive or (descriptor := _open_lock(lock_path(folder))) is None:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in LOCKED:
            raise _used_by_another(folder, "wait for it to end") from None
        return
    _shared[folder] = descriptor


def _open_lock(lock: Path) -> int | None:
    for flags in (os.O_RDWR | os.O_CREAT, os.O_RDONLY):
        with suppress(OSError):
            return os.open(lock, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    return None


def release_shared() -> None:
    """Release all shared locks of this process."""
    while _shared:
        _, descriptor = _shared.popitem()
        os.close(descriptor)


def release(folder: Path | None = None) -> None:
    """Release one folder, or all that this process has locked."""
    if folder is None:
        release_shared()
    for path in [folder] if folder else list(_exclusive):
        if lock := _exclusive.pop(path, None):
            _note(path, "")
            lock.release()


def lock_owner(folder: Path) -> LockOwner | None:
    """Return the process recorded in a folder's lock, or None if it has ended. Does not take the lock.

    A process of another machine cannot be checked and counts as running.
    """
    try:
        owner = LockOwner.model_validate(read_json_object(lock_path(folder)))
        is_own_file = owner.inode == lock_path(folder).stat().st_ino
    except (RLHFError, OSError, ValueError):  # missing, unreadable, or no such record
        return None
    return owner if is_own_file and _is_running(owner) else None


def _note(folder: Path, record: str) -> None:
    """Write the owner into the lock file. Failures are ignored, and a missing file is not created."""
    if not lock_path(folder).is_file():
        return
    with suppress(OSError), open(lock_path(folder), "r+b") as file:
        if (first := file.read(1)) and first != b"{":
            return  # without flock, the file itself is filelock's lock
        file.truncate(0)
        file.seek(0)
        file.write(record.encode())


def _is_running(owner: LockOwner) -> bool:
    """Return True unless the process has ended; one that began at another time has only its number."""
    if owner.is_elsewhere:
        return True
    try:
        process = psutil.Process(owner.pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return owner.started is None or abs(_since_boot(process) - owner.started) < START_TIME_TOLERANCE_S
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True  # another user's process


def _since_boot(process: psutil.Process) -> float:
    """Return a process's start in seconds after that of the machine, which setting the clock does not change."""
    return float(process.create_time() - psutil.boot_time())


def require_empty(folder: Path) -> None:
    """Raise RLHFError C15 if the folder contains anything, E03 if it cannot be written."""
    if folder == Path.cwd():
        text = f"cannot replace the working directory {folder}"
        raise RLHFError("C15", text, hint="name a new folder, e.g. one inside it")
    if folder.is_file():
        raise RLHFError("C15", f"{shown(folder)} is a file", hint=NEW_FOLDER_HINT)
    if names := sorted(path.name for path in folder.glob("*")):
        more = f" and {len(names) - 1} more" if names[1:] else ""
        text = f"{shown(folder)} is not empty: it holds {names[0]}{more}; nothing is overwritten"
        raise RLHFError("C15", text, hint=NEW_FOLDER_HINT)
    system.require_writable(folder, hint="name a folder elsewhere")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a hidden temporary folder that is flushed to disk and renamed to `folder` at the end of the context.

    On an exception it is deleted. A killed process leaves it; the next one with the same target deletes it. Raises
    RLHFError as `require_empty`, C15 if another process is writing the folder.
    """
    system.require_writable(folder.parent, hint="name a folder elsewhere")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder, hint="wait for it to end, or name another folder"):
        require_empty(folder)
        for path in folder.parent.glob(".tmp-*"):
            if re.fullmatch(rf"\.tmp-{re.escape(folder.name)}-\d+", path.name):
                remove(path, ignore_errors=True)
        with atomic_folder(folder) as scratch:
            yield scratch
            sync_files(scratch, list_files(scratch))


@contextmanager
def scratch_folder(run: Path) -> Iterator[Path]:
    """Yield the path of a hidden folder in a run, not created yet, and delete it at the end.

    On an RLHFError, whose message may name it, it is kept until the next call. Raises RLHFError E03 if the run cannot
    be written, C15 if another process is using the folder.
    """
    folder = run / SCRATCH_NAME
    system.require_writable(folder, hint=OUT_HINT)
    with locked(run / SCRATCH_NAME.lstrip("."), hint=f"wait for it to end, or {OUT_HINT}"):
        remove(folder)
        try:
            yield folder
        except RLHFError:
            raise
        except BaseException:
            remove(folder, ignore_errors=True)
            raise
        remove(folder)
