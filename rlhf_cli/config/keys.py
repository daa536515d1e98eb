"""Walks over the config classes: which keys there are, and which of them name a file."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python


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
