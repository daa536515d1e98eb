"""Output folder of a stage: identity, status, start, manifest.

A stage is up to date by content, never by dates: its config, and the hashes of its data and of its parents.
"""

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from rlhf_cli import __version__, distributed, terminal
from rlhf_cli.config.base import TRACKERS
from rlhf_cli.config.paths import default_of, field_at
from rlhf_cli.config.sources import DataSource
from rlhf_cli.data import sources
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.files import (
    files_sha256,
    find_damage,
    hash_files,
    json_sha256,
    list_files,
    list_folder,
    model_sha256,
    path_exists,
    read_json_object,
    select_files,
    sync_files,
    write_checked_json,
    write_json,
    write_text,
)
from rlhf_cli.runs.adapters import sha256_with_base
from rlhf_cli.runs.checkpoints import clear_leftovers, keep_newest, newest_step
from rlhf_cli.runs.locks import is_locked_here, lock_folder, lock_folder_shared, release, release_shared
from rlhf_cli.runs.parents import (
    SNAPSHOTS,
    Parent,
    own_stages,
    parent_entry,
    read_manifest,
    require_unchanged,
    verify_parents,
)

PACKAGES = (
    "torch", "transformers", "trl", "datasets", "accelerate", "peft", "bitsandbytes", "tokenizers", "safetensors",
    "numpy",
)  # fmt: skip
_MISSING = object()  # equal to nothing
# The files that later stages and users rely on. Logs may be edited, and snapshots deleted to save space.
_RESULT = ("model/", "value/", "report.json")
_START_FILES = {"identity.json", "config.yaml"}
REPORT = "report.html"  # written from existing files at any time; not part of a stage
_OUTSIDE_THE_MANIFEST = ("manifest.json", REPORT)
_UNLISTED = ("state/", *(f"{tracker}/" for tracker in TRACKERS))  # folders that the manifest leaves out


@dataclass(frozen=True)
class StageStatus:
    """State of a stage's folder compared with what its config asks for.

    `reasons` say why it is stale or damaged. `sha256` is the hash of a finished stage's model, or of all its files if
    it has no model. `unread` are the keys that `quick_stage_status` assumed to be unchanged.
    """

    state: Literal["new", "resume", "finished", "stale", "damaged"]
    reasons: tuple[str, ...] = ()
    step: int | None = None  # of the newest state to resume from
    sha256: str | None = None
    unread: tuple[str, ...] = ()


def compute_identity(config: Any, parents: Mapping[str, Parent], data: Mapping[str, DataSource]) -> dict[str, Any]:
    """Return everything that can change a stage's result: settings and the hashes of its parents, data and code.

    Raises D01 for all missing data.
    """
    files = sources.locate(data)
    return identity_from_hashes(
        config,
        {key: parent.sha256 for key, parent in parents.items()},
        {key: files_sha256(paths) for key, paths in files.items()},
    )


def identity_from_hashes(config: Any, parents: Mapping[str, str], data: Mapping[str, str]) -> dict[str, Any]:
    """Return the identity for known hashes of parents and data."""
    settings = json.loads(json.dumps(config.identity()))  # as it will be read back: tuples become lists
    return {
        "stage": config.stage,
        "config": settings,
        "config_sha256": json_sha256(settings),
        "parents": dict(parents),
        "data": {**data, **{key: files_sha256([path]) for key, path in config.code().items()}},
    }


def read_identity(folder: Path) -> dict[str, Any] | None:
    """Return the identity.json of a stage's folder, or None if it is missing or damaged."""
    identity = read_json_object(folder / "identity.json")
    tables = [identity.get(name, {}) for name in ("config", "parents", "data", "environment")] if identity else []
    return identity if tables and all(isinstance(table, dict) for table in tables) else None


def identity_difference(
    old: Mapping[str, Any], new: Mapping[str, Any], default_of: Callable[[str], Any] = lambda key: _MISSING
) -> list[str]:
    """Return one line per difference of two identities: `ppo.kl_coef 0.05 -> 0.1`, `models.sft: other weights`.

    A key that only the new one has is ignored if its value is what `default_of` returns: it was added by a newer
    version of this package, and its default is the earlier behaviour.
    """
    before, after = _flat(old.get("config", {})), _flat(new.get("config", {}))
    lines = [] if old.get("stage") == new.get("stage") else [f"stage {old.get('stage')} -> {new.get('stage')}"]
    for key in before | after:
        if key not in before:
            lines += [f"{key}: new key {_value(after[key])}"] if default_of(key) != after[key] else []
        elif key not in after:
            lines.append(f"{key}: no longer set (was {_value(before[key])})")
        elif before[key] != after[key]:
            lines.append(f"{key} {_value(before[key])} -> {_value(after[key])}")
    for section, noun in (("parents", "weights"), ("data", "content")):
        was, now = old.get(section, {}), new.get(section, {})
        for key in was | now:
            if key not in was:
                lines.append(f"{key}: was not set")
            elif key not in now:
                lines.append(f"{key}: no longer set")
            elif was[key] != now[key]:
                lines.append(f"{key}: other {noun}")
    return lines


