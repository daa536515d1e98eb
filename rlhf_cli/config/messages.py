"""pydantic's complaints in our words: a code, the place in the file, and the fix."""

import re
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from rlhf_cli.config.aliases import foreign
from rlhf_cli.config.base import Config
from rlhf_cli.config.paths import field_at, field_shape, keys_of, parts_of, shape
from rlhf_cli.config.training import CONFIGS
from rlhf_cli.config.trl_fields import TRAINERS, fields_of
from rlhf_cli.config.values import not_a_choice, shown_value, wrong_type
from rlhf_cli.config.yaml_io import is_yaml_1_1
from rlhf_cli.error_codes import CODES
from rlhf_cli.errors import Problem, closest_match


def unknown_key(path: tuple[str, ...], value: Any, model: type[Config], place: str) -> Problem:
    """C01 with the key that was meant, or C02 with the place where the key belongs."""
    key, name, section = ".".join(path), path[-1], path[:-1]
    siblings = _keys_under(model, section)
    renamed = _renamed(name, value, siblings, model) if section else None
    if renamed:
        return Problem("C01", f"unknown key {key}", place, renamed)
    theirs = foreign(name)
    if section == ("ppo",) and theirs and theirs.key is None:
        return Problem("C01", f"unknown key {key}", place, f"{theirs.why}; remove the line")
    home = _home(name, path, model)
    if home:
        return Problem("C02", f"{key} belongs {home[0]}", place, home[1])
    near = closest_match(name, siblings)
    if near:
        hint = f"did you mean {near}?"
    elif len(siblings) <= 8:
        hint = f"keys here: {', '.join(siblings)}"
    else:
        hint = f"`rlhf explain {'.'.join(section) or '--all'}` lists the keys"
    return Problem("C01", f"unknown key {key}", place, hint)


def _keys_under(model: type[Config], section: tuple[str, ...]) -> list[str]:
    if not section:
        return list(model.model_fields)
    field = field_at(model, section)
    if field is None:  # an entry such as rewards.style
        table = field_at(model, section[:-1])
        entry = shape(field_shape(table).entries).model if table else None
    else:
        entry = field_shape(field).model
    return list(entry.model_fields) if entry else []


def _renamed(name: str, value: Any, siblings: list[str], model: type[Config]) -> str | None:
    theirs = foreign(name)
    new = theirs.key if theirs else None
    if theirs is None or new is None or not (new in siblings or ("." in new and new in keys_of(model))):
        return None
    if theirs.why:
        return f"use {new}; {theirs.why}"
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return f"write {new}: {theirs.words.get(str(value), value)}"
    return f"use {new}"


def _home(name: str, path: tuple[str, ...], model: type[Config]) -> tuple[str, str | None] | None:
    """(where a key of this name belongs, how to write it): in this config, under trainer:, or in another file."""
    stage = model.model_fields["stage"].default
    here = _places(name, model)
    if here:
        section = here[0].rpartition(".")[0]
        return f"under {section}:" if section else "at the top of the file", f"write it as {here[0]}"
    if stage in TRAINERS and name in fields_of(stage) and path[0] != "trainer":
        return "under trainer:", f"write it as trainer.{name}"
    there: dict[str, list[str]] = {}
    for other, config in CONFIGS.items():
        for key in _places(name, config)[:1]:
            there.setdefault(key.rpartition(".")[0], []).append(f"{other}.yaml")
    if not there:
        return None
    # A section of another file, such as ppo:, rather than a key of that name.
    section = min(there, key=len)
    return f"in {' or '.join(there[section])}" + (f", under {section}:" if section else ""), None


def _places(name: str, model: type[Config]) -> list[str]:
    return [key for key in keys_of(model) if key.rpartition(".")[2] == name and key.count(".") <= 1]


EXPECTED = {
    "int_type": "a whole number", "float_type": "a number", "bool_type": "true or false", "string_type": "text",
    "list_type": "a list", "dict_type": "keys and values", "model_type": "keys and values",
    "model_attributes_type": "keys and values",
}  # fmt: skip
BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
Path = tuple[str, ...]


def translate(
    error: ValidationError, tree: dict[str, Any], model: type[Config], where: Callable[[str], str]
) -> list[Problem]:
    """One problem for each key that is wrong."""
    by_key: dict[Path, list[Any]] = {}
    for detail in error.errors(include_url=False):
        by_key.setdefault(_real_path(detail, tree), []).append(detail)
    problems = []
    for path, details in by_key.items():
        # Where a value fits one arm of a union in kind, what is wrong inside it says more than the other arms.
        inside = any(len(other) > len(path) and other[: len(path)] == path for other in by_key)
        if inside and all(detail["type"] in EXPECTED for detail in details):
            continue
        problems.append(_problem(path, details, model, where))
    return problems


