"""LoRA adapters on disk, and the base models that they belong to."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_cli.errors import RLHFError, shell_word, shown
from rlhf_cli.files import cached_model, json_sha256, model_sha256, read_json_object

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MERGED = "merged"  # folder of the merged model's config.json; at the top level it would indicate full weights


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
    name, revision = settings.get("base_model_name_or_path"), settings.get("revision")
    if not isinstance(name, str) or not name:
        raise RLHFError("M04", f"{shown(folder)} holds an adapter that does not name its base")
    base = resolve_base(name, folder, revision)
    if base is None:
        raise missing_base_error(folder, name)
    return base


def resolve_base(name: str, start: Path, revision: str | None) -> Path | None:
    """Return the folder of a hub id, or of a path relative to `start`; None if it is not available."""
    if is_hub_id(name):
        return cached_model(name, revision)
    path = Path(os.path.normpath(start / name))
    return path if path.is_dir() else None


def is_hub_id(name: str) -> bool:
    """Return True if a base name is a hub id. Paths in a stage's folder are relative and start with `..`."""
    return not name.startswith(".")


def missing_base_error(folder: Path, name: str) -> RLHFError:
    """Return M04 for an adapter whose base, `name` relative to its folder, is missing."""
    hub = is_hub_id(name)
    base = name if hub else shown(os.path.normpath(folder / name))
    text = f"{shown(folder)} holds an adapter, but its base {base} does not exist"
    fix = f"fetch it: hf download {shell_word(name)}" if hub else "put it back there"
    return RLHFError("M04", text, hint=f"{fix}; or train the adapter again on another base")


def sha256_with_base(files: Mapping[str, Mapping[str, Any]], parents: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the hash of a stage's model/ and, for an adapter, of its base; the arguments are parts of a manifest."""
    own = model_sha256(files)
    return json_sha256([own, base_entry(parents)["sha256"]]) if f"model/{ADAPTER_CONFIG}" in files else own


def base_entry(parents: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the manifest entry of the parent that is the base of the stage's adapter: for PPO the SFT model."""
    return parents["models.sft" if "models.sft" in parents else "model.path"]
