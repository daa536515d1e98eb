"""Status of a stage: whether its folder is up to date with its config, data and parents. Reads only.

A stage is up to date by content, never by dates: its config, and the hashes of its data and of its parents.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rlhf_cli.config.base import Config
from rlhf_cli.config.machinery.fields import AUTOMATIC, current_name, key_at
from rlhf_cli.config.sources import DataSource
from rlhf_cli.data import sources
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.files import (
    files_sha256,
    find_damage,
    json_sha256,
    list_folder,
    model_sha256,
    path_exists,
    read_json_object,
    select_files,
)
from rlhf_cli.runs.checkpoints import newest_step
from rlhf_cli.runs.parents import SNAPSHOTS, Parent, list_model_files, read_manifest
from rlhf_cli.runs.resolve import open_parents, open_reference, references
from rlhf_cli.trees import flatten

SMALL_FILES_BYTES = 32_000_000  # files of up to this size are hashed, in under a tenth of a second
REPORT = "report.html"  # written from existing files at any time; not part of a stage
_MISSING = object()  # equal to nothing
# The files that later stages and users rely on. Logs may be edited, and snapshots deleted to save space.
_RESULT_FILES = ("model/", "value/", "report.json")
_START_FILES = {"identity.json", "config.yaml"}


@dataclass(frozen=True)
class StageStatus:
    """State of a stage's folder compared with what its config asks for."""

    state: Literal["new", "resume", "finished", "stale", "damaged"]
    reasons: tuple[str, ...] = ()  # why it is stale or damaged
    step: int | None = None  # of the newest checkpoint to resume from
    sha256: str | None = None  # of a finished stage's model, or of all its files if it has none
    unread: tuple[str, ...] = ()  # keys that `quick_stage_status` assumed to be unchanged


def compute_identity(config: Config, parents: Mapping[str, Parent], data: Mapping[str, DataSource]) -> dict[str, Any]:
    """Return everything that can change a stage's result: settings and the hashes of its parents, data and code.

    Raises D01 for all missing data.
    """
    contents = {key: files_sha256(paths) for key, paths in sources.locate(data).items()}
    return _identity(config, {key: parent.sha256 for key, parent in parents.items()}, contents)


def _identity(config: Config, parents: Mapping[str, str], data: Mapping[str, str]) -> dict[str, Any]:
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


def identity_difference(old: Mapping[str, Any], new: Mapping[str, Any], defaults: Mapping[str, Any] = {}) -> list[str]:
    """Return one line per difference of two identities: `ppo.kl_coef 0.05 -> 0.1`, `models.sft: other weights`.

    A key that only the new one has is ignored if its value is that in `defaults`: it was added by a newer version of
    this package, and its default is the earlier behaviour.
    """
    before, after = _settings(old), _settings(new)
    lines = [] if old.get("stage") == new.get("stage") else [f"stage {old.get('stage')} -> {new.get('stage')}"]
    sections = {key.rpartition(".")[0] for key in after}
    unset: list[str] = []  # keys without a value in a section that is gone, which explain nothing beside other lines
    for key in before | after:
        if key == "snapshots_of_ppo" and before.get(key) is None:
            continue  # of an older version, or unknown
        if key not in before:
            lines += [f"{key}: new key {_value(after[key])}"] if defaults.get(key, _MISSING) != after[key] else []
        elif key not in after:
            explains = before[key] is not None or key.rpartition(".")[0] in sections
            (lines if explains else unset).append(f"{key}: no longer set (was {_value(before[key])})")
        elif before[key] != after[key] and not (after[key] is None and key in AUTOMATIC):
            lines.append(f"{key} {_value(before[key])} -> {_value(after[key])}")
    for section, noun in (("parents", "weights"), ("data", "content")):
        was, now = old.get(section, {}), new.get(section, {})
        for key in was | now:
            if key not in was:
                is_code = section == "data" and key.startswith(("rewards.", "judges."))  # older versions hashed less
                lines += [] if is_code else [f"{key}: was not set"]
            elif was[key] != now.get(key):
                lines.append(f"{key}: other {noun}" if key in now else f"{key}: no longer set")
    return lines or unset