def wrong_keys(error: ValidationError, tree: dict[str, Any]) -> list[Path]:
    """The path of each key that is wrong, once for each complaint."""
    return [_real_path(detail, tree) for detail in error.errors(include_url=False)]


def _problem(path: Path, details: list[Any], model: type[Config], where: Callable[[str], str]) -> Problem:
    key = ".".join(path)
    detail = next((each for each in details if each["type"] not in EXPECTED | {"literal_error": ""}), details[0])
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    # A check of several keys may name the one to point at.
    place = where(".".join([*path, *context.get("key", "").split(".")]).strip("."))
    field = field_at(model, path)
    if kind in CODES:
        named = not path or re.search(rf"\b{re.escape(path[-1])}\b", detail["msg"])
        return Problem(kind, detail["msg"] if named else f"{key}: {detail['msg']}", place, context.get("hint"))
    if kind == "extra_forbidden":
        return unknown_key(path, value, model, place)
    if kind == "missing":
        meaning = _meaning(field)
        return Problem("C05", f"{key} is missing", place, f"{path[-1]}: {meaning}" if meaning else None)
    if kind in EXPECTED or kind == "literal_error":
        return _wrong_kind(key, details, field, place)
    if kind == "finite_number" or kind.startswith(("greater_than", "less_than")):
        bounds = _bounds(field) or _bounds_of(context)
        kind_of_number = " a finite number" if kind == "finite_number" else ""
        return Problem("C06", f"{key}: must be{kind_of_number}{bounds}, got {shown_value(value)}", place)
    if kind == "too_short":
        return Problem("C06", f"{key}: needs at least {context['min_length']}, got {context['actual_length']}", place)
    if kind == "string_pattern_mismatch":
        return Problem("C05", f"{key}: {shown_value(value)} has the wrong form", place, _meaning(field))
    return Problem("C05", f"{key}: {detail['msg']}", place)


def _meaning(field: FieldInfo | None) -> str | None:
    """The first sentence of a key's description, which ends in the source of its default."""
    return field.description.partition(". ")[0].rstrip(".") if field and field.description else None


def _wrong_kind(key: str, details: list[Any], field: FieldInfo | None, place: str) -> Problem:
    """Wrong in all arms of a union: other types, other words, or both."""
    value = details[0]["input"]
    words = [word for detail in details if detail["type"] == "literal_error" for word in _choices(detail)]
    types = [EXPECTED[detail["type"]] for detail in details if detail["type"] in EXPECTED]
    if words and (isinstance(value, str) or not types) and not is_yaml_1_1(value):
        choice = not_a_choice(key, [*words, *types], value)
        return Problem(choice.code, choice.text, place, choice.hint)
    code, text, hint = wrong_type(key, [*types, *words], value, _bounds(field))
    return Problem(code, text, place, hint)


def _choices(detail: Any) -> list[str]:
    return re.findall(r"'([^']*)'", detail["ctx"]["expected"])


def _real_path(detail: Any, tree: Any) -> Path:
    """pydantic's location without the names of union arms, which are no keys of the file."""
    path: list[str] = []
    node = tree
    for depth, part in enumerate(detail["loc"], start=1):
        in_list = isinstance(node, list) and isinstance(part, int) and part < len(node)
        if in_list or (isinstance(node, dict) and part in node):
            node = node[part]
        elif detail["type"] != "missing" or depth < len(detail["loc"]):
            continue
        path.append(str(part))
    return tuple(path)


def _bounds(field: FieldInfo | None) -> str:
    """The limits declared for a number, such as " > 0 and <= 1"."""
    if field is None:
        return ""
    notes = [*field.metadata]
    for part in parts_of(field.annotation):
        notes += part.metadata if isinstance(part, FieldInfo) else []
    found = {name: getattr(note, name) for note in notes for name in BOUNDS if getattr(note, name, None) is not None}
    return _bounds_of(found)


def _bounds_of(found: dict[str, Any]) -> str:
    words = [f"{sign} {found[name]:.15g}" for name, sign in BOUNDS.items() if name in found]
    return f" {' and '.join(words)}" if words else ""
