"""Parents of a stage: folders of earlier stages, plain Hugging Face folders, or cached hub models; full or adapters."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_cli.errors import (
    RLHFError,
    at_location,
    closest_path,
    collect_errors,
    shell_path,
    shell_word,
    shown,
    translate_read_errors,
)
from rlhf_cli.files import (
    MAX_FILE_BYTES,
    MAX_LOG_BYTES,
    cached_model,
    files_sha256,
    find_damage,
    json_sha256,
    model_sha256,
    path_exists,
    read_checked_json,
    read_json_object,
    safe_join,
    select_files,
)
from rlhf_cli.runs.discover import configs_in, has_output
from rlhf_cli.system import format_bytes

FOREIGN = "foreign"
SNAPSHOTS = "snapshots"  # folder of a PPO run with the policies saved during training
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MERGED = "merged"  # folder of the merged model's config.json; at the top level it would indicate full weights
# Files of a plain folder that make up the model. Cards, pictures and pickles (never loaded) are ignored.
MODEL_SUFFIXES = {".safetensors", ".json", ".model", ".txt", ".jinja", ".tiktoken", ".py"}


@dataclass(frozen=True)
class Parent:
    """A model that a stage reads."""

    key: str  # the config key that names it, e.g. "models.sft"
    path: Path
    stage: str  # sft, reward, ppo or foreign
    model: Path  # the folder that from_pretrained takes
    sha256: str  # of the model's files; "" if they were not read
    manifest: dict[str, Any]  # {} for a foreign model
    hub: str | None = None  # the hub id
    revision: str | None = None  # of the hub id
    base: "Parent | None" = None  # the model that an adapter belongs to
    file_stats: Mapping[str, tuple[int, ...]] | None = field(default=None, compare=False, repr=False)


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
                if folder.name in expect and os.path.isdir(folder.parent):  # not a typo: no guess
                    config = folder.parent / f"{folder.name}.yaml"
                    more = " (`rlhf init` with --baselines writes one in a new run)" if folder.name == "dpo" else ""
                    hint = f"write {shown(config)}{more} and run that stage first, or {usual}"
                    hint = f"run that stage first: {_command(folder.name, folder)}" if config.is_file() else hint
                    raise RLHFError("M01", f"{key}: no such folder {shown(folder)}", hint=hint)
                raise missing_folder_error(folder, f"{key}: ", usual)
            return _from_hub(path, revision, key, hashed=hashed)
        if folder.name in ("model", "value") and (folder.parent / "identity.json").is_file():
            text = f"{key}: {shown(folder)} is inside a stage's folder"
            raise RLHFError("M10", text, hint=f"set {key} to {shown(folder.parent)}")
        if folder.parent.name == SNAPSHOTS and read_adapter(folder):
            return _snapshot(folder, key, hashed=hashed)
        _refuse_adapter(folder, key)
        if (folder / "config.json").is_file():
            return _foreign(folder, key, hashed=hashed)
        if any((folder / name).exists() for name in ("model", "state", "manifest.json", "identity.json")):
            return _stage(folder, expect, key, hashed=hashed)
        stages = " or ".join(shown(folder / stage) for stage in expect if has_output(folder / stage))
        text = f"{key}: {shown(folder)} holds no model (no config.json, and not written by a stage)"
        raise RLHFError("M01", text, hint=f"did you mean {stages}?" if stages else usual)


def read_manifest(folder: Path) -> tuple[dict[str, Any], str | None]:
    """Return a stage's manifest.json and the problem with it, or None. Manifests of schema 1 have no checksum."""
    manifest, problem = read_checked_json(folder / "manifest.json")
    problem = None if manifest.get("schema") == 1 else problem
    if not isinstance(manifest.get("files"), dict):
        return {"files": {}}, problem or "manifest.json names no files"
    return manifest, problem


