"""Identity of a stage: what can change its result, and whether its folder is up to date with it. Reads only.

A stage is up to date by content, never by dates: its config, and the hashes of its data and of its parents.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
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
from rlhf_cli.runs.layout import MANIFEST, REPORT, REPORT_PAGE, SNAPSHOTS
from rlhf_cli.runs.manifest import Manifest, read_manifest
from rlhf_cli.runs.model_files import list_model_files
from rlhf_cli.runs.parents import Parent
from rlhf_cli.runs.resolve import open_parents, open_reference, references
from rlhf_cli.trees import flatten

SMALL_FILES_BYTES = 32_000_000  # files of up to this size are hashed, in under a tenth of a second
_MISSING = object()  # equal to nothing
# The files that later stages and users rely on. Logs may be edited, and snapshots deleted to save space.
_RESULT_FILES = ("model/", "value/", REPORT)
_START_FILES = {"identity.json", "config.yaml"}


@dataclass(frozen=True)
class StageStatus:
    """State of a stage's folder compared with what its config asks for."""

    state: Literal["new", "resume", "finished", "stale", "damaged"]
    reasons: tuple[str, ...] = ()  # why it is stale or damaged
    step: int | None = None  # of the newest checkpoint; a stage stopped before its first one resumes at the beginning
    sha256: str | None = None  # of a finished stage's model, or of all its files if it has none
    unread: tuple[str, ...] = ()  # keys that `quick_stage_status` assumed to be unchanged


def compute_identity(config: Config, parents: Mapping[str, Parent], data: Mapping[str, DataSource]) -> dict[str, Any]:
    """Return everything that can change a stage's result: settings and the hashes of its parents, data and code.

    Raises D01 for all missing data.
    """
    hashes = {key: parent.sha256 for key, parent in parents.items()}
    contents = {key: files_sha256(paths) for key, paths in sources.locate(data).items()}
    return _identity(config, hashes, contents)


def _identity(config: Config, parents: Mapping[str, str], data: Mapping[str, str]) -> dict[str, Any]:
    """Return the identity with these hashes of parents and data, by config key."""
    settings = json.loads(json.dumps(config.identity()))  # as it will be read back: tuples become lists
    code = {key: files_sha256([path]) for key, path in config.code().items()}
    return {
        "stage": config.stage,
        "config": settings,
        "config_sha256": json_sha256(settings),
        "parents": dict(parents),
        "data": {**data, **code},
    }


def read_identity(folder: Path) -> dict[str, Any] | None:
    """Return the identity.json of a stage's folder, or None if it is missing or damaged."""
    identity = read_json_object(folder / "identity.json")
    if identity is None:
        return None
    tables = [identity.get(name, {}) for name in ("config", "parents", "data", "environment")]
    return identity if all(isinstance(table, dict) for table in tables) else None


def identity_difference(old: Mapping[str, Any], new: Mapping[str, Any], defaults: Mapping[str, Any] = {}) -> list[str]:
    """Return one line per difference of two identities: `ppo.kl_coef 0.05 -> 0.1`, `models.sft: other weights`.

    A key that only the new one has is ignored if its value is that in `defaults`: it was added by a newer version of
    this package, and its default is the earlier behaviour.
    """
    lines = []
    if old.get("stage") != new.get("stage"):
        lines.append(f"stage {old.get('stage')} -> {new.get('stage')}")
    changed, unset = _changed_settings(_settings(old), _settings(new), defaults)
    lines += changed
    lines += _changed_hashes("parents", "weights", old, new)
    lines += _changed_hashes("data", "content", old, new)
    return lines or unset


