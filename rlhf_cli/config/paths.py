"""How path keys are understood: relative to the YAML's folder (in --set to the working directory), stored absolute."""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from rlhf_cli.config.sources import HUB_ID, is_file_name, split_name


@dataclass(frozen=True)
class PathKey:
    """Marks a key that names a file or folder; `kind` says how its text is understood (see paths.py)."""

    kind: str  # data, run, model, value, judge or template
    words: tuple[str, ...] = ()  # texts that name no file


@dataclass(frozen=True)
class Shape:
    """What a type annotation allows, as far as a walk needs it."""

    path: PathKey | None
    model: type[BaseModel] | None  # a section
    entries: Any  # the annotation of a dict's values, or None


def shape(annotation: Any, metadata: tuple[Any, ...] = ()) -> Shape:
    """Looks through Annotated and unions."""
    parts = [*metadata, *parts_of(annotation)]
    models = [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]
    dicts = [get_args(part)[1] for part in parts if get_origin(part) is dict]
    return Shape(
        path=next((part for part in parts if isinstance(part, PathKey)), None),
        model=models[0] if models else None,
        entries=dicts[0] if dicts else None,
    )


def field_shape(field: FieldInfo) -> Shape:
    """The shape of a field of a config class."""
    return shape(field.annotation, tuple(field.metadata))


@cache
def shapes_of(model: type[BaseModel]) -> dict[str, Shape]:
    """The shape of each field of a config class."""
    return {name: field_shape(field) for name, field in model.model_fields.items()}


def parts_of(annotation: Any) -> Iterator[Any]:
    """The members of a union and the notes of an Annotated, flattened."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *notes = get_args(annotation)
        yield from notes
        yield from parts_of(inner)
    elif origin in (Union, UnionType):
        for member in get_args(annotation):
            yield from parts_of(member)
    else:
        yield annotation


@cache
def keys_of(model: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Every key path below a config class, sections included; entries of a dict appear as `rewards.NAME.weight`."""
    found: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        key = prefix + name
        found[key] = field
        below = shapes_of(model)[name]
        entry = shape(below.entries).model if below.entries is not None else None
        if below.model:
            found |= keys_of(below.model, f"{key}.")
        elif entry:
            found |= keys_of(entry, f"{key}.NAME.")
    return found


def field_at(model: type[BaseModel], path: tuple[str, ...]) -> FieldInfo | None:
    """The field that a key path names in real data (`rewards.style.weight`), or None."""
    field = model.model_fields.get(path[0]) if path else None
    if field is None or len(path) == 1:
        return field
    below = field_shape(field)
    entry = shape(below.entries).model if below.entries is not None else None
    if below.model:
        return field_at(below.model, path[1:])
    return field_at(entry, path[2:]) if entry else None


def default_of(field: FieldInfo, otherwise: Any) -> Any:
    """What a field is without being set, as JSON has it; `otherwise` where it must be."""
    return otherwise if field.is_required() else to_jsonable_python(field.get_default(call_default_factory=True))


def path_entries(
    model: type[BaseModel], tree: dict[str, Any], prefix: str = ""
) -> Iterator[tuple[dict[str, Any], str, str, PathKey]]:
    """(container, name, key path, mark) of each text in `tree` that is a path key, so that it can be replaced there."""
    for name, below in shapes_of(model).items():
        value, key = tree.get(name), prefix + name
        if isinstance(value, str) and below.path:
            yield tree, name, key, below.path
        if not isinstance(value, dict):
            continue
        if below.model:
            yield from path_entries(below.model, value, f"{key}.")
        elif below.entries is not None:
            yield from _entries_of(below.entries, value, key)


def _entries_of(annotation: Any, table: dict[str, Any], key: str) -> Iterator[tuple[dict[str, Any], str, str, PathKey]]:
    entry = shape(annotation)
    for name, value in table.items():
        if isinstance(value, str) and entry.path:
            yield table, name, f"{key}.{name}", entry.path
        elif isinstance(value, dict) and entry.model:
            yield from path_entries(entry.model, value, f"{key}.{name}.")


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
