"""How path keys are understood: relative to the YAML's folder (in --set to the working directory), stored absolute."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rlhf_cli.config.keys import PathKey, path_entries, shapes_of
from rlhf_cli.config.sources import HUB_ID, is_file_name, split_name

FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
STAGE_FOLDERS = ("sft", "reward", "ppo")


def fill_and_resolve(model: type[BaseModel], tree: dict[str, Any], base_of: Callable[[str], str]) -> None:
    """Makes the paths in `tree` absolute, in place, after writing the RUN/... defaults of absent keys into it.

    `base_of(key)` is the folder that a relative path at this key starts from.
    """
    _fill_defaults(model, tree)
    run = _absolute(tree["run"], base_of("run")) if isinstance(tree["run"], str) else ""
    for container, name, key, mark in path_entries(model, tree):
        container[name] = run if mark.kind == "run" else _resolved(container[name], mark, base_of(key), run)


def relative(value: str, mark: PathKey, folder: Path) -> str:
    """The stored value of a path key as written in a file of `folder`; hub ids, functions and texts stay."""
    if not is_path(value, mark):
        return value
    path = Path(os.path.relpath(value, folder)).as_posix()
    # A model or a folder of data named without a dot would be taken for a hub id wherever the folder is missing.
    plain = mark.kind in ("run", "template") or (mark.kind == "data" and is_file_name(path))
    return path if plain or path.startswith(".") else f"./{path}"


def is_path(value: str, mark: PathKey) -> bool:
    """Whether a stored value is a path, and not a hub id, a function, a word or a template's text."""
    return os.path.isabs(value) and (mark.kind != "template" or os.path.isfile(value))


def _fill_defaults(model: type[BaseModel], tree: dict[str, Any]) -> None:
    for name, field in model.model_fields.items():
        below = shapes_of(model)[name]
        always_there = field.annotation is below.model
        if below.path and isinstance(field.default, str) and name not in tree:
            tree[name] = field.default
        elif below.model and always_there:
            # A section with everything commented out reads as null.
            section = tree[name] = {} if tree.get(name) is None else tree[name]
            if isinstance(section, dict):
                _fill_defaults(below.model, section)


def _resolved(text: str, mark: PathKey, base: str, run: str) -> str:
    if mark.kind == "data":
        return resolved_data(text, base)
    if mark.kind == "template":
        path = _absolute(text, base)
        return path if os.path.isfile(path) else text
    if text in mark.words or (mark.kind == "judge" and FUNCTION.fullmatch(text)):
        return text
    return _resolved_model(text, base, run)


def resolved_data(text: str, base: str) -> str:
    """A path, unless it can only be a dataset of the hub: OWNER/NAME, no data file's ending, no folder OWNER here."""
    name, split = split_name(text, base)
    candidate = _absolute(name, base)
    local = name.startswith((".", "/", "~")) or os.path.exists(candidate) or is_file_name(name)
    if not local and HUB_ID.fullmatch(name) and not os.path.isdir(_absolute(name.partition("/")[0], base)):
        return text
    return candidate + (f"[{split}]" if split else "")


def _resolved_model(text: str, base: str, run: str) -> str:
    if text == "RUN" or text.startswith("RUN/"):
        return os.path.normpath(os.path.join(run, text[4:]))
    candidate = _absolute(text, base)
    stages = [os.path.join(run, stage) for stage in STAGE_FOLDERS]
    local = text.startswith((".", "/", "~")) or candidate in stages or os.path.exists(candidate)
    return candidate if local else text


def _absolute(text: str, base: str) -> str:
    return os.path.abspath(os.path.join(base, os.path.expanduser(text)))