def _changed_settings(
    before: Mapping[str, Any], after: Mapping[str, Any], defaults: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Return a line per changed setting, and those that explain nothing beside other lines.

    The latter are keys without a value in a section that is gone.
    """
    lines: list[str] = []
    unset: list[str] = []
    sections = {_section(key) for key in after}
    for key in {**before, **after}:
        if key == "snapshots_of_ppo" and before.get(key) is None:
            continue  # of an older version, or unknown
        if key not in before:
            if defaults.get(key, _MISSING) != after[key]:
                lines.append(f"{key}: new key {_value(after[key])}")
        elif key not in after:
            explains = before[key] is not None or _section(key) in sections
            (lines if explains else unset).append(f"{key}: no longer set (was {_value(before[key])})")
        elif before[key] != after[key] and not _is_set_by_itself(key, after[key]):
            lines.append(f"{key} {_value(before[key])} -> {_value(after[key])}")
    return lines, unset


def _section(key: str) -> str:
    return key.rpartition(".")[0]


def _is_set_by_itself(key: str, value: object) -> bool:
    return value is None and key in AUTOMATIC


def _changed_hashes(section: str, noun: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return a line per changed hash in a section; `noun` is what the hash is of."""
    lines = []
    before = old.get(section, {})
    after = new.get(section, {})
    for key in before | after:
        if key not in before:
            is_function = key.startswith(("rewards.", "judges.")) and not key.endswith(".labels")
            if section != "data" or not is_function:  # older versions hashed no code
                lines.append(f"{key}: was not set")
        elif key not in after:
            lines.append(f"{key}: no longer set")
        elif before[key] != after[key]:
            lines.append(f"{key}: other {noun}")
    return lines


def _settings(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of an identity by dotted path, with today's names, without empty tables and unused keys.

    An engine of this process is not counted either, unless it is `graph`: auto was hf in older versions; nor are the
    addresses of servers, which a scheduler chooses. No shares are as the default ones: older evaluations had none.
    """
    values = {current_name(key): value for key, value in flatten(identity.get("config", {})).items() if value != {}}
    unused = {"ppo.max_logprob_gap", "models.engine.vllm.url"}
    if identity.get("stage") not in ("ppo", "eval"):
        unused.add("output.snapshots")
    if values.get("eval.interpolate") in (None, []):
        unused.add("eval.interpolate")
    if values.get("models.engine") in ("auto", "hf"):
        unused.add("models.engine")
    return {key: value for key, value in values.items() if key not in unused}


def _value(value: Any) -> str:
    """Return a value as in YAML, on one line, shortened for messages."""
    if value is None:
        return "null"
    text = str(value).lower() if isinstance(value, bool) else " ".join(str(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def stage_status(config: Config, expected: Mapping[str, Any], *, content: bool = False) -> StageStatus:
    """Compare RUN/<stage> with the `expected` identity. Reads only.

    A finished stage's files are checked by size, and by hash too if `content` is set.
    Raises RLHFError E08 for files that cannot be read now.
    """
    folder = config.folder
    names = {name for name in list_folder(folder) if not name.startswith(".tmp-") and name != REPORT_PAGE}
    if not names - {link.name for link in links_beforehand(folder)}:
        return StageStatus("new")
    recorded = read_identity(folder)
    if recorded is None:
        return StageStatus("stale", ("its files belong to no known run (identity.json is missing or damaged)",))

    reasons = identity_difference(recorded, expected, _defaults(config, _settings(expected)))
    if reasons:
        # A start that failed early, e.g. on bad data, is not a run: fixing the data must be enough.
        return StageStatus("stale", tuple(reasons)) if names - _START_FILES else StageStatus("new")
    if not path_exists(folder / MANIFEST):
        return StageStatus("resume", step=newest_step(folder / "state"))

    manifest, problem = read_manifest(folder)
    files = select_files(manifest.files, _RESULT_FILES)
    problem = problem or find_damage(folder, files, where=shown(folder / MANIFEST), content=content)
    problem = problem or _damaged_member(folder, manifest, content=content)
    if problem:
        return StageStatus("damaged", (problem,))
    return StageStatus("finished", sha256=manifest.model_sha256 or model_sha256(manifest.files, prefix=""))


def _damaged_member(folder: Path, manifest: Manifest, *, content: bool) -> str | None:
    """Return the problem with the first damaged one of an ensemble's other members, or None."""
    for number, entry in manifest.members.items():
        member = Path(os.path.normpath(folder / entry.path))
        found, problem = read_manifest(member)
        files = select_files(found.files, _RESULT_FILES)
        problem = problem or find_damage(member, files, where=shown(member / MANIFEST), content=content)
        if problem:
            return f"member {number}: {problem}"
    return None


def _defaults(config: Config, keys: Iterable[str]) -> dict[str, Any]:
    """Return the defaults of a config's keys, without those that it does not have."""
    found = {key: key_at(type(config), key.split(".")) for key in keys}
    return {key: config_key.default(_MISSING) for key, config_key in found.items() if config_key}


def links_beforehand(folder: Path) -> list[Path]:
    """Return the links to other disks that a user made before the stage started."""
    return [folder / name for name in ("state", SNAPSHOTS) if (folder / name).is_symlink()]


def quick_stage_status(config: Config) -> StageStatus:
    """Return the status of a stage without hashing large files, for display; downloads nothing.

    A large file that was not modified since the stage started is assumed to be unchanged; `unread` names the keys of
    those that were. Raises RLHFError D01, M01, M04, M10 for missing data and parents.
    """
    recorded = read_identity(config.folder)
    parents = open_parents(config, hashed=False)
    local = {key: source for key, source in config.sources().items() if sources.is_local(source)}
    data = sources.locate(local)
    if recorded is None:
        return stage_status(config, {})  # new, or the files of no known run

    started = (config.folder / "identity.json").stat().st_mtime_ns
    remote = [key for key in config.sources() if key not in local]
    unread = list(remote)

    def recorded_hash(section: str, key: str, paths: Sequence[Path]) -> str | None:
        """Return the recorded hash of large files; None for small ones, which are to be hashed."""
        stats = [path.stat() for path in paths]
        if sum(stat.st_size for stat in stats) <= SMALL_FILES_BYTES:
            return None
        if any(max(stat.st_mtime_ns, stat.st_ctime_ns) >= started for stat in stats):
            unread.append(key)
        return _recorded_hash(recorded, section, key)

    hashes = {key: parent.sha256 for key, parent in parents.items()}
    for reference in references(config):
        key = reference.key
        if not hashes[key]:
            known = recorded_hash("parents", key, _weights(parents[key]))
            hashes[key] = known or open_reference(config, reference).sha256

    contents = {key: recorded_hash("data", key, paths) or files_sha256(paths) for key, paths in data.items()}
    contents |= {key: _recorded_hash(recorded, "data", key) for key in remote}
    status = stage_status(config, _identity(config, hashes, contents))
    return replace(status, unread=tuple(unread))


def _recorded_hash(identity: Mapping[str, Any], section: str, key: str) -> str:
    return str(identity.get(section, {}).get(key))


def _weights(parent: Parent) -> list[Path]:
    """Return the model files of a foreign parent and their folder, whose modification time shows deletions."""
    weights = [parent.model, *list_model_files(parent.model)]
    if parent.base and not parent.base.sha256:
        weights += _weights(parent.base)
    return weights


def require_current(config: Config, expected: Mapping[str, Any]) -> StageStatus:
    """Return the stage's status. Raises C15 for a folder of another config, M05 for damaged files of a finished one."""
    status = stage_status(config, expected, content=True)
    if status.state == "stale":
        raise _other_run_error(config, status.reasons)
    if status.state == "damaged":
        text = f"{shown(config.folder)} is finished but damaged: {status.reasons[0]}"
        raise RLHFError("M05", text, hint="--fresh runs the stage again; the old folder is kept in .old/")
    return status


def _other_run_error(config: Config, reasons: Sequence[str]) -> RLHFError:
    """Return C15 for a folder that another config wrote."""
    folder = config.folder
    more = f" and {len(reasons) - 5} more" if len(reasons) > 5 else ""
    text = f"{shown(folder)} holds another run: {'; '.join(reasons[:5])}{more}"
    hint = "--fresh moves it to .old/ and starts over; or set `run:` to another folder"
    if not (folder / MANIFEST).exists():
        hint = f"to resume it, use the settings it was started with ({shown(folder / 'config.yaml')}); {hint}"
    return RLHFError("C15", text, where=shown(config.file), hint=hint)
