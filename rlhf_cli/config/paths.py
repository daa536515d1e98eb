"""Config fields and their types, and the resolution of path keys.

Paths are relative to the folder of the YAML, or in --set to the working directory, and are stored as absolute paths.
"""

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
class PathField:
    """Annotation of a key for a file, folder or model; `kind` selects how its text is resolved."""

    kind: str  # data, run, model, value, judge or template
    keywords: tuple[str, ...] = ()  # values that are not paths


@dataclass(frozen=True)
class FieldKind:
    """Kind of values that a type annotation allows: paths, a section, or a table."""

    path: PathField | None
    model: type[BaseModel] | None  # a section
    entries: Any  # the annotation of a dict's values, or None


def annotation_kind(annotation: Any, metadata: tuple[Any, ...] = ()) -> FieldKind:
    """Return the kind of an annotation, looking inside Annotated and unions."""
    parts = [*metadata, *flatten_annotation(annotation)]
    models = [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]
    dicts = [get_args(part)[1] for part in parts if get_origin(part) is dict]
    return FieldKind(
        path=next((part for part in parts if isinstance(part, PathField)), None),
        model=models[0] if models else None,
        entries=dicts[0] if dicts else None,
    )


def field_kind(field: FieldInfo) -> FieldKind:
    """Return the kind of a field of a config class."""
    return annotation_kind(field.annotation, tuple(field.metadata))


@cache
def field_kinds(model: type[BaseModel]) -> dict[str, FieldKind]:
    """Return the kind of each field of a config class, by name."""
    return {name: field_kind(field) for name, field in model.model_fields.items()}


def flatten_annotation(annotation: Any) -> Iterator[Any]:
    """Yield the members of unions and the metadata of Annotated, flattened."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *metadata = get_args(annotation)
        yield from metadata
        yield from flatten_annotation(inner)
    elif origin in (Union, UnionType):
        for member in get_args(annotation):
            yield from flatten_annotation(member)
    else:
        yield annotation


@cache
def keys_of(model: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Return the field of every key path of a config class, with sections; table entries are `rewards.NAME.weight`."""
    fields: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        key = prefix + name
        fields[key] = field
        kind = field_kinds(model)[name]
        entry = annotation_kind(kind.entries).model if kind.entries is not None else None
        if kind.model:
            fields |= keys_of(kind.model, f"{key}.")
        elif entry:
            fields |= keys_of(entry, f"{key}.NAME.")
    return fields


def field_at(model: type[BaseModel], path: tuple[str, ...]) -> FieldInfo | None:
    """Return the field of a key path in a config (`rewards.style.weight`), or None."""
    field = model.model_fields.get(path[0]) if path else None
    if field is None or len(path) == 1:
        return field
    kind = field_kind(field)
    entry = annotation_kind(kind.entries).model if kind.entries is not None else None
    if kind.model:
        return field_at(kind.model, path[1:])
    return field_at(entry, path[2:]) if entry else None


def default_of(field: FieldInfo, if_required: Any) -> Any:
    """Return the default of a field as a JSON value, or `if_required` for a required field."""
    return if_required if field.is_required() else to_jsonable_python(field.get_default(call_default_factory=True))


def path_entries(
    model: type[BaseModel], tree: dict[str, Any], prefix: str = ""
) -> Iterator[tuple[dict[str, Any], str, str, PathField]]:
    """Yield (container, name, key path, field) of each path value in `tree`; container[name] can be replaced."""
    for name, kind in field_kinds(model).items():
        value, key = tree.get(name), prefix + name
        if isinstance(value, str) and kind.path:
            yield tree, name, key, kind.path
        if not isinstance(value, dict):
            continue
        if kind.model:
            yield from path_entries(kind.model, value, f"{key}.")
        elif kind.entries is not None:
            yield from _table_path_entries(kind.entries, value, key)


def _table_path_entries(
    annotation: Any, table: dict[str, Any], key: str
) -> Iterator[tuple[dict[str, Any], str, str, PathField]]:
    entry = annotation_kind(annotation)
    for name, value in table.items():
        if isinstance(value, str) and entry.path:
            yield table, name, f"{key}.{name}", entry.path
        elif isinstance(value, dict) and entry.model:
            yield from path_entries(entry.model, value, f"{key}.{name}.")


FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
STAGE_FOLDERS = ("sft", "reward", "ppo")


def resolve_paths(model: type[BaseModel], tree: dict[str, Any], base_of: Callable[[str], str]) -> None:
    """Fill in the RUN/... defaults of missing keys and make all paths in `tree` absolute, in place.

    Relative paths of a key start from the folder `base_of(key)`.
    """
    _fill_defaults(model, tree)
    run = _absolute(tree["run"], base_of("run")) if isinstance(tree["run"], str) else ""
    for container, name, key, path_field in path_entries(model, tree):
        container[name] = run if path_field.kind == "run" else _resolve(container[name], path_field, base_of(key), run)


def relative(value: str, path_field: PathField, folder: Path) -> str:
    """Return a path value relative to `folder`; hub ids, functions and template texts are unchanged."""
    if not is_path(value, path_field):
        return value
    path = Path(os.path.relpath(value, folder)).as_posix()
    # Without a leading dot, a model or data folder would be read as a hub id if the folder is missing.
    unambiguous = path_field.kind in ("run", "template") or (path_field.kind == "data" and is_file_name(path))
    return path if unambiguous or path.startswith(".") else f"./{path}"


def is_path(value: str, path_field: PathField) -> bool:
    """Return True if a resolved value is a path, not a hub id, a function, a keyword or a template text."""
    return os.path.isabs(value) and (path_field.kind != "template" or os.path.isfile(value))


def _fill_defaults(model: type[BaseModel], tree: dict[str, Any]) -> None:
    for name, field in model.model_fields.items():
        kind = field_kinds(model)[name]
        is_section = field.annotation is kind.model
        if kind.path and isinstance(field.default, str) and name not in tree:
            tree[name] = field.default
        elif kind.model and is_section:
            # A section whose keys are all commented out is null.
            section = tree[name] = {} if tree.get(name) is None else tree[name]
            if isinstance(section, dict):
                _fill_defaults(kind.model, section)


def _resolve(text: str, path_field: PathField, base: str, run: str) -> str:
    if path_field.kind == "data":
        return resolve_data(text, base)
    if path_field.kind == "template":
        path = _absolute(text, base)
        return path if os.path.isfile(path) else text
    if text in path_field.keywords or (path_field.kind == "judge" and FUNCTION.fullmatch(text)):
        return text
    return _resolve_model(text, base, run)


def resolve_data(text: str, base: str) -> str:
    """Resolve a data name to a path, unless it must be a hub id: OWNER/NAME without data suffix or folder OWNER."""
    name, split = split_name(text, base)
    candidate = _absolute(name, base)
    local = name.startswith((".", "/", "~")) or os.path.exists(candidate) or is_file_name(name)
    if not local and HUB_ID.fullmatch(name) and not os.path.isdir(_absolute(name.partition("/")[0], base)):
        return text
    return candidate + (f"[{split}]" if split else "")


def _resolve_model(text: str, base: str, run: str) -> str:
    if text == "RUN" or text.startswith("RUN/"):
        return os.path.normpath(os.path.join(run, text[4:]))
    candidate = _absolute(text, base)
    stages = [os.path.join(run, stage) for stage in STAGE_FOLDERS]
    local = text.startswith((".", "/", "~")) or candidate in stages or os.path.exists(candidate)
    return candidate if local else text


def _absolute(text: str, base: str) -> str:
    return os.path.abspath(os.path.join(base, os.path.expanduser(text)))