def _stage(folder: Path, expect: tuple[str, ...], key: str, *, hashed: bool) -> Parent:
    manifest, manifest_problem = read_manifest(folder)
    identity = read_json_object(folder / "identity.json") or {}
    stage = (identity if manifest_problem else manifest).get("stage") or folder.name
    if stage not in expect:
        sibling = folder.parent / expect[0]
        better = shown(sibling) if sibling.is_dir() and sibling != folder else finished_stage(expect)
        text = f"{key}: {shown(folder)} was written by the {stage} stage, not by {' or '.join(expect)}"
        raise RLHFError("M10", text, hint=f"set {key} to {better}")
    if not (folder / "manifest.json").exists():
        text = f"{key}: {shown(folder)} is not finished (its manifest.json is missing)"
        raise RLHFError("M10", text, hint=f"finish it: {_command(stage, folder)}; or change {key}")
    for name in manifest["files"]:
        safe_join(folder, name, where=shown(folder / "manifest.json"))
    models = select_files(manifest["files"], "model/")
    problem = manifest_problem or find_damage(folder, models, where=shown(folder / "manifest.json"), content=False)
    if problem or not models:
        raise damaged_stage_error(key, folder, stage, problem or "its manifest names no model file")
    base = None
    if f"model/{ADAPTER_CONFIG}" in models:
        base = _base(folder, stage, base_entry(manifest["parents"]), key, hashed=hashed)
    sha256, model = sha256_with_base(models, manifest["parents"]), folder / "model"
    file_stats = _file_stats(model)
    if added := sorted(name for name in file_stats if f"model/{name}" not in models):
        text = f"{key}: {shown(model / added[0])} was not written by the stage, and would be read with its model"
        raise RLHFError("M10", text, hint="move it out of the folder; put a changed model into another folder")
    return Parent(key, folder, stage, model, sha256, manifest, base=base, file_stats=file_stats)


def _foreign(folder: Path, key: str, *, hashed: bool) -> Parent:
    file_stats = _file_stats(folder)  # before hashing
    files = {path.name: {"sha256": files_sha256([path])} for path in list_model_files(folder)} if hashed else {}
    sha256 = model_sha256(files, prefix="") if hashed else ""
    return Parent(key, folder, FOREIGN, folder, sha256, {}, file_stats=file_stats)


def _from_hub(name: str, revision: str | None, key: str, *, hashed: bool) -> Parent:
    if folder := cached_model(name, revision):
        _refuse_adapter(folder, key)
        return replace(_foreign(folder, key, hashed=hashed), hub=name, revision=revision)
    if name.count("/") > 1:  # a hub id is OWNER/NAME
        raise missing_folder_error(Path(name), f"{key}: ", "a model is a folder, or a hub id OWNER/NAME")
    at = f" at revision {revision}" if revision else ""
    text = f'{key}: "{name}" is not a folder, and not a cached hub id{at}'
    raise RLHFError("M01", text, hint=f"fetch it first: hf download {shell_word(name)}; a path starts with ./ or /")


# Adapters (LoRA) and their base models


def read_adapter(folder: Path) -> dict[str, Any] | None:
    """Return the settings of the adapter in a folder; None if it holds no adapter, or full weights too."""
    settings = read_json_object(folder / ADAPTER_CONFIG)
    if settings is None or ((folder / "config.json").is_file() and any(folder.glob("model*.safetensors"))):
        return None
    return settings


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
    path = Path(os.path.normpath(start / name))
    folder = cached_model(name, revision) if is_hub_id(name) else path if path.is_dir() else None
    if folder is None:
        fix = f"fetch it: hf download {shell_word(name)}" if is_hub_id(name) else "put it back there"
        base = name if is_hub_id(name) else shown(path)
        text = f"{shown(start)} holds an adapter, but its base {base} does not exist"
        raise RLHFError("M04", text, hint=f"{fix}; or train the adapter again on another base")
    return folder


def is_hub_id(name: str) -> bool:
    """Return True if a base name is a hub id. Paths in a stage's folder are relative and start with `..`."""
    return not name.startswith(".")


