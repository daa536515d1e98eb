"""Output folder of a stage: its start, its manifest, and the time spent on checkpoints."""

import errno
import importlib.metadata
import os
import platform
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import yaml

from rlhf_cli import __version__, distributed, terminal
from rlhf_cli.config.base import TRACKER_NAMES, Config
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.files import (
    hash_files,
    json_sha256,
    list_files,
    list_folder,
    make_folder,
    sync_files,
    write_json,
    write_text,
)
from rlhf_cli.runs.checkpoints import clear_leftovers, keep_newest
from rlhf_cli.runs.identity import StageStatus, links_beforehand, read_identity, require_current, stage_status
from rlhf_cli.runs.integrity import own_stages, require_unchanged, verify_parents
from rlhf_cli.runs.layout import MANIFEST, REPORT_PAGE, SNAPSHOTS
from rlhf_cli.runs.locks import is_locked_here, is_writing, lock_folder, lock_folder_shared, release, release_shared
from rlhf_cli.runs.manifest import SCHEMA, write_manifest
from rlhf_cli.runs.parents import Parent, parent_entry, sha256_with_base
from rlhf_cli.trees import flatten

PACKAGES = (
    "torch", "transformers", "trl", "datasets", "accelerate", "peft", "bitsandbytes", "tokenizers", "safetensors",
    "numpy",
)  # fmt: skip
_UNLISTED = (MANIFEST, REPORT_PAGE, "state/", *(f"{tracker}/" for tracker in TRACKER_NAMES))  # not in the manifest


def start_stage(
    config: Config, identity: dict[str, Any], parents: Mapping[str, Parent], *, fresh: bool, device: str | None = None
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
        if not fresh and stage_status(config, identity, content=True).state == "finished":
            return "finished"  # readers may continue
        raise
    except OSError as error:
        text = f"{shown(folder.parent)} cannot be written: {error.strerror}"
        raise RLHFError("E03", text, where=config.where("run"), hint="set `run:` to another folder") from error
    status = StageStatus("new") if fresh else require_current(config, identity)
    if status.state == "finished":
        release(folder)
        return "finished"

    for parent in own_stages(parents):
        lock_folder_shared(parent.path)
    verify_parents(parents)
    if fresh:
        _move_aside(folder)
    for path in (folder, *links_beforehand(folder)):
        make_folder(path)  # a link may lead to a disk that is not there now
    clear_leftovers(folder)

    run_id: object = json_sha256(identity)[:16]
    if status.state == "resume":
        if status.step is not None:
            _require_same_num_processes(folder)
        _warn_of_changes(folder, device)
        run_id = (read_identity(folder) or {}).get("run_id")  # none if an older version began the run
    begun = {"run_id": run_id} if run_id else {}
    write_json(folder / "identity.json", identity | begun | {"environment": _environment(device)})
    resolved = config.dump(relative_to=folder)
    write_text(folder / "config.yaml", yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True))
    return "resume" if status.state == "resume" else "new"


def _environment(device: str | None) -> dict[str, Any]:
    """Return what a stage runs in: versions, device, processes and machines."""
    return {
        "versions": versions(),
        "device": device,
        "processes": distributed.world_size(),
        "machines": distributed.num_machines(),
    }


def _require_same_num_processes(folder: Path) -> None:
    """Raise RLHFError E04 for another number of processes: it changes the batch sizes, and so the run."""
    before = recorded_num_processes(folder)
    now = distributed.world_size()
    if before != now:
        processes = "1 process" if before == 1 else f"{before} processes"
        text = f"{shown(folder)} was started with {processes} and cannot resume with {now}"
        raise RLHFError("E04", text, hint=f"resume with --nproc {before}, or start over with --fresh")


def recorded_num_processes(folder: Path) -> int:
    """Return the number of processes that a stage was run with."""
    count = (read_identity(folder) or {}).get("environment", {}).get("processes")
    return count if isinstance(count, int) and count > 0 else 1


def environment_changes(folder: Path, device: str | None) -> list[str]:
    """Return what has changed since a stage was started: versions, device, processes; each as `name old -> new`."""
    before = flatten((read_identity(folder) or {}).get("environment", {}))
    after = flatten(_environment(device))
    return [
        f"{key.removeprefix('versions.')} {value} -> {after.get(key)}"
        for key, value in before.items()
        if value != after.get(key)
    ]