def _default(config: Any, key: str) -> Any:
    field = field_at(type(config), tuple(key.split(".")))
    return _MISSING if field is None else default_of(field, _MISSING)


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _value(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:57] + "..."


def stage_status(config: Any, wanted: Mapping[str, Any], *, content: bool = False) -> StageStatus:
    """Compare RUN/<stage> with the `wanted` identity. Reads only.

    A finished stage's files are checked by size, and by hash too if `content` is set.
    Raises RLHFError E08 for files that cannot be read now.
    """
    folder = config.folder
    names = {name for name in list_folder(folder) if not name.startswith(".tmp-") and name != REPORT}
    if not names:
        return StageStatus("new")
    recorded = read_identity(folder)
    if recorded is None:
        return StageStatus("stale", ("its files belong to no known run (identity.json is missing or damaged)",))
    if reasons := identity_difference(recorded, wanted, lambda key: _default(config, key)):
        # A start that failed early, e.g. on bad data, is not a run: fixing the data must be enough.
        return StageStatus("stale", tuple(reasons)) if names - _START_FILES else StageStatus("new")
    if not path_exists(folder / "manifest.json"):
        return StageStatus("resume", step=newest_step(folder / "state"))
    manifest, problem = read_manifest(folder)
    if problem:
        return StageStatus("damaged", (problem,))
    problem = find_damage(
        folder, select_files(manifest["files"], _RESULT), where=shown(folder / "manifest.json"), content=content
    )
    if problem:
        return StageStatus("damaged", (problem,))
    return StageStatus("finished", sha256=manifest.get("model_sha256") or model_sha256(manifest["files"], prefix=""))


def start_stage(
    config: Any, wanted: dict[str, Any], parents: Mapping[str, Parent], *, fresh: bool, device: str | None = None
) -> Literal["new", "resume", "finished"]:
    """Lock RUN/<stage> for this process and return how to proceed: from the start, from a checkpoint, or not at all.

    A new folder gets identity.json and config.yaml (resolved, valid for `--config`) first. The parents' folders are
    locked for reading until `complete_stage` or the end of the process. `fresh` moves an old folder to
    RUN/.old/<stage>-<n>.

    Raises C15 for a folder of another config, a folder that another process writes or reads, and a parent that is being
    written; M05 for damaged files of a finished stage; M10 for parents that differ from what their stages wrote (by
    hash); E03 if nothing can be written; E04 for another number of processes; E08 for files that cannot be read now.
    Warns (E05) if a run resumes on another `device` or with other versions.
    """
    folder = config.folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock_folder(folder)
    except RLHFError:
        if not fresh and stage_status(config, wanted, content=True).state == "finished":
            return "finished"  # readers may continue
        raise
    except OSError as error:
        text = f"{shown(folder.parent)} cannot be written: {error.strerror}"
        hint = "set `run:` to another folder"
        raise RLHFError("E03", text, where=config.where("run"), hint=hint) from error
    if fresh:
        _move_aside(folder)
    status = require_current(config, wanted, content=True)
    if status.state == "finished":
        release(folder)
        return "finished"
    for parent in own_stages(parents):
        lock_folder_shared(parent.path)
    verify_parents(parents)
    folder.mkdir(exist_ok=True)
    for path in (folder, folder / "state", folder / SNAPSHOTS):
        clear_leftovers(path)
    environment = {"versions": versions(), "device": device, "processes": distributed.world_size()}
    if status.state == "resume":
        if status.step is not None:
            _refuse_another_group(config)
        _warn_of_changes(folder, environment)
    write_json(folder / "identity.json", wanted | {"environment": environment})
    resolved = config.dump(relative_to=folder)
    write_text(folder / "config.yaml", yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True))
    return "resume" if status.state == "resume" else "new"


def recorded_num_processes(folder: Path) -> int:
    """Return the number of processes that a stage was run with."""
    count = (read_identity(folder) or {}).get("environment", {}).get("processes")
    return count if isinstance(count, int) and count > 0 else 1


def _refuse_another_group(config: Any) -> None:
    """Raise E04 for another number of processes: it changes the batch sizes, and so the run."""
    before, now = recorded_num_processes(config.folder), distributed.world_size()
    if before != now:
        processes = f"{before} process{'es' * (before > 1)}"
        text = f"{shown(config.folder)} was started with {processes} and cannot resume with {now}"
        raise RLHFError("E04", text, hint=f"resume with --nproc {before}, or start over with --fresh")


def _warn_of_changes(folder: Path, now: Mapping[str, Any]) -> None:
    before = _flat((read_identity(folder) or {}).get("environment", {}))
    after = _flat(now)
    changed = [
        f"{key.removeprefix('versions.')} {was} -> {after.get(key)}"
        for key, was in before.items()
        if was != after.get(key)
    ]
    if changed:
        text = f"{shown(folder)} resumes in a different environment: {', '.join(changed)}"
        terminal.warn("E05", text, hint="the result may differ from that of an uninterrupted run")


