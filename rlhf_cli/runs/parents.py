"""Parents of a stage: folders of earlier stages, plain Hugging Face folders, or cached hub models; full or adapters."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlhf_cli.errors import (
    RLHFError,
    at_location,
    closest_path,
    shell_path,
    shell_word,
    shown,
    translate_read_errors,
)
from rlhf_cli.files import (
    cached_model,
    find_damage,
    json_sha256,
    model_sha256,
    path_exists,
    read_json_object,
    safe_join,
    select_files,
)
from rlhf_cli.runs.layout import ADAPTER_CONFIG, MANIFEST, SNAPSHOTS, configs_in, has_output, seed_folder, seeds_in
from rlhf_cli.runs.manifest import Manifest, ParentEntry, read_manifest
from rlhf_cli.runs.model_files import FileStats, file_stats, folder_sha256, read_adapter

FOREIGN = "foreign"


@dataclass(frozen=True)
class Parent:
    """A model that a stage reads."""

    key: str  # the config key that names it, e.g. "models.sft"
    path: Path
    stage: str  # sft, reward, ppo or foreign
    model: Path  # the folder that from_pretrained takes
    sha256: str  # of the model's files; "" if they were not read
    manifest: Manifest  # empty for a foreign model
    hub: str | None = None  # the hub id
    revision: str | None = None  # of the hub id
    base: "Parent | None" = None  # the model that an adapter belongs to
    file_stats: FileStats | None = field(default=None, compare=False, repr=False)


def open_parent(
    path: str, *, expect: tuple[str, ...], key: str, where: str, revision: str | None = None, hashed: bool = True
) -> Parent:
    """Return the parent that `path` names: a finished stage's folder, a plain Hugging Face folder or a cached hub id.

    A plain folder gets the stage "foreign"; the calling stage must check that it fits. Without `hashed`, its files are
    not read, which takes long for a large model, and its sha256 is "".

    Raises M01 if there is nothing to load, M04 for an adapter that no stage wrote or whose base is missing or changed,
    M10 for a stage that is unfinished, damaged or not one of `expect`, E08 for files that cannot be read now.
    """
    with at_location(where), translate_read_errors(path):
        folder = Path(path)
        usual = f"set {key} to {finished_stage(expect)} or to a Hugging Face folder"
        if not path_exists(folder):
            if folder.is_absolute() or path.startswith((".", "~")):
                raise _no_parent_error(folder, expect, key, usual)
            return _from_hub(path, revision, key, hashed=hashed)

        if folder.name in ("model", "value") and (folder.parent / "identity.json").is_file():
            text = f"{key}: {shown(folder)} is inside a stage's folder"
            is_wanted = folder.name == "model"  # a value model is no parent
            raise RLHFError("M10", text, hint=f"set {key} to {shown(folder.parent)}" if is_wanted else usual)
        if folder.parent.name == SNAPSHOTS and read_adapter(folder):
            return _snapshot(folder, key, hashed=hashed)

        _refuse_adapter(folder, key)
        if (folder / "config.json").is_file():
            return _foreign(folder, key, hashed=hashed)
        if any((folder / name).exists() for name in ("model", "state", MANIFEST, "identity.json")):
            return _stage(folder, expect, key, hashed=hashed)

        stages = " or ".join(shown(folder / stage) for stage in expect if has_output(folder / stage))
        text = f"{key}: {shown(folder)} holds no model (no config.json, and not written by a stage)"
        raise RLHFError("M01", text, hint=f"did you mean {stages}?" if stages else usual)


def _no_parent_error(folder: Path, expect: tuple[str, ...], key: str, usual: str) -> RLHFError:
    """Return M01 for a folder that does not exist; `usual` is the hint for a misspelt name."""
    is_expected = folder.name in expect and os.path.isdir(folder.parent)
    if not is_expected:
        return missing_folder_error(folder, f"{key}: ", usual)

    config = folder.parent / f"{folder.name}.yaml"
    if config.is_file():
        hint = f"run that stage first: {_command(folder.name, folder)}"
    else:
        more = " (`rlhf init` with --baselines writes one in a new run)" if folder.name == "dpo" else ""
        hint = f"write {shown(config)}{more} and run that stage first, or {usual}"
    return RLHFError("M01", f"{key}: no such folder {shown(folder)}", hint=hint)


def _stage(folder: Path, expect: tuple[str, ...], key: str, *, hashed: bool) -> Parent:
    """Return the parent in a stage's folder, with its files checked by size. Raises as `open_parent`."""
    manifest, manifest_problem = read_manifest(folder)
    stage = _stage_name(folder, manifest, manifest_problem)
    where = shown(folder / MANIFEST)
    if stage not in expect:
        sibling = folder.parent / expect[0]
        better = shown(sibling) if sibling.is_dir() and sibling != folder else finished_stage(expect)
        text = f"{key}: {shown(folder)} was written by the {stage} stage, not by {' or '.join(expect)}"
        raise RLHFError("M10", text, hint=f"set {key} to {better}")
    if not (folder / MANIFEST).exists():
        text = f"{key}: {shown(folder)} is not finished (its manifest.json is missing)"
        raise RLHFError("M10", text, hint=f"finish it: {_command(stage, folder)}; or change {key}")

    for name in manifest.files:
        safe_join(folder, name, where=where)
    models = select_files(manifest.files, "model/")
    problem = manifest_problem or find_damage(folder, models, where=where, content=False)
    if problem or not models:
        raise damaged_stage_error(key, folder, stage, problem or "its manifest names no model file")

    base = None
    if f"model/{ADAPTER_CONFIG}" in models:
        entry = base_entry(manifest.parents)
        base = _base(folder, stage, entry.path, key=key, sha256=entry.sha256, revision=entry.revision, hashed=hashed)

    model = folder / "model"
    stats = file_stats(model)
    added = sorted(name for name in stats if f"model/{name}" not in models)
    if added:
        text = f"{key}: {shown(model / added[0])} was not written by the stage, and would be read with its model"
        raise RLHFError("M10", text, hint="move it out of the folder; put a changed model into another folder")

    sha256 = sha256_with_base(models, manifest.parents)
    return Parent(key, folder, stage, model, sha256=sha256, manifest=manifest, base=base, file_stats=stats)


