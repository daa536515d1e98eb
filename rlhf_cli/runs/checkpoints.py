"""Checkpoints and snapshots: folders of a step, complete or ignored, and trusted only after their hashes were checked.

There is no `latest` pointer: the newest folder whose manifest, state.json, verifies is used. Our own checkpoints are
written to a temporary folder and renamed; those that another program writes in place are sealed by their manifest.

A folder of checkpoints may be a link to a disk that others use, too. Each checkpoint, and each temporary folder by its
name, therefore has the id of its run. Behind a link, others are never read, replaced or deleted; those of a run that an
older version began have no id there, but a manifest.
"""

import os
import re
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from rlhf_cli import distributed, files, terminal
from rlhf_cli.errors import RLHFError, shown, translate_read_errors
from rlhf_cli.runs.layout import SNAPSHOTS

MANIFEST = "state.json"
SCHEMA = 2
OWNER = ".run"  # file in each checkpoint with the id of its run; hidden, so it is neither hashed nor uploaded
RUN_ID = re.compile(r"[0-9a-f]{16}")
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
    with _new_state(folder, name) as scratch:
        write(scratch)
        _write_manifest(scratch, name)
    _prune(folder, name, keep)
    return folder / name


def begin_state(folder: Path, name: str) -> None:
    """Create the checkpoint folder/name, with nothing but its owner, for a program that writes in place.

    Raises as `commit_state`.
    """
    with _new_state(folder, name):
        pass


@contextmanager
def _new_state(folder: Path, name: str) -> Iterator[Path]:
    """Yield a temporary folder that becomes folder/name, and replaces a checkpoint of this name of the same run.

    Raises RLHFError S03 for an invalid name, C15 for a name that something else has.
    """
    if not _NAME.fullmatch(name):
        raise RLHFError("S03", f'"{name}" is not a name for a state folder')
    files.make_folder(folder)
    _clear(folder)
    run_id = _run_id(folder)
    path = folder / name
    if os.path.lexists(path):
        if not _is_ours(path, run_id):
            raise _foreign_error(path)
        delete_state(path)
    with files.atomic_folder(path, mark=f"{run_id}-" if run_id else "") as scratch:
        yield scratch
        if run_id:
            files.write_text(scratch / OWNER, f"{run_id}\n")


def require_free(folder: Path, prefix: str, last_step: int) -> None:
    """Raise RLHFError C15 if the folder has another's checkpoint with a name that this run may need.

    These are `prefix` and a step up to `last_step`. It would be found too late, when the checkpoint is saved.
    """
    run_id = _run_id(folder)
    for name in files.list_folder(folder):
        taken = name.startswith(prefix) and _STEP.fullmatch(name) and _step(folder / name) <= last_step
        if taken and not _is_ours(folder / name, run_id):
            raise _foreign_error(folder / name)


def _foreign_error(path: Path) -> RLHFError:
    text = f"{shown(path)} is not of this run, which needs that name for a checkpoint; nothing was changed there"
    hint = f"move it away, or use another folder than {shown(path.parent)} for this run"
    return RLHFError("C15", text, hint=hint)


def _stage_folder(folder: Path) -> Path:
    """Return the stage's folder that a folder of checkpoints is in, by the path as written: it may be a link.

    It is the parent, or for RUN/ppo/engine/policy its parent.
    """
    return next((each for each in folder.parents[:2] if files.path_exists(each / "identity.json")), folder.parent)


def _run_id(folder: Path) -> str | None:
    """Return the id of the run that a folder of checkpoints is in; None if an older version began that run."""
    identity = files.read_json_object(_stage_folder(folder) / "identity.json") or {}
    run_id = identity.get("run_id")
    return run_id if isinstance(run_id, str) else None


def _is_ours(path: Path, run_id: str | None) -> bool:
    """Return True if a checkpoint is of the run `run_id`. Raises RLHFError E08 if that cannot be read now.

    Without an owner's id, which older versions did not write and some copies leave out, it is if it is in the run
    itself; elsewhere only one with a manifest is, if an older version began this run.
    """
    owner = _owner(path)
    if owner is not None:
        return owner == run_id
    if not _is_elsewhere(path.parent):
        return True
    return run_id is None and files.path_exists(path / MANIFEST)


def _owner(path: Path) -> str | None:
    """Return the id of the run that wrote a checkpoint, None if it has none, or a damaged one."""
    with suppress(OSError), translate_read_errors(path):
        owner = files.read_regular(path / OWNER).decode("ascii", "replace").strip()
        return owner if RUN_ID.fullmatch(owner) else None
    return None


def _is_elsewhere(folder: Path) -> bool:
    """Return True if a link leads from the stage's folder to a folder outside it."""
    return not folder.resolve().is_relative_to(_stage_folder(folder).resolve())


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


def step_name(step: int) -> str:
    """Return the name of a checkpoint or snapshot that this package writes."""
    return f"step_{step:06d}"


def state_at(folder: Path, step: int) -> Path:
    """Return the checkpoint of a step. Raises RLHFError M05 if it is damaged or missing."""
    path = next((path for path in _states(folder) if _step(path) == step), None)
    problem = _problem(path) if path else "it is gone"
    if path is None or problem:
        name = shown(path or folder / step_name(step))
        raise RLHFError("M05", f"{name} is damaged: {problem}", hint="choose another step, or run the stage again")
    return path


def clear_leftovers(stage_folder: Path) -> None:
    """Delete what a killed process of this stage wrote or deleted halfway. Only for the process that locked it."""
    for path in stage_folder.glob(".tmp-*"):
        files.remove(path, ignore_errors=True)
    for name in ("state", SNAPSHOTS):
        _clear(stage_folder / name)


def _clear(folder: Path) -> None:
    """Delete temporary folders: all of them, or in a folder elsewhere those that have this run's id."""
    run_id = _run_id(folder)
    elsewhere = _is_elsewhere(folder)
    if elsewhere and run_id is None:
        return
    mark = f"{run_id}-" if elsewhere else ""
    for pattern in (f".tmp-{mark}*", f".trash-{mark}*"):
        for path in folder.glob(pattern):
            files.remove(path, ignore_errors=True)


def _states(folder: Path) -> list[Path]:
    """Return this run's checkpoint folders, oldest first. Raises RLHFError E08 if one cannot be read now."""
    run_id = _run_id(folder)
    return [path for path in _named(folder) if _is_ours(path, run_id)]


def _named(folder: Path) -> list[Path]:
    """Return all folders with the name of a checkpoint, whoever wrote them, by step."""
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
    run_id = _run_id(folder)
    valid: list[Path] = []
    invalid: list[Path] = []
    for path in _named(folder):
        with suppress(RLHFError):
            if not _is_ours(path, run_id):
                continue
            is_valid = _step(path) <= newest and _problem(path, content=False) is None
            (valid if is_valid else invalid).append(path)
    for path in [*invalid, *valid[:-keep]]:
        if path.name not in spare:
            delete_state(path)


def delete_state(state: Path) -> None:
    """Delete a checkpoint, on the main process only; renamed first, so that a partly deleted one is never used."""
    if not distributed.is_main_process():
        return
    run_id = _run_id(state.parent)
    trash = state.with_name(f".trash-{f'{run_id}-' if run_id else ''}{state.name}-{os.getpid()}")
    state.rename(trash)
    files.remove(trash, ignore_errors=True)
