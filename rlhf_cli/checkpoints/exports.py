"""Folders that leave the house: there whole or not at all, and only where nothing was."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf_cli import room
from rlhf_cli.checkpoints.files import in_one_step, names_in, sync_files
from rlhf_cli.checkpoints.locks import hold, lock_of, release
from rlhf_cli.errors import RLHFError, shown

ELSEWHERE = "name a folder that is not there yet, or an empty one"
PASSING, IN_SIGHT = ".export", "name a folder of your own: --out DIR"


def require_free(folder: Path) -> None:
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
    room.require_writable(folder, hint="name a folder elsewhere")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Within, a hidden folder beside `folder` to write into; at the end it is forced to the disk, and takes its place.

    Whatever is raised within comes through, and leaves nothing. A process that is killed leaves the hidden folder: the
    next one for the same place deletes it. Raises RLHFError as `require_free`, C15 where another process is at it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    hold(folder, hint="wait for it to end, or name another folder")
    try:
        require_free(folder)
        for path in folder.parent.glob(".tmp-*"):
            if re.fullmatch(rf"\.tmp-{re.escape(folder.name)}-\d+", path.name):
                shutil.rmtree(path, ignore_errors=True)
        with in_one_step(folder) as scratch:
            yield scratch
            sync_files(scratch, names_in(scratch))
    finally:
        lock_of(folder).unlink(missing_ok=True)  # first: whoever takes a new lock finds what is done
        release(folder)


@contextmanager
def passing_folder(run: Path) -> Iterator[Path]:
    """Within, the path of a hidden folder in a run, for what goes elsewhere; nothing is there yet.

    At the end it is deleted. Where an RLHFError is raised within, which may tell of it, it stays until the next time.
    Raises RLHFError E03 where nothing can be written there, C15 where another process is at it.
    """
    folder, place = run / PASSING, run / PASSING.lstrip(".")
    room.require_writable(folder, hint=IN_SIGHT)
    hold(place, hint=f"wait for it to end, or {IN_SIGHT}")
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
        lock_of(place).unlink(missing_ok=True)
        release(place)