def _stage_name(folder: Path, manifest: Manifest, problem: str | None) -> str:
    """Return the stage that wrote a folder: of its manifest, or of identity.json if that has a problem."""
    identity = read_json_object(folder / "identity.json") or {}
    recorded = identity.get("stage") if problem else manifest.stage
    return str(recorded or folder.name)


def _foreign(folder: Path, key: str, *, hashed: bool) -> Parent:
    stats = file_stats(folder)  # before hashing
    sha256 = folder_sha256(folder) if hashed else ""
    return Parent(key, folder, FOREIGN, folder, sha256=sha256, manifest=Manifest(), file_stats=stats)


def _from_hub(name: str, revision: str | None, key: str, *, hashed: bool) -> Parent:
    folder = cached_model(name, revision)
    if folder:
        _refuse_adapter(folder, key)
        return replace(_foreign(folder, key, hashed=hashed), hub=name, revision=revision)

    if name.count("/") > 1:  # a hub id is OWNER/NAME
        raise missing_folder_error(Path(name), f"{key}: ", "a model is a folder, or a hub id OWNER/NAME")
    at = f" at revision {revision}" if revision else ""
    text = f'{key}: "{name}" is not a folder, and not a cached hub id{at}'
    raise RLHFError("M01", text, hint=f"fetch it first: hf download {shell_word(name)}; a path starts with ./ or /")


def is_available_locally(name: str, revision: str | None = None) -> bool:
    """Return True if a model's name is a folder, or a hub id in the local cache."""
    if os.path.exists(name) or os.path.isabs(name):
        return os.path.exists(name)
    return cached_model(name, revision) is not None


# Adapters (LoRA) and their base models