def _warn_of_changes(folder: Path, device: str | None) -> None:
    changes = environment_changes(folder, device)
    if changes:
        text = f"{shown(folder)} resumes in a different environment: {', '.join(changes)}"
        terminal.warn("E05", text, hint="the result may differ from that of an uninterrupted run")


def _move_aside(folder: Path) -> None:
    """Move a stage's folder, or a link in its place, to RUN/.old/<stage>-<n>, deleting nothing.

    Raises RLHFError C15 if .old is not a folder, or one on another disk.
    """
    if not os.path.lexists(folder):
        return
    old = folder.parent / ".old"
    make_folder(old)
    target = old / f"{folder.name}-{_last_number(old, folder.name) + 1}"
    for path in (folder, *(folder / name for name in ("state", SNAPSHOTS))):
        _make_link_absolute(path)
    try:
        folder.rename(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        text = f"{shown(folder)} cannot be moved to {shown(old)}, which leads to another disk"
        raise RLHFError("C15", text, hint="move the folder away yourself, then run the same command again") from error


def _last_number(old: Path, name: str) -> int:
    """Return the highest number of a stage's folders in RUN/.old; 0 if there is none."""
    pattern = re.compile(rf"{re.escape(name)}-(\d{{1,9}})", re.ASCII)
    matches = [pattern.fullmatch(each) for each in list_folder(old)]
    return max((int(match[1]) for match in matches if match), default=0)


def _make_link_absolute(path: Path) -> None:
    """Let a relative link name the same place after it was moved to another folder."""
    if path.is_symlink() and not os.path.isabs(path.readlink()):
        link = path.with_name(f".tmp-{path.name}-{os.getpid()}")
        link.symlink_to(path.parent.resolve() / path.readlink())
        link.rename(path)


def complete_stage(
    config: Config, identity: Mapping[str, Any], *, parents: Mapping[str, Parent], fields: Mapping[str, Any]
) -> None:
    """Write RUN/<stage>/manifest.json as the last file, and unlock the folder, and the parents with the last of them.

    `fields` (tokenizer_sha256, template_sha256, special_tokens, metrics, ...) override the manifest's own. Raises
    RLHFError M14 if `parents` changed since they were opened.
    """
    folder = config.folder
    require_unchanged(parents, loaded=True)
    keep_newest(folder / "state", config.output.keep)
    names = [name for name in list_files(folder) if not name.startswith(_UNLISTED)]
    files = hash_files(folder, names)
    entries = {key: parent_entry(parent, folder) for key, parent in parents.items()}
    has_model = any(name.startswith("model/") for name in files)
    manifest = {
        "schema": SCHEMA,
        "stage": config.stage,
        "parents": {key: entry.model_dump(exclude_none=True) for key, entry in entries.items()},
        "config_sha256": identity["config_sha256"],
        "data": identity["data"],
        "seed": config.seed,
        "run_name": config.output.run_name,
        "versions": versions(),
        "git": _git_revision(config.file.parent),
        "files": files,
        "model_sha256": sha256_with_base(files, entries) if has_model else None,
    }
    present = {key: value for key, value in manifest.items() if value is not None}
    sync_files(folder, names)
    write_manifest(folder, {**present, **fields})
    release(folder)
    if not is_writing():  # a member of an ensemble is complete before the stage that trains it
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
        with suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


def _git_revision(folder: Path) -> str | None:
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    return None


MAX_SHARE = 0.05  # of the wall time, for checkpoints whose interval is not set by the user
SHORT_SECONDS = 1.0  # of a checkpoint that is always written


class CheckpointTimer:
    """Counts checkpoints and snapshots, and the share of the wall time spent on them."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self._began = time.monotonic()

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Time the writing of one checkpoint."""
        start = time.monotonic()
        yield
        self.count += 1
        self.seconds += time.monotonic() - start

    def is_worth_it(self) -> bool:
        """Return True if one more checkpoint is short, or keeps the share of them all within MAX_SHARE."""
        if not self.count:
            return True
        mean = self.seconds / self.count
        elapsed = time.monotonic() - self._began
        return mean < SHORT_SECONDS or self.seconds + mean <= MAX_SHARE * (elapsed + mean)

    def __str__(self) -> str:
        share = self.seconds / max(time.monotonic() - self._began, 1e-9)
        checkpoints = "1 checkpoint" if self.count == 1 else f"{self.count} checkpoints"
        return f"{checkpoints} took {self.seconds:.1f} s, {share:.1%} of the time"