def sha256_with_base(files: Mapping[str, Mapping[str, Any]], parents: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the hash of a stage's model/ and, for an adapter, of its base; the arguments are parts of a manifest."""
    own = model_sha256(files)
    return json_sha256([own, base_entry(parents)["sha256"]]) if f"model/{ADAPTER_CONFIG}" in files else own


def base_entry(parents: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the manifest entry of the parent that is the base of the stage's adapter: for PPO the SFT model."""
    return parents["models.sft" if "models.sft" in parents else "model.path"]


def _base(folder: Path, stage: str, entry: Mapping[str, Any], key: str, *, hashed: bool) -> Parent:
    """Return the base of a stage's adapter by its manifest entry. Raises M04 if the weights have changed."""
    base_folder = _base_folder(entry["path"], folder, entry.get("revision"))
    base = open_parent(str(base_folder), expect=("sft", "ppo", "dpo"), key=key, where="", hashed=hashed)
    if base.sha256 and base.sha256 != entry["sha256"]:
        then, now = short_hash(entry["sha256"]), short_hash(base.sha256)
        changed = f"its base {shown(base_folder)} has changed since ({then} then, {now} now)"
        hint = f"restore the old base, or train on the new one: {_command(stage, folder)} --fresh"
        raise RLHFError("M04", f"{shown(folder)} holds an adapter, and {changed}", hint=hint)
    return base


def _snapshot(folder: Path, key: str, *, hashed: bool) -> Parent:
    """Return an adapter that PPO kept as a snapshot. Raises M04 if its base has changed since the run started."""
    run = folder.parent.parent
    identity, adapter = read_json_object(run / "identity.json") or {}, read_adapter(folder) or {}
    name, parents = adapter.get("base_model_name_or_path"), identity.get("parents")
    sha256 = parents.get("models.sft") if isinstance(parents, dict) else None
    if not isinstance(name, str) or not isinstance(sha256, str):
        text = f"{key}: {shown(folder)} holds an adapter that does not name its base"
        raise RLHFError("M04", text, hint="name the folder of a finished stage")
    if not is_hub_id(name):  # the stage's folder, not the model inside
        model = Path(os.path.normpath(folder / name))
        inner = model.name == "model" and (model.parent / "identity.json").is_file()
        name = os.path.relpath(model.parent if inner else model, run)
        name = name if name.startswith(".") else f"./{name}"
    base = _base(run, "ppo", {**adapter, "path": name, "sha256": sha256}, key, hashed=hashed)
    snapshot = _foreign(folder, key, hashed=hashed)
    return replace(snapshot, sha256=json_sha256([snapshot.sha256, base.sha256]) if hashed else "", base=base)


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
    adapter_name, base_name = json.dumps(shown(folder)), json.dumps(base)
    merge = f"PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({base_name}), {adapter_name})"
    hint = f"merge it into its base first, in Python: {merge}.merge_and_unload().save_pretrained(NEW_FOLDER)"
    raise RLHFError("M04", f"{text}; its base is {base}", hint=hint)


def is_adapter_of(parent: Parent, base: Parent) -> bool:
    """Return True if the parent is an adapter of `base`: of the same folder, or of the same weights elsewhere."""
    own = parent.base
    return own is not None and (own.path == base.path or (bool(base.sha256) and own.sha256 == base.sha256))


def is_available_locally(name: str, revision: str | None = None) -> bool:
    """Return True if a model's name is a folder, or a hub id in the local cache."""
    if os.path.exists(name) or os.path.isabs(name):
        return os.path.exists(name)
    return cached_model(name, revision) is not None


# Changes of parents


def verify_parents(parents: Mapping[str, Parent]) -> None:
    """Check the model files of all parents that stages wrote by hash. Raises M10 with all damaged parents.

    `open_parents` compares sizes only, because it runs each time a pipeline is inspected.
    """
    collect_errors(*(partial(_verify, parent) for parent in own_stages(parents)))


def own_stages(parents: Mapping[str, Parent]) -> list[Parent]:
    """Return the parents and their bases that stages wrote, each folder once."""
    return [parent for parent in _folders(parents) if parent.stage != FOREIGN]


def _folders(parents: Mapping[str, Parent]) -> list[Parent]:
    """Return the parents and their bases, each folder once."""
    by_folder: dict[Path, Parent] = {}
    for parent in parents.values():
        model: Parent | None = parent
        while model:
            by_folder.setdefault(model.model, model)
            model = model.base
    return list(by_folder.values())


def _verify(parent: Parent) -> None:
    if problem := _problem(parent):
        raise damaged_stage_error(parent.key, parent.path, parent.stage, problem, shown(parent.path / "manifest.json"))


def _problem(parent: Parent) -> str | None:
    """Return the first difference, by hash, between a stage's model and its manifest."""
    where = shown(parent.path / "manifest.json")
    return find_damage(parent.path, select_files(parent.manifest["files"], "model/"), where=where, content=True)


def _file_stats(model: Path) -> dict[str, tuple[int, ...]]:
    """Return size, modification time and inode of each model file: while these stay, so does the content."""
    stats = {path.name: path.stat() for path in list_model_files(model)}
    return {name: (stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats.items()}


def list_model_files(folder: Path) -> list[Path]:
    """Return the files of a plain folder that make up the model, by name.

    Raises RLHFError E08 if it is unreadable, M01 for a pipe or a device, or a file that cannot be so large.
    """
    with translate_read_errors(folder):
        paths = [path for path in folder.iterdir() if is_model_file(path.name)]
        files = sorted(path for path in paths if path_exists(path) and not path.is_dir())
        for path in files:
            _require_plain(path)
        return files


def is_model_file(name: str) -> bool:
    """Return True for the name of a file that the hash of a plain folder covers."""
    return name == Path(name).name and not name.startswith(".") and Path(name).suffix in MODEL_SUFFIXES


def _require_plain(path: Path) -> None:
    """Raise RLHFError M01 for a file that cannot be of a model, and that takes forever to read."""
    size = path.stat().st_size
    if not path.is_file():
        raise RLHFError("M01", "not a regular file, and reading it may never end", where=shown(path))
    if size > MAX_LOG_BYTES and size != (_weights_bytes(path) if path.suffix == ".safetensors" else None):
        text = f"has {format_bytes(size)}, which is not the size of a file of a model"
        raise RLHFError(
            "M01", text, where=shown(path), hint="copy or download it again, or move it out of the model's folder"
        )


def _weights_bytes(path: Path) -> int | None:
    """Return the size of a safetensors file by its header, None without one."""
    with path.open("rb") as file, suppress(ValueError, TypeError, LookupError, AttributeError, RecursionError):
        length = int.from_bytes(file.read(8), "little")
        tensors = json.loads(file.read(min(length, MAX_FILE_BYTES)))
        ends = [entry["data_offsets"][1] for name, entry in tensors.items() if name != "__metadata__"]
        return 8 + length + max(ends)
    return None


def require_unchanged(parents: Mapping[str, Parent], *, loaded: bool = False) -> None:
    """Raise RLHFError M14 with all parents that changed after their hashes were computed.

    If only the dates differ, the content is read again. A deleted folder is ignored. With `loaded`, everything was
    loaded before, so additional files are ignored.
    """
    collect_errors(*(partial(_require_unchanged, parent, loaded) for parent in _folders(parents)))


def _require_unchanged(parent: Parent, loaded: bool) -> None:
    try:
        now = _file_stats(parent.model)
    except (FileNotFoundError, NotADirectoryError):
        return
    if parent.file_stats is None or now == parent.file_stats or (loaded and now.items() >= parent.file_stats.items()):
        return
    if parent.stage == FOREIGN:
        own = _foreign(parent.model, parent.key, hashed=True).sha256
        changed = parent.sha256 != (json_sha256([own, parent.base.sha256]) if parent.base else own)
    else:
        changed = _problem(parent) is not None or not (loaded or now.keys() == parent.file_stats.keys())
    if changed:
        names = [name for name in {**parent.file_stats, **now} if parent.file_stats.get(name) != now.get(name)]
        text = f"{parent.key}: {shown(parent.model)} changed while it was read ({', '.join(sorted(names)[:3])})"
        raise RLHFError("M14", text, hint="undo the change and run the same command again; or start over with --fresh")


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
    usual = f"run it first: rlhf run {shell_path(folder)}" if configs_in(folder) else usual
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


def parent_entry(parent: Parent, folder: Path) -> dict[str, Any]:
    """Return a parent's entry in the manifest of the stage folder `folder`: relative path or hub id, stage and hash."""
    path = parent.hub or Path(os.path.relpath(parent.path, folder)).as_posix()
    named = {"path": path, "stage": parent.stage, "sha256": parent.sha256}
    return named | ({"revision": parent.revision} if parent.revision else {})