def find_base(folder: Path) -> Path | None:
    """Return the folder of the base of a stage's adapter; None if `folder` holds a full model.

    Raises RLHFError M04 if the base is missing or not named.
    """
    settings = read_adapter(folder)
    if settings is None:
        return None
    name = settings.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise RLHFError("M04", f"{shown(folder)} holds an adapter that does not name its base")
    return _base_folder(name, folder, settings.get("revision"))


def _base_folder(name: str, start: Path, revision: str | None) -> Path:
    """Return the folder of a hub id, or of a path relative to `start`. Raises M04 if it is not available."""
    if is_hub_id(name):
        folder = cached_model(name, revision)
        base = name
        fix = f"fetch it: hf download {shell_word(name)}"
    else:
        path = Path(os.path.normpath(start / name))
        folder = path if path.is_dir() else None
        base = shown(path)
        fix = "put it back there"

    if folder is None:
        text = f"{shown(start)} holds an adapter, but its base {base} does not exist"
        raise RLHFError("M04", text, hint=f"{fix}; or train the adapter again on another base")
    return folder


def is_hub_id(name: str) -> bool:
    """Return True if a base name is a hub id. Paths in a stage's folder are relative and start with `..`."""
    return not name.startswith(".")


def is_adapter_of(parent: Parent, base: Parent) -> bool:
    """Return True if the parent is an adapter of `base`: of the same folder, or of the same weights elsewhere."""
    own = parent.base
    if own is None:
        return False
    has_same_weights = bool(base.sha256) and own.sha256 == base.sha256
    return own.path == base.path or has_same_weights


def sha256_with_base(files: Mapping[str, Mapping[str, Any]], parents: Mapping[str, ParentEntry]) -> str:
    """Return the hash of a stage's model/ and, for an adapter, of its base; the arguments are parts of a manifest."""
    own = model_sha256(files)
    is_adapter = f"model/{ADAPTER_CONFIG}" in files
    return json_sha256([own, base_entry(parents).sha256]) if is_adapter else own


def base_entry(parents: Mapping[str, ParentEntry]) -> ParentEntry:
    """Return the manifest entry of the parent that is the base of the stage's adapter: for PPO the SFT model."""
    return parents["models.sft" if "models.sft" in parents else "model.path"]


def _base(folder: Path, stage: str, path: str, *, key: str, sha256: str, revision: str | None, hashed: bool) -> Parent:
    """Return the base, at `path` from the folder, of a stage's adapter. Raises M04 if the weights have changed."""
    base_folder = _base_folder(path, folder, revision)
    base = open_parent(str(base_folder), expect=("sft", "ppo", "dpo"), key=key, where="", hashed=hashed)
    if base.sha256 and base.sha256 != sha256:
        hashes = f"{short_hash(sha256)} then, {short_hash(base.sha256)} now"
        text = f"{shown(folder)} holds an adapter, and its base {shown(base_folder)} has changed since ({hashes})"
        hint = f"restore the old base, or train on the new one: {_command(stage, folder)} --fresh"
        raise RLHFError("M04", text, hint=hint)
    return base


def _snapshot(folder: Path, key: str, *, hashed: bool) -> Parent:
    """Return an adapter that PPO kept as a snapshot. Raises M04 if its base has changed since the run started."""
    run = folder.parent.parent
    adapter = read_adapter(folder) or {}
    name = adapter.get("base_model_name_or_path")
    parents = (read_json_object(run / "identity.json") or {}).get("parents")
    sha256 = parents.get("models.sft") if isinstance(parents, dict) else None
    if not isinstance(name, str) or not isinstance(sha256, str):
        text = f"{key}: {shown(folder)} holds an adapter that does not name its base"
        raise RLHFError("M04", text, hint="name the folder of a finished stage")

    path = name if is_hub_id(name) else _path_of_base(Path(os.path.normpath(folder / name)), run)
    base = _base(run, "ppo", path, key=key, sha256=sha256, revision=adapter.get("revision"), hashed=hashed)
    snapshot = _foreign(folder, key, hashed=hashed)
    combined = json_sha256([snapshot.sha256, base.sha256]) if hashed else ""
    return replace(snapshot, sha256=combined, base=base)


