"""Translate pydantic's validation errors to problems with an error code, a location and a hint."""

import re
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from rlhf_cli.config.aliases import find_alias
from rlhf_cli.config.base import Config
from rlhf_cli.config.paths import annotation_kind, field_at, field_kind, flatten_annotation, keys_of
from rlhf_cli.config.training import CONFIGS
from rlhf_cli.config.trl_fields import TRAINERS, fields_of
from rlhf_cli.config.value_errors import format_value, not_a_choice, wrong_type
from rlhf_cli.config.yaml_io import is_yaml_1_1
from rlhf_cli.error_codes import CODES
from rlhf_cli.errors import Problem, closest_match


def unknown_key(path: tuple[str, ...], value: Any, model: type[Config], location: str) -> Problem:
    """Return C01 with the closest key, or C02 with the section or file that the key belongs to."""
    key, name, section = ".".join(path), path[-1], path[:-1]
    siblings = _keys_of_section(model, section)
    hint = _alias_hint(name, value, siblings, model) if section else None
    if hint:
        return Problem("C01", f"unknown key {key}", location, hint)
    alias = find_alias(name)
    if section == ("ppo",) and alias and alias.key is None:
        return Problem("C01", f"unknown key {key}", location, f"{alias.note}; remove the line")
    if correct := _correct_section(name, path, model):
        return Problem("C02", f"{key} belongs {correct[0]}", location, correct[1])
    near = closest_match(name, siblings)
    if near:
        hint = f"did you mean {near}?"
    elif len(siblings) <= 8:
        hint = f"keys here: {', '.join(siblings)}"
    else:
        hint = f"`rlhf explain {'.'.join(section) or '--all'}` lists the keys"
    return Problem("C01", f"unknown key {key}", location, hint)


def _keys_of_section(model: type[Config], section: tuple[str, ...]) -> list[str]:
    if not section:
        return list(model.model_fields)
    field = field_at(model, section)
    if field is None:  # an entry such as rewards.style
        table = field_at(model, section[:-1])
        entry = annotation_kind(field_kind(table).entries).model if table else None
    else:
        entry = field_kind(field).model
    return list(entry.model_fields) if entry else []


def _alias_hint(name: str, value: Any, siblings: list[str], model: type[Config]) -> str | None:
    """Return a hint with the key that replaces another system's option, if this section or config has it."""
    alias = find_alias(name)
    key = alias.key if alias else None
    if alias is None or key is None or not (key in siblings or ("." in key and key in keys_of(model))):
        return None
    if alias.note:
        return f"use {key}; {alias.note}"
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return f"write {key}: {alias.values.get(str(value), value)}"
    return f"use {key}"


def _correct_section(name: str, path: tuple[str, ...], model: type[Config]) -> tuple[str, str | None] | None:
    """Return (location, hint) of a key of this name in this config, under trainer: or in another file, or None."""
    stage = model.model_fields["stage"].default
    keys = _keys_named(name, model)
    if keys:
        section = keys[0].rpartition(".")[0]
        return f"under {section}:" if section else "at the top of the file", f"write it as {keys[0]}"
    if stage in TRAINERS and name in fields_of(stage) and path[0] != "trainer":
        return "under trainer:", f"write it as trainer.{name}"
    files: dict[str, list[str]] = {}
    for config_stage, config in CONFIGS.items():
        for key in _keys_named(name, config)[:1]:
            files.setdefault(key.rpartition(".")[0], []).append(f"{config_stage}.yaml")
    if not files:
        return None
    # A section of another file, such as ppo:, rather than a key of that name.
    section = min(files, key=len)
    return f"in {' or '.join(files[section])}" + (f", under {section}:" if section else ""), None


def _keys_named(name: str, model: type[Config]) -> list[str]:
    return [key for key in keys_of(model) if key.rpartition(".")[2] == name and key.count(".") <= 1]


TYPE_NAMES = {
    "int_type": "a whole number", "float_type": "a number", "bool_type": "true or false", "string_type": "text",
    "list_type": "a list", "dict_type": "keys and values", "model_type": "keys and values",
    "model_attributes_type": "keys and values",
}  # fmt: skip
BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
Path = tuple[str, ...]


