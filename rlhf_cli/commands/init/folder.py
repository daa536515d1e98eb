"""Write the files of `rlhf init` into a folder: all of them, or none."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from filecmp import cmp
from pathlib import Path

from rlhf_cli import runs, system, terminal
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.files import remove, sync_files
from rlhf_cli.runs.locks import locked

UNTOUCHED = "nothing was written; name another folder"
LOCKED = "wait for it to end, or name another folder"
LOCK = "init"  # names the lock file; there is no such path
SCRATCH = ".tmp-init"  # scratch folder inside a folder that existed before
PLACED = ".tmp-init-placed"  # its name after all files are linked
MAX_LISTED_NAMES = 5


@contextmanager
def all_or_nothing(folder: Path) -> Iterator[Path]:
    """Yield a scratch folder whose files appear in `folder` at the end, all of them or none.

    A new folder is created atomically. In an existing one, identical files are kept. An exception in the block leaves
    nothing behind. Raises RLHFError C15 before anything is written if `folder` is a file, holds different files of the
    same names or is locked by another process; E03 if it cannot be written.
    """
    if not os.path.lexists(folder):
        with runs.new_folder(folder) as scratch:
            yield scratch
        return
    if not folder.is_dir():
        raise RLHFError("C15", f"{shown(folder)} is not a folder", hint=UNTOUCHED)
    system.require_writable(folder, hint="name another folder")
    remove_leftovers(folder)
    with locked(folder / LOCK, hint=LOCKED):
        scratch = folder / SCRATCH
        for path in (scratch, folder / PLACED):
            if os.path.lexists(path):
                text = f"{shown(path)} was not made by rlhf, which needs that name"
                raise RLHFError("C15", text, hint="move it away, then run the same command again")
        scratch.mkdir()
        try:
            yield scratch
            names = _files(scratch)
            _check_conflicts(folder, scratch, names)
            sync_files(scratch, names)
        except BaseException:
            remove(scratch, ignore_errors=True)
            raise
        for name in names:
            if not (folder / name).exists():
                _place(scratch / name, folder / name)
        sync_files(folder, names)
        scratch.rename(folder / PLACED)
        remove(folder / PLACED)


def _place(source: Path, target: Path) -> None:
    """Make a hard link, by which `remove_leftovers` knows a file of a killed init; without links it would stay."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        source.rename(target)


def remove_leftovers(folder: Path) -> None:
    """Remove the files of a killed `rlhf init`, except those that existed before it."""
    scratch = folder / SCRATCH
    own = [path for path in (folder / PLACED, scratch) if path.is_dir() and not path.is_symlink()]
    if not own:
        return
    with locked(folder / LOCK, hint=LOCKED):
        if scratch in own:
            _remove_placed(folder, scratch)
        for path in own:
            remove(path, ignore_errors=True)


def _remove_placed(folder: Path, scratch: Path) -> None:
    """Remove the files of `folder` that are links to those of the scratch folder, and folders left empty."""
    for name in _files(scratch):
        target = folder / name
        with suppress(OSError):
            if target.samefile(scratch / name):
                target.unlink()
        for parent in Path(name).parents:
            with suppress(OSError):  # not empty, as `folder` is
                (folder / parent).rmdir()


def print_ready(folder: Path, *commands: str) -> None:
    """Print that a folder is ready, and the next commands."""
    terminal.out(f"{shown(folder)} is ready; next: {'; then '.join(commands)}")
    terminal.conclude(shown(folder), {"folder": shown(folder), "next": list(commands)})


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _check_conflicts(folder: Path, scratch: Path, names: list[str]) -> None:
    """Raise RLHFError C15 if a file exists with another content, or where a folder is needed."""
    existing = [name for name in names if os.path.lexists(folder / name)]
    conflicts = [name for name in existing if not _same_file(folder / name, scratch / name)]
    for name in names:
        conflicts += [str(parent) for parent in Path(name).parents if (folder / parent).is_file()]
    conflicts = list(dict.fromkeys(conflicts))
    if not conflicts:
        return

    listed = ", ".join(conflicts[:MAX_LISTED_NAMES])
    more = len(conflicts) - MAX_LISTED_NAMES
    others = f" and {more} more" if more > 0 else ""
    text = f"{shown(folder)} already holds {listed}{others}, with another content"
    raise RLHFError("C15", text, hint=UNTOUCHED)


def _same_file(path: Path, other: Path) -> bool:
    return path.is_file() and cmp(path, other, shallow=False)