def _settings(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of an identity by dotted path, with today's names, without empty tables and unused keys.

    An engine of this process is not counted either, unless it is `graph`: auto was hf in older versions.
    """
    unused = {"ppo.max_logprob_gap"} | ({"output.snapshots"} if identity.get("stage") not in ("ppo", "eval") else set())
    settings = {current_name(key): value for key, value in flatten(identity.get("config", {})).items() if value != {}}
    if settings.get("models.engine") in ("auto", "hf"):
        unused.add("models.engine")
    return {key: value for key, value in settings.items() if key not in unused}


def _value(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:57] + "..."


def stage_status(config: Config, expected: Mapping[str, Any], *, content: bool = False) -> StageStatus:
    """Compare RUN/<stage> with the `expected` identity. Reads only.

    A finished stage's files are checked by size, and by hash too if `content` is set.
    Raises RLHFError E08 for files that cannot be read now.
    """
    folder = config.folder
    names = {name for name in list_folder(folder) if not name.startswith(".tmp-") and name != REPORT}
    if not names - _linked_beforehand(folder):
        return StageStatus("new")
    recorded = read_identity(folder)
    if recorded is None:
        return StageStatus("stale", ("its files belong to no known run (identity.json is missing or damaged)",))
    config_keys = {key: key_at(type(config), key.split(".")) for key in _settings(expected)}
    defaults = {key: config_key.default(_MISSING) for key, config_key in config_keys.items() if config_key}
    if reasons := identity_difference(recorded, expected, defaults):
        # A start that failed early, e.g. on bad data, is not a run: fixing the data must be enough.
        return StageStatus("stale", tuple(reasons)) if names - _START_FILES else StageStatus("new")
    if not path_exists(folder / "manifest.json"):
        return StageStatus("resume", step=newest_step(folder / "state"))
    manifest, problem = read_manifest(folder)
    files = select_files(manifest["files"], _RESULT_FILES)
    if problem := problem or find_damage(folder, files, where=shown(folder / "manifest.json"), content=content):
        return StageStatus("damaged", (problem,))
    return StageStatus("finished", sha256=manifest.get("model_sha256") or model_sha256(manifest["files"], prefix=""))


def _linked_beforehand(folder: Path) -> set[str]:
    """Return the links to other disks that a user may make before the stage starts."""
    return {name for name in ("state", SNAPSHOTS) if (folder / name).is_symlink()}


def quick_stage_status(config: Config) -> StageStatus:
    """Return the status of a stage without hashing large files, for display; downloads nothing.

    A large file that was not modified since the stage started is assumed to be unchanged; `unread` names the keys of
    those that were. Raises RLHFError D01, M01, M04, M10 for missing data and parents.
    """
    identity = read_identity(config.folder)
    parents = open_parents(config, hashed=False)
    local = {key: source for key, source in config.sources().items() if sources.is_local(source)}
    data = sources.locate(local)
    if identity is None:
        return stage_status(config, {})  # new, or the files of no known run
    recorded, started = identity, (config.folder / "identity.json").stat().st_mtime_ns
    unread = [key for key in config.sources() if key not in local]

    def recorded_hash(section: str, key: str, paths: Sequence[Path]) -> str | None:
        stats = [path.stat() for path in paths]
        if sum(stat.st_size for stat in stats) <= SMALL_FILES_BYTES:
            return None  # they are hashed
        if any(max(stat.st_mtime_ns, stat.st_ctime_ns) >= started for stat in stats):
            unread.append(key)
        return str(recorded.get(section, {}).get(key))

    hashes = {key: parent.sha256 for key, parent in parents.items()}
    for reference in references(config):
        if not hashes[reference.key]:
            sha256 = recorded_hash("parents", reference.key, _weights(parents[reference.key]))
            hashes[reference.key] = sha256 or open_reference(config, reference).sha256
    contents = {key: recorded_hash("data", key, paths) or files_sha256(paths) for key, paths in data.items()}
    contents |= {key: str(recorded.get("data", {}).get(key)) for key in config.sources() if key not in local}
    return replace(stage_status(config, _identity(config, hashes, contents)), unread=tuple(unread))


def _weights(parent: Parent) -> list[Path]:
    """Return the model files of a foreign parent and their folder, whose modification time shows deletions."""
    own = [parent.model, *list_model_files(parent.model)]
    return own + (_weights(parent.base) if parent.base and not parent.base.sha256 else [])


def require_current(config: Config, expected: Mapping[str, Any]) -> StageStatus:
    """Return the stage's status. Raises C15 for a folder of another config, M05 for damaged files of a finished one."""
    status = stage_status(config, expected, content=True)
    folder, reasons = config.folder, status.reasons
    if status.state == "stale":
        more = f" and {len(reasons) - 5} more" if len(reasons) > 5 else ""
        text = f"{shown(folder)} holds another run: {'; '.join(reasons[:5])}{more}"
        hint = "--fresh moves it to .old/ and starts over; or set `run:` to another folder"
        if not (folder / "manifest.json").exists():
            hint = f"to resume it, use the settings it was started with ({shown(folder / 'config.yaml')}); {hint}"
        raise RLHFError("C15", text, where=shown(config.file), hint=hint)
    if status.state == "damaged":
        text = f"{shown(folder)} is finished but damaged: {reasons[0]}"
        raise RLHFError("M05", text, hint="--fresh runs the stage again; the old folder is kept in .old/")
    return status