def translate_validation_error(
    error: ValidationError, tree: dict[str, Any], model: type[Config], where: Callable[[str], str]
) -> list[Problem]:
    """Return one problem per invalid key."""
    by_key: dict[Path, list[Any]] = {}
    for detail in error.errors(include_url=False):
        by_key.setdefault(_key_path(detail, tree), []).append(detail)
    problems = []
    for path, details in by_key.items():
        # If a value matches the type of one union member, only report the errors inside that member.
        has_inner = any(len(inner) > len(path) and inner[: len(path)] == path for inner in by_key)
        if has_inner and all(detail["type"] in TYPE_NAMES for detail in details):
            continue
        problems.append(_translate_key(path, details, model, where))
    return problems


def invalid_keys(error: ValidationError, tree: dict[str, Any]) -> list[Path]:
    """Return the path of the invalid key for each error of pydantic."""
    return [_key_path(detail, tree) for detail in error.errors(include_url=False)]


def _translate_key(path: Path, details: list[Any], model: type[Config], where: Callable[[str], str]) -> Problem:
    key = ".".join(path)
    detail = next(
        (detail for detail in details if detail["type"] not in TYPE_NAMES | {"literal_error": ""}), details[0]
    )
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    # Validators of several keys can name the key to locate.
    location = where(".".join([*path, *context.get("key", "").split(".")]).strip("."))
    field = field_at(model, path)
    if kind in CODES:
        is_named = not path or re.search(rf"\b{re.escape(path[-1])}\b", detail["msg"])
        return Problem(kind, detail["msg"] if is_named else f"{key}: {detail['msg']}", location, context.get("hint"))
    if kind == "extra_forbidden":
        return unknown_key(path, value, model, location)
    if kind == "missing":
        description = _first_sentence(field)
        hint = f"{path[-1]}: {description}" if description else None
        return Problem("C05", f"{key} is missing", location, hint)
    if kind in TYPE_NAMES or kind == "literal_error":
        return _type_or_choice_error(key, details, field, location)
    if kind == "finite_number" or kind.startswith(("greater_than", "less_than")):
        bounds = _bounds(field) or _bounds_of(context)
        number = " a finite number" if kind == "finite_number" else ""
        return Problem("C06", f"{key}: must be{number}{bounds}, got {format_value(value)}", location)
    if kind == "too_short":
        return Problem(
            "C06", f"{key}: needs at least {context['min_length']}, got {context['actual_length']}", location
        )
    if kind == "string_pattern_mismatch":
        return Problem("C05", f"{key}: {format_value(value)} has the wrong form", location, _first_sentence(field))
    return Problem("C05", f"{key}: {detail['msg']}", location)


def _first_sentence(field: FieldInfo | None) -> str | None:
    """Return the first sentence of a key's description, without the source of its default."""
    return field.description.partition(". ")[0].rstrip(".") if field and field.description else None


def _type_or_choice_error(key: str, details: list[Any], field: FieldInfo | None, location: str) -> Problem:
    """Return the problem of a value that no member of a union accepts, by type, choice or both."""
    value = details[0]["input"]
    choices = [choice for detail in details if detail["type"] == "literal_error" for choice in _choices(detail)]
    types = [TYPE_NAMES[detail["type"]] for detail in details if detail["type"] in TYPE_NAMES]
    if choices and (isinstance(value, str) or not types) and not is_yaml_1_1(value):
        problem = not_a_choice(key, [*choices, *types], value)
        return Problem(problem.code, problem.text, location, problem.hint)
    code, text, hint = wrong_type(key, [*types, *choices], value, _bounds(field))
    return Problem(code, text, location, hint)


def _choices(detail: Any) -> list[str]:
    return re.findall(r"'([^']*)'", detail["ctx"]["expected"])


def _key_path(detail: Any, tree: Any) -> Path:
    """Return pydantic's location without names of union members, which are not keys of the file."""
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
    """Return the declared bounds of a number, such as " > 0 and <= 1"."""
    if field is None:
        return ""
    metadata = [*field.metadata]
    for part in flatten_annotation(field.annotation):
        metadata += part.metadata if isinstance(part, FieldInfo) else []
    limits = {
        name: getattr(item, name) for item in metadata for name in BOUNDS if getattr(item, name, None) is not None
    }
    return _bounds_of(limits)


def _bounds_of(limits: dict[str, Any]) -> str:
    bounds = [f"{sign} {limits[name]:.15g}" for name, sign in BOUNDS.items() if name in limits]
    return f" {' and '.join(bounds)}" if bounds else ""
