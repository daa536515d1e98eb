"""Models that are adapters: a folder of small matrices, which belong beside the weights of another folder."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_cli.errors import RLHFError, shell_word, shown
from rlhf_cli.files import cached_model, json_sha256, model_sha256, read_json_object

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Where config.json of base and adapter together stands. At the top it would say that whole weights are there too.
MERGED = "merged"


def read_adapter(folder: Path) -> dict[str, Any] | None:
    """What the adapter in a folder tells of itself; None where there is none, or beside it whole weights."""
    told = read_json_object(folder / ADAPTER_CONFIG)
    if told is None or ((folder / "config.json").is_file() and any(folder.glob("model*.safetensors"))):
        return None
    return told


def find_base(folder: Path) -> Path | None:
    """The folder of the weights that a stage's adapter belongs beside; None where `folder` holds a whole model.

    Raises RLHFError M04 where the base is not there, or not told.
    """
    told = read_adapter(folder)
    if told is None:
        return None
    name, revision = told.get("base_model_name_or_path"), told.get("revision")
    if not isinstance(name, str) or not name:
        raise RLHFError("M04", f"{shown(folder)} holds an adapter that does not tell its base")
    base = resolve_base(name, folder, revision)
    if base is None:
        raise missing_base_error(folder, name)
    return base


def resolve_base(name: str, start: Path, revision: str | None) -> Path | None:
    """The folder that a path as seen from `start`, or a hub id, stands for; None where it is not here."""
    if is_hub_id(name):
        return cached_model(name, revision)
    path = Path(os.path.normpath(start / name))
    return path if path.is_dir() else None


def is_hub_id(name: str) -> bool:
    """Whether the name of a base is a hub id: paths in a stage's folder are relative, and lead out of it."""
    return not name.startswith(".")


def missing_base_error(folder: Path, name: str) -> RLHFError:
    """The refusal of an adapter whose base, `name` as seen from its folder, is gone."""
    hub = is_hub_id(name)
    base = name if hub else shown(os.path.normpath(folder / name))
    text = f"{shown(folder)} holds an adapter, and its base {base} is not there"
    first = f"fetch it: hf download {shell_word(name)}" if hub else "put it back there"
    return RLHFError("M04", text, hint=f"{first}; or train the adapter again on another base")


def sha256_with_base(files: Mapping[str, Mapping[str, Any]], parents: Mapping[str, Mapping[str, Any]]) -> str:
    """The hash of what a stage's model/ amounts to: of its files, and where it is an adapter of its base too.

    `files` and `parents` as a manifest tells them.
    """
    own = model_sha256(files)
    return json_sha256([own, base_entry(parents)["sha256"]]) if f"model/{ADAPTER_CONFIG}" in files else own


def base_entry(parents: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """Of a manifest's parents the one that an adapter of the stage's belongs beside: PPO's is the SFT model's."""
    return parents["models.sft" if "models.sft" in parents else "model.path"]