def require_current(config: Any, wanted: Mapping[str, Any], *, content: bool = False) -> StageStatus:
    """Return the stage's status. Raises C15 for a folder of another config, M05 for damaged files of a finished one."""
    status = stage_status(config, wanted, content=content)
    if status.state == "stale":
        raise _of_another_config(config, status.reasons)
    if status.state == "damaged":
        text = f"{shown(config.folder)} is finished but damaged: {status.reasons[0]}"
        raise RLHFError("M05", text, hint="--fresh runs the stage again; the old folder is kept in .old/")
    return status


def _of_another_config(config: Any, reasons: tuple[str, ...]) -> RLHFError:
    more = f" and {len(reasons) - 5} more" if len(reasons) > 5 else ""
    text = f"{shown(config.folder)} holds another run: {'; '.join(reasons[:5])}{more}"
    hint = "--fresh moves it to .old/ and starts over; or set `run:` to another folder"
    if not (config.folder / "manifest.json").exists():
        started_with = shown(config.folder / "config.yaml")
        hint = f"to resume it, use the settings it was started with ({started_with}); {hint}"
    return RLHFError("C15", text, where=shown(config.file), hint=hint)


def _move_aside(folder: Path) -> Path | None:
    """Move a stage's folder to RUN/.old/<stage>-<n>, deleting nothing. Return None if there is none.

    Raises RLHFError C15 if .old is not a folder.
    """
    if not path_exists(folder):
        return None
    old = folder.parent / ".old"
    if path_exists(old) and not old.is_dir():
        text = f"{shown(old)} is a file, so {shown(folder)} cannot be moved into it"
        raise RLHFError("C15", text, hint="move that file away, then run the same command again")
    old.mkdir(exist_ok=True)
    matches = (re.fullmatch(rf"{re.escape(folder.name)}-(\d{{1,9}})", name, re.ASCII) for name in list_folder(old))
    return folder.rename(old / f"{folder.name}-{max((int(match[1]) for match in matches if match), default=0) + 1}")


def complete_stage(
    config: Any, wanted: Mapping[str, Any], *, parents: Mapping[str, Parent], fields: Mapping[str, Any]
) -> None:
    """Write RUN/<stage>/manifest.json as the last file, and unlock the folder.

    `fields` (tokenizer_sha256, template_sha256, special_tokens, metrics, ...) override the manifest's own. Raises
    RLHFError M14 if `parents` changed since they were opened.
    """
    folder = config.folder
    require_unchanged(parents, loaded=True)
    keep_newest(folder / "state", config.output.keep)
    names = [
        name for name in list_files(folder) if not name.startswith(_UNLISTED) and name not in _OUTSIDE_THE_MANIFEST
    ]
    files = hash_files(folder, names)
    entries = {key: parent_entry(parent, folder) for key, parent in parents.items()}
    manifest = {
        "schema": 2,
        "stage": config.stage,
        "parents": entries,
        "config_sha256": wanted["config_sha256"],
        "data": wanted["data"],
        "seed": config.seed,
        "run_name": config.output.run_name,
        "versions": versions(),
        "git": _git_revision(config.file.parent),
        "files": files,
        "model_sha256": sha256_with_base(files, entries) if any(name.startswith("model/") for name in files) else None,
    }
    present = {key: value for key, value in manifest.items() if value is not None}
    sync_files(folder, names)
    write_checked_json(folder / "manifest.json", {**present, **fields})
    release(folder)
    release_shared()


@contextmanager
def detect_moved_folder(folder: Path) -> Iterator[None]:
    """Turn any exception into E08 if the folder that this process writes was moved or deleted."""
    try:
        yield
    except Exception as error:
        if isinstance(error, RLHFError) or not is_locked_here(folder) or os.path.exists(folder):
            raise
        text = f"{shown(folder)} was moved or deleted while this command wrote into it"
        hint = "move it back and run the same command again to resume; otherwise it starts over"
        raise RLHFError("E08", text, hint=hint) from error


def versions() -> dict[str, str]:
    """Return the versions of this package, Python and the installed libraries, without importing them."""
    installed = {"rlhf": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def _git_revision(folder: Path) -> str | None:
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


class CheckpointTimer:
    """Counts checkpoints and snapshots, and the share of the wall time spent on them."""

    def __init__(self) -> None:
        self.count, self.seconds, self._began = 0, 0.0, time.monotonic()

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Time the writing of one checkpoint."""
        start = time.monotonic()
        yield
        self.count, self.seconds = self.count + 1, self.seconds + time.monotonic() - start

    def __str__(self) -> str:
        share = self.seconds / max(time.monotonic() - self._began, 1e-9)
        checkpoints = "1 checkpoint" if self.count == 1 else f"{self.count} checkpoints"
        return f"{checkpoints} took {self.seconds:.1f} s, {share:.1%} of the time"
