"""One process at a time may write a stage's folder."""

from pathlib import Path

from filelock import FileLock, Timeout

from rlhf_cli.errors import RLHFError, shown

_held: dict[Path, FileLock] = {}


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
        text = f"another process is writing {shown(folder)}"
        raise RLHFError("C15", text, hint=hint) from None
    _held[folder] = lock


def release(folder: Path | None = None) -> None:
    """Let one folder go, or all that this process holds."""
    for path in [folder] if folder else list(_held):
        if lock := _held.pop(path, None):
            lock.release()
