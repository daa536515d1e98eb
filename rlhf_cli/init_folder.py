"""`rlhf init` writes all of a folder or nothing of it, whenever it is killed, and can be given again."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from filecmp import cmp
from pathlib import Path

from rlhf_cli import checkpoints, room
from rlhf_cli.checkpoints.files import sync_files
from rlhf_cli.checkpoints.locks import hold, lock_of, release
from rlhf_cli.errors import RLHFError, shown

UNTOUCHED = "nothing was written; name another folder"
# In a folder that was there before: what is being written; what is whole and being placed; what is placed.
WRITING, WHOLE, PLACED = ".tmp-init", ".tmp-init-whole", ".tmp-init-placed"
MOST = 5  # names in a message


@contextmanager
def all_or_nothing(folder: Path) -> Iterator[Path]:
    """Within, a hidden folder to write into; at the end `folder` holds all that it holds.

    A folder that is not there comes in one step. In one that is there, files with the same bytes are taken as they are.
    Whatever is raised within leaves nothing. Raises RLHFError C15, before anything is written, where `folder` is a file
    or holds other files of those names, or another process is at it; E03 where it cannot be written.
    """
    if not os.path.lexists(folder):
        with checkpoints.new_folder(folder) as scratch:
            yield scratch
        return
    if not folder.is_dir():
        raise RLHFError("C15", f"{shown(folder)} is no folder", hint=UNTOUCHED)
    room.require_writable(folder, hint="name another folder")
    with _alone_in(folder):
        _take_back(folder)
        scratch = folder / WRITING
        scratch.mkdir()
        try:
            yield scratch
            names = _files(scratch)
            _refuse_others(folder, scratch, names)
            sync_files(scratch, names)
            scratch.rename(folder / WHOLE)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        _place(folder, names)


def take_back(folder: Path) -> None:
    """Remove what a killed `rlhf init` left: of files that it placed, those that it did not find there."""
    if (folder / WHOLE).is_dir():
        with _alone_in(folder):
            _take_back(folder)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    place = folder / "init"
    hold(place, hint="wait for it to end, or name another folder")
    try:
        yield
    finally:
        lock_of(place).unlink(missing_ok=True)
        release(place)


def _take_back(folder: Path) -> None:
    whole = folder / WHOLE
    for name in _files(whole):
        target = folder / name
        with suppress(OSError):
            if target.samefile(whole / name):
                target.unlink()
        for above in target.relative_to(folder).parents:
            with suppress(OSError):  # it holds something else
                (folder / above).rmdir()
    for name in (WRITING, WHOLE, PLACED):
        shutil.rmtree(folder / name, ignore_errors=True)


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _refuse_others(folder: Path, scratch: Path, names: list[str]) -> None:
    taken = [name for name in names if os.path.lexists(folder / name) and not _same(folder / name, scratch / name)]
    # A file in the place of a folder.
    taken += [str(above) for name in names for above in Path(name).parents if (folder / above).is_file()]
    if taken := list(dict.fromkeys(taken)):
        more = f" and {len(taken) - MOST} more" if len(taken) > MOST else ""
        text = f"{shown(folder)} already holds {', '.join(taken[:MOST])}{more}, with another content"
        raise RLHFError("C15", text, hint=UNTOUCHED)


def _same(one: Path, other: Path) -> bool:
    return one.is_file() and cmp(one, other, shallow=False)


def _place(folder: Path, names: list[str]) -> None:
    """Each file gets its name by a link, so that `take_back` knows it; where the file system has none, it is moved."""
    whole = folder / WHOLE
    for name in names:
        target = folder / name
        if target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(whole / name, target)
        except OSError:
            (whole / name).rename(target)
    sync_files(folder, names)
    whole.rename(folder / PLACED)
    shutil.rmtree(folder / PLACED)
