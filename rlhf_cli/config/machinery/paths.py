"""Resolution of path keys.

Paths are relative to the folder of the YAML, or in --set to the working directory, and are stored as absolute paths.
"""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rlhf_cli.config.machinery.fields import Key, PathField, fields_of
from rlhf_cli.config.sources import HUB_ID, is_file_name, split_name

FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
STAGE_FOLDERS = ("sft", "reward", "dpo", "ppo")
PathEntry = tuple[dict[str, Any], str, str, PathField]  # container, name, key path, field; container[name] is the value


def path_entries(model: type[BaseModel], tree: dict[str, Any], prefix: str = "") -> Iterator[PathEntry]:
    """Yield each path value in `tree`; container[name] can be replaced."""
    for name, key in fields_of(model).items():
        if name in tree:
            yield from _entries_of(key, tree, name, prefix + name)


def _entries_of(key: Key, container: dict[str, Any], name: str, path: str) -> Iterator[PathEntry]:
    value = container[name]
    if isinstance(value, str) and key.path_field:
        yield container, name, path, key.path_field
    elif isinstance(value, dict) and key.section:
        yield from path_entries(key.section, value, f"{path}.")
    elif isinstance(value, dict) and key.entry:
        for entry_name in value:
            yield from _entries_of(key.entry, value, entry_name, f"{path}.{entry_name}")


def resolve_paths(model: type[BaseModel], tree: dict[str, Any], base_of: Callable[[str], str]) -> None:
    """Fill in the RUN/... defaults of missing keys and make all paths in `tree` absolute, in place.

    Relative paths of a key start from the folder `base_of(key)`.
    """
    _fill_defaults(model, tree)
    run = _absolute(tree["run"], base_of("run")) if isinstance(tree["run"], str) else ""
    for container, name, key, path_field in path_entries(model, tree):
        if path_field.kind == "run":
            container[name] = run
        else:
            container[name] = _resolve(container[name], path_field, base_of(key), run)


def relative(value: str, path_field: PathField, folder: Path) -> str:
    """Return a path value relative to `folder`; hub ids, functions and template texts are unchanged."""
    if not is_path(value, path_field):
        return value
    path = Path(os.path.relpath(value, folder)).as_posix()
    if path.startswith(".") or path_field.kind in ("run", "template"):
        return path
    if path_field.kind == "data" and is_file_name(path):
        return path
    return f"./{path}"  # without the dot, a missing model or data folder would be read as a hub id


def is_path(value: str, path_field: PathField) -> bool:
    """Return True if a resolved value is a path, not a hub id, a function, a keyword or a template text."""
    return os.path.isabs(value) and (path_field.kind != "template" or os.path.isfile(value))


def _fill_defaults(model: type[BaseModel], tree: dict[str, Any]) -> None:
    for name, key in fields_of(model).items():
        default = key.field.default
        if key.path_field and isinstance(default, str) and default not in key.path_field.keywords and name not in tree:
            tree[name] = default
        elif key.section and key.is_section:
            if tree.get(name) is None:  # missing, or all its keys are commented out
                tree[name] = {}
            if isinstance(tree[name], dict):
                _fill_defaults(key.section, tree[name])


def _resolve(text: str, path_field: PathField, base: str, run: str) -> str:
    if path_field.kind == "data":
        return resolve_data(text, base)
    if path_field.kind == "template":
        path = _absolute(text, base)
        return path if os.path.isfile(path) else text
    if text in path_field.keywords or (path_field.kind == "judge" and FUNCTION.fullmatch(text)):
        return text
    if text == "RUN" or text.startswith("RUN/"):
        return os.path.normpath(os.path.join(run, text[4:]))
    candidate = _absolute(text, base)
    stages = [os.path.join(run, stage) for stage in STAGE_FOLDERS]
    is_local = text.startswith((".", "/", "~")) or candidate in stages or os.path.exists(candidate)
    return candidate if is_local else text


def resolve_data(text: str, base: str) -> str:
    """Resolve a data name to a path, unless it must be a hub id: OWNER/NAME without data suffix or folder OWNER."""
    name, split = split_name(text, base)
    candidate = _absolute(name, base)
    is_local = name.startswith((".", "/", "~")) or os.path.exists(candidate) or is_file_name(name)
    if not is_local and HUB_ID.fullmatch(name):
        owner = name.partition("/")[0]
        if not os.path.isdir(_absolute(owner, base)):
            return text
    return f"{candidate}[{split}]" if split else candidate


def _absolute(text: str, base: str) -> str:
    return os.path.abspath(os.path.join(base, os.path.expanduser(text)))