def _path_of_base(model: Path, run: Path) -> str:
    """Return the path from a run's folder to a base: of a stage its folder, not the model inside."""
    is_inside_stage = model.name == "model" and (model.parent / "identity.json").is_file()
    path = os.path.relpath(model.parent if is_inside_stage else model, run)
    return path if path.startswith(".") else f"./{path}"


def _refuse_adapter(folder: Path, key: str) -> None:
    """Raise M04, with the base it needs, for an adapter that no stage wrote."""
    adapter = read_adapter(folder)
    if adapter is None:
        return

    base = adapter.get("base_model_name_or_path")
    text = f"{key}: {shown(folder)} holds an adapter, not a full model"
    if not isinstance(base, str) or not base:
        raise RLHFError("M04", f"{text}, and does not name its base", hint="name a full model")

    if not (is_available_locally(base) or is_available_locally(str(folder / base))):
        text += f", and its base {base} is neither a folder nor a cached hub id"
        raise RLHFError("M04", text, hint=f"fetch the base (hf download {shell_word(base)}), then merge the two")

    adapter_name = json.dumps(shown(folder))
    base_name = json.dumps(base)
    merge = f"PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({base_name}), {adapter_name})"
    hint = f"merge it into its base first, in Python: {merge}.merge_and_unload().save_pretrained(NEW_FOLDER)"
    raise RLHFError("M04", f"{text}; its base is {base}", hint=hint)


# Messages and manifest entries


def damaged_stage_error(key: str, folder: Path, stage: str, problem: str, where: str | None = None) -> RLHFError:
    """Return M10 for a parent that differs from what its stage wrote."""
    text = f"{key}: {shown(folder)} is damaged: {problem}"
    return RLHFError("M10", text, where=where, hint=f"run it again: {_command(stage, folder)} --fresh")


def missing_folder_error(folder: Path, prefix: str, otherwise: str) -> RLHFError:
    """Return M01 with the closest existing name as a hint, or else the hint `otherwise`."""
    near = closest_path(folder, is_candidate=os.path.isdir)
    hint = f"did you mean {near}?" if near else otherwise
    return RLHFError("M01", f"{prefix}no such folder {shown(folder)}", hint=hint)


def no_stage_error(folder: Path, missing: str, hint: str | None = None) -> RLHFError:
    """Return M01 for a folder that does not exist, or that holds no output of a stage, which `hint` is for."""
    usual = "name the folder of a run, e.g. runs/demo"
    if not os.path.exists(folder):
        return missing_folder_error(folder, "", usual)
    if seeds := seeds_in(folder):
        usual = f"name the run of a seed: {shell_path(seed_folder(folder, seeds[0]))}"
    elif configs_in(folder):
        usual = f"run it first: rlhf run {shell_path(folder)}"
    return RLHFError("M01", f"{shown(folder)} holds {missing}", hint=hint or usual)


def _command(stage: str, folder: Path) -> str:
    """Return the command that creates a stage's folder."""
    config = folder.parent / f"{stage}.yaml"
    return f"rlhf {stage} --config {shell_path(config if config.is_file() else folder / 'config.yaml')}"


def finished_stage(expect: Sequence[str]) -> str:
    """Return the description of what a key should name, for messages."""
    return f"the folder of a finished {' or '.join(expect)} stage"


def short_hash(sha256: str | None) -> str:
    """Return a hash shortened for messages."""
    return sha256[:12] if sha256 else "none"


def parent_entry(parent: Parent, folder: Path) -> ParentEntry:
    """Return a parent's entry in the manifest of the stage folder `folder`: relative path or hub id, stage and hash."""
    path = parent.hub or Path(os.path.relpath(parent.path, folder)).as_posix()
    return ParentEntry(path=path, stage=parent.stage, sha256=parent.sha256, revision=parent.revision or None)
