"""States to resume from: a folder counts whole or not at all, and is believed only after its hashes were checked.

There is no `latest` pointer to trust: the newest folder whose manifest, state.json, verifies is the one. Our own states
are written beside their place and renamed into it; what another program writes in place is sealed by its manifest.
"""

import os
import re
import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from rlhf_cli import distributed, terminal
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.files import (
    atomic_folder,
    find_damage,
    hash_files,
    list_files,
    list_folder,
    path_exists,
    read_checked_json,
    sync,
    sync_files,
    write_checked_json,
)

MANIFEST = "state.json"
SCHEMA = 2
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_STEP = re.compile(r"(?:step_|checkpoint-)(\d+)")  # ours, and the Hugging Face Trainer's


def commit_state(folder: Path, name: str, write: Callable[[Path], None], *, keep: int | None) -> Path:
    """Make folder/name out of what `write(path)` writes, in one step, then drop all but the newest `keep`, if any.

    The files are written into a folder beside it, hashed into its state.json, forced to the disk, and renamed.
    Whatever `write` raises comes through, and leaves the older states as they were. Of several processes the first one
    does this; the others are asked to `write` too, for what only all of them can make, and leave no file of their own.
    """
    if not distributed.is_main_process():
        write(folder / name)
        return folder / name
    assert keep is None or keep >= 1, "a state that is dropped as it is written helps nobody"
    prepare_state_folder(folder, name)
    with atomic_folder(folder / name) as scratch:
        write(scratch)
        _write_manifest(scratch, name)
    _prune(folder, name, keep)
    return folder / name


def prepare_state_folder(folder: Path, name: str) -> None:
    """Before a state is written: the folder is there, and no leftovers of killed processes, nor a state of this name.

    One of this name was damaged and passed over. Raises S03 for what is no name of a state.
    """
    if not _NAME.fullmatch(name):
        raise RLHFError("S03", f'"{name}" is not a name for a state folder')
    folder.mkdir(parents=True, exist_ok=True)
    clear_leftovers(folder)
    if (folder / name).exists():
        delete_state(folder / name)


def seal_state(state: Path, *, keep: int, spare: Collection[str] = ()) -> None:
    """Make a state of a folder that another program wrote: its state.json, written last, is what makes it count.

    Then drops all but the newest `keep`, and those named in `spare`.
    """
    _write_manifest(state, state.name)
    sync(state.parent)
    _prune(state.parent, state.name, keep, spare)


def _write_manifest(state: Path, name: str) -> None:
    names = [name for name in list_files(state) if name != MANIFEST]
    manifest = {"schema": SCHEMA, "name": name, "files": hash_files(state, names)}
    sync_files(state, names)
    write_checked_json(state / MANIFEST, manifest)


def latest_state(folder: Path) -> Path | None:
    """The newest state of `folder` that verifies, hash by hash, or None. Warns (M05) about those it passes over.

    Raises RLHFError M05 for a state of an older version of this package, E08 for one that cannot be read now.
    """
    passed_over = []
    found = None
    for path in reversed(_states(folder)):
        problem = _problem(path)
        if problem is None:
            found = path
            break
        passed_over.append((path, problem))
    instead = f"resuming from {found.name}" if found else "starting from the beginning"
    for path, problem in passed_over:
        _warn_of(path, problem, instead)
    return found


def valid_states(folder: Path, *, instead: str) -> dict[int, Path]:
    """The states of `folder` that verify, hash by hash, by step. Warns (M05) about the others: `instead` of one, what.

    Raises RLHFError M05 as `latest_state` does.
    """
    found = {}
    for path in _states(folder):
        if problem := _problem(path):
            _warn_of(path, problem, instead)
        else:
            found[_step(path)] = path
    return found


def _warn_of(path: Path, problem: str, instead: str) -> None:
    what = f"is damaged: {problem}" if path_exists(path / MANIFEST) else f"was not finished: it has no {MANIFEST}"
    terminal.warn("M05", f"{shown(path)} {what}; {instead}")


def newest_step(folder: Path) -> int | None:
    """The step that the newest state's name tells, for a line on a terminal: nothing is verified."""
    return max(state_steps(folder), default=None)


def state_steps(folder: Path) -> list[int]:
    """The steps of the states of `folder`, oldest first: nothing is verified."""
    return [_step(path) for path in _states(folder)]


def state_at(folder: Path, step: int) -> Path:
    """The state of a step. Raises RLHFError M05 where it is damaged, or gone."""
    path = next((path for path in _states(folder) if _step(path) == step), None)
    problem = _problem(path) if path else "it is gone"
    if path is None or problem:
        name = shown(path or folder / f"step_{step:06d}")
        raise RLHFError("M05", f"{name} is damaged: {problem}", hint="take another step; or run the stage again")
    return path


def clear_leftovers(folder: Path) -> None:
    """Delete what a killed process left half written or half deleted. Only for the process that holds the output."""
    for pattern in (".tmp-*", ".trash-*"):
        for path in folder.glob(pattern):
            _remove(path)


def _states(folder: Path) -> list[Path]:
    """The state folders, oldest first. Raises RLHFError E08 where the folder cannot be read now."""
    found = [folder / name for name in list_folder(folder) if _STEP.fullmatch(name)]
    return sorted((path for path in found if path_exists(path) and path.is_dir()), key=_step)


def _step(path: Path) -> int:
    match = _STEP.fullmatch(path.name)
    assert match, path
    return int(match[1])


def _problem(state: Path, *, content: bool = True) -> str | None:
    manifest, problem = read_checked_json(state / MANIFEST)
    if manifest.get("schema") == 1:
        text = f"{shown(state)} was written by an older version, which kept less of a run"
        raise RLHFError("M05", text, hint="--fresh starts over; the old folder is kept in .old/")
    if problem:
        return problem
    if manifest["name"] != state.name:
        return f"{MANIFEST} is of {manifest['name']}"
    return find_damage(state, manifest["files"], where=shown(state / MANIFEST), content=content)


def keep_newest(folder: Path, keep: int) -> None:
    """Drop all states but the newest `keep`: a process that was killed may not have come to it."""
    if states := _states(folder):
        _prune(folder, states[-1].name, keep)


def _prune(folder: Path, written: str, keep: int | None, spare: Collection[str] = ()) -> None:
    """Leave `keep` states up to the one just written.

    Unfinished and damaged ones go, and do not count. So do later ones: they were passed over, and the run is past them.
    One that cannot be read now may be whole: it stays, and ends no training.
    """
    if keep is None:
        return
    newest = _step(folder / written)
    whole: list[Path] = []
    others: list[Path] = []
    for path in _states(folder):
        with suppress(RLHFError):
            good = _step(path) <= newest and _problem(path, content=False) is None
            (whole if good else others).append(path)
    for path in [*others, *whole[:-keep]]:
        if path.name not in spare:
            delete_state(path)


def delete_state(state: Path) -> None:
    """A rename first: a state that is half deleted must not look like one. Of several processes the first does it."""
    if not distributed.is_main_process():
        return
    trash = state.with_name(f".trash-{state.name}-{os.getpid()}")
    state.rename(trash)
    _remove(trash)


def _remove(path: Path) -> None:
    """What a link points to is somebody else's."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
