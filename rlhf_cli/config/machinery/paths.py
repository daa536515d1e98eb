"""Resolution of path keys.

Paths are relative to the folder of the YAML, or in --set to the working directory, and are stored as absolute paths.
"""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rlhf_cli.config.machinery.fields import Key, PathField, fields_of
from rlhf_cli.config.sources import HUB_ID, is_file_name, split_name
from rlhf_cli.trees import Tree

FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
STAGE_FOLDERS = ("sft", "reward", "dpo", "ppo")
LOCAL = (".", "/", "~")  # beginnings of paths, not of hub ids


@dataclass(frozen=True)
class PathValue:
    """A value of a path key in the tree of a config: container[name], whose full key is `key`."""

    container: dict[str, Any]
    name: str
    key: str
    field: PathField

    @property
    def text(self) -> str:
        """Return the value."""
        text: str = self.container[self.name]
        return text

    @property
    def is_path(self) -> bool:
        """Return True if a resolved value is a path, not a hub id, a function, a keyword or a template text."""
        if self.field.kind == "template":
            return os.path.isabs(self.text) and os.path.isfile(self.text)
        return os.path.isabs(self.text)

    def replace(self, text: str) -> None:
        """Set another value in the tree."""
        self.container[self.name] = text

    def relative_to(self, folder: Path) -> str:
        """Return a path relative to a folder; hub ids, functions and template texts are unchanged."""
        if not self.is_path:
            return self.text
        path = Path(os.path.relpath(self.text, folder)).as_posix()
        kind = self.field.kind
        is_no_hub_id = kind in ("run", "template", "folder") or (kind == "data" and is_file_name(path))
        is_clear = path.startswith(".") or is_no_hub_id
        return path if is_clear else f"./{path}"  # without the dot, a missing folder would be read as a hub id


def path_values(model: type[BaseModel], tree: Tree, prefix: str = "") -> Iterator[PathValue]:
    """Yield each value of a path key in `tree`."""
    for name, key in fields_of(model).items():
        if name in tree:
            yield from _values_of(key, tree, name, prefix)


def _values_of(key: Key, container: dict[str, Any], name: str, prefix: str) -> Iterator[PathValue]:
    path = f"{prefix}{name}"
    match container[name]:
        case str() if key.path_field:
            yield PathValue(container, name, path, key.path_field)
        case dict(section) if key.section:
            yield from path_values(key.section, section, f"{path}.")
        case dict(table) if key.entry:
            for entry in table:
                yield from _values_of(key.entry, table, entry, f"{path}.")
        case list(entries) if key.entry and key.entry.section:
            for number, entry in enumerate(entries):
                if isinstance(entry, dict):
                    yield from path_values(key.entry.section, entry, f"{path}.{number}.")


def resolve_paths(model: type[BaseModel], tree: Tree, base_of: Callable[[str], str]) -> None:
    """Fill in the RUN/... defaults of missing keys and make all paths in `tree` absolute, in place.

    Relative paths of a key start from the folder `base_of(key)`.
    """
    _fill_defaults(model, tree)
    run = _absolute(tree["run"], base_of("run")) if isinstance(tree["run"], str) else ""
    for value in path_values(model, tree):
        value.replace(_resolve(value.text, value.field, base_of(value.key), run))


def _fill_defaults(model: type[BaseModel], tree: Tree) -> None:
    for name, key in fields_of(model).items():
        default = key.field.default
        if isinstance(default, str) and key.path_field and default not in key.path_field.keywords:
            tree.setdefault(name, default)
        elif key.section and key.is_section:
            if tree.get(name) is None:  # missing, or all its keys are commented out
                tree[name] = {}
            if isinstance(tree[name], dict):
                _fill_defaults(key.section, tree[name])


def _resolve(text: str, field: PathField, base: str, run: str) -> str:
    match field.kind:
        case "run":
            return run
        case "data":
            return resolve_data(text, base)
        case "folder":
            return _absolute(text, base)
        case "template":
            path = _absolute(text, base)
            return path if os.path.isfile(path) else text

    is_function = field.kind == "judge" and FUNCTION.fullmatch(text)
    if is_function or text in field.keywords:
        return text
    if text == "RUN" or text.startswith("RUN/"):
        return os.path.normpath(os.path.join(run, text[4:]))
    path = _absolute(text, base)
    is_stage = path in [os.path.join(run, stage) for stage in STAGE_FOLDERS]
    is_local = is_stage or text.startswith(LOCAL) or os.path.exists(path)
    return path if is_local else text


def resolve_data(text: str, base: str) -> str:
    """Resolve a data name to a path, unless it must be a hub id: OWNER/NAME without data suffix or folder OWNER."""
    name, split = split_name(text, base)
    path = _absolute(name, base)
    is_local = name.startswith(LOCAL) or os.path.exists(path) or is_file_name(name)
    if not is_local and HUB_ID.fullmatch(name):
        owner = _absolute(name.partition("/")[0], base)
        if not os.path.isdir(owner):
            return text
    return f"{path}[{split}]" if split else path


def _absolute(text: str, base: str) -> str:
    return os.path.abspath(os.path.join(base, os.path.expanduser(text)))
