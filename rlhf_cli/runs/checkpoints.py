"""Checkpoints to resume from: folders that are complete or ignored, and trusted only after their hashes were checked.

There is no `latest` pointer: the newest folder whose manifest, state.json, verifies is used. Our own checkpoints are
written to a temporary folder and renamed; those that another program writes in place are sealed by their manifest.
"""

import os
import re
import shutil
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from rlhf_cli import distributed, files, terminal
from rlhf_cli.errors import RLHFError, shown

MANIFEST = "state.json"
SCHEMA = 2
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_STEP = re.compile(r"(?:step_|checkpoint-)(\d+)")  # names of this package, and of the Hugging Face Trainer


def commit_state(folder: Path, name: str, write: Callable[[Path], None], *, keep: int | None) -> Path:
    """Create folder/name atomically from the files that `write(path)` writes, then keep the newest `keep` checkpoints.

    The files are written to a temporary folder, hashed into state.json, flushed to disk and renamed. Exceptions of
    `write` propagate and leave older checkpoints unchanged. Only the main process does this; other ranks call `write`
    too, to take part in collectives, and must leave no files.
    """
    if not distributed.is_main_process():
        write(folder / name)
        return folder / name
    assert keep is None or keep >= 1, "keep must be at least 1"
    remove_damaged_checkpoint(folder, name)
    with files.atomic_folder(folder / name) as scratch:
        write(scratch)
        _write_manifest(scratch, name)
    _prune(folder, name, keep)
    return folder / name


def remove_damaged_checkpoint(folder: Path, name: str) -> None:
    """Create the folder, and delete leftovers of killed processes and any damaged checkpoint of this name.

    Raises S03 for an invalid name.
    """
    if not _NAME.fullmatch(name):
        raise RLHFError("S03", f'"{name}" is not a name for a state folder')
    folder.mkdir(parents=True, exist_ok=True)
    clear_leftovers(folder)
    if (folder / name).exists():
        delete_state(folder / name)


def seal_state(state: Path, *, keep: int, spare: Collection[str] = ()) -> None:
    """Complete a checkpoint that another program wrote by writing its state.json.

    Then keeps the newest `keep` checkpoints and those named in `spare`.
    """
    _write_manifest(state, state.name)
    files.sync(state.parent)
    _prune(state.parent, state.name, keep, spare)


def _write_manifest(state: Path, name: str) -> None:
    names = [name for name in files.list_files(state) if name != MANIFEST]
    with ThreadPoolExecutor(1) as pool:
        synced = pool.submit(files.sync_files, state, names)  # the disk writes while processors hash
        manifest = {"schema": SCHEMA, "name": name, "files": files.hash_files(state, names)}
        synced.result()
    files.write_checked_json(state / MANIFEST, manifest)


def latest_state(folder: Path) -> Path | None:
    """Return the newest checkpoint whose hashes verify, or None. Warns (M05) about those it skips.

    Raises RLHFError M05 for a checkpoint of an older version of this package, E08 for one that cannot be read now.
    """
    damaged: dict[Path, str] = {}
    latest = None
    for path in reversed(_states(folder)):
        if (problem := _problem(path)) is None:
            latest = path
            break
        damaged[path] = problem
    instead = f"resuming from {latest.name}" if latest else "starting from the beginning"
    for path, problem in damaged.items():
        _warn_of(path, problem, instead)
    return latest


def valid_states(folder: Path, *, instead: str) -> dict[int, Path]:
    """Return the checkpoints whose hashes verify, by step. Warns (M05) about the others; `instead` ends the warning.

    Raises RLHFError M05 as `latest_state` does.
    """
    valid = {}
    for path in _states(folder):
        if problem := _problem(path):
            _warn_of(path, problem, instead)
        else:
            valid[_step(path)] = path
    return valid


def _warn_of(path: Path, problem: str, instead: str) -> None:
    state = (
        f"is damaged: {problem}" if files.path_exists(path / MANIFEST) else f"was not finished: it has no {MANIFEST}"
    )
    terminal.warn("M05", f"{shown(path)} {state}; {instead}")


def newest_step(folder: Path) -> int | None:
    """Return the newest checkpoint's step by its name, without verification."""
    return max(state_steps(folder), default=None)


def state_steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints, oldest first, without verification."""
    return [_step(path) for path in _states(folder)]


def state_at(folder: Path, step: int) -> Path:
    """Return the checkpoint of a step. Raises RLHFError M05 if it is damaged or missing."""
    path = next((path for path in _states(folder) if _step(path) == step), None)
    problem = _problem(path) if path else "it is gone"
    if path is None or problem:
        name = shown(path or folder / f"step_{step:06d}")
        raise RLHFError("M05", f"{name} is damaged: {problem}", hint="choose another step, or run the stage again")
    return path


def clear_leftovers(folder: Path) -> None:
    """Delete files that a killed process wrote or deleted halfway. Only for the process that locked the output."""
    for pattern in (".tmp-*", ".trash-*"):
        for path in folder.glob(pattern):
            _remove(path)


def _states(folder: Path) -> list[Path]:
    """Return the checkpoint folders, oldest first. Raises RLHFError E08 if the folder cannot be read now."""
    paths = [folder / name for name in files.list_folder(folder) if _STEP.fullmatch(name)]
    return sorted((path for path in paths if files.path_exists(path) and path.is_dir()), key=_step)


def _step(path: Path) -> int:
    match = _STEP.fullmatch(path.name)
    assert match, path
    return int(match[1])


def _problem(state: Path, *, content: bool = True) -> str | None:
    manifest, problem = files.read_checked_json(state / MANIFEST)
    if manifest.get("schema") == 1:
        text = f"{shown(state)} was written by an older version, which saved less of a run"
        raise RLHFError("M05", text, hint="--fresh starts over; the old folder is kept in .old/")
    if problem:
        return problem
    if manifest["name"] != state.name:
        return f"{MANIFEST} is of {manifest['name']}"
    return files.find_damage(state, manifest["files"], where=shown(state / MANIFEST), content=content)


def keep_newest(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, which a killed process may not have done."""
    if states := _states(folder):
        _prune(folder, states[-1].name, keep)


def _prune(folder: Path, written: str, keep: int | None, spare: Collection[str] = ()) -> None:
    """Keep `keep` checkpoints up to the one just written.

    Deletes unfinished, damaged and later ones: the run has resumed before them. Keeps those that cannot be read now.
    """
    if keep is None:
        return
    newest = _step(folder / written)
    valid: list[Path] = []
    invalid: list[Path] = []
    for path in _states(folder):
        with suppress(RLHFError):
            is_valid = _step(path) <= newest and _problem(path, content=False) is None
            (valid if is_valid else invalid).append(path)
    for path in [*invalid, *valid[:-keep]]:
        if path.name not in spare:
            delete_state(path)


def delete_state(state: Path) -> None:
    """Delete a checkpoint, on the main process only; renamed first, so that a partly deleted one is never used."""
    if not distributed.is_main_process():
        return
    trash = state.with_name(f".trash-{state.name}-{os.getpid()}")
    state.rename(trash)
    _remove(trash)


def _remove(path: Path) -> None:
    """Delete a file, link or folder; the target of a link is kept."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
