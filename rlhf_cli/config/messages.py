"""Problems of invalid keys and values: from pydantic's validation errors, and of the fields under `trainer:`."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from rlhf_cli.config.base import Config
from rlhf_cli.config.machinery import trl_fields, yaml_io
from rlhf_cli.config.machinery.aliases import SET_BY_RLHF, Alias, find_alias
from rlhf_cli.config.machinery.fields import BOUNDS, Key, key_at, keys_of
from rlhf_cli.config.machinery.section import Section
from rlhf_cli.config.machinery.trl_fields import TRAINERS
from rlhf_cli.config.machinery.yaml_io import FLOAT, INTEGER, is_yaml_1_1
from rlhf_cli.config.ppo import BUILTINS, RewardSourceSettings
from rlhf_cli.config.stages import CONFIGS
from rlhf_cli.errors import CODES, OVERRIDE, Problem, closest_match, did_you_mean

# pydantic's error -> what it expected
TYPE_ERRORS = {
    "int_type": "a whole number", "float_type": "a number", "bool_type": "true or false", "string_type": "text",
    "list_type": "a list", "dict_type": "keys and values", "model_type": "keys and values",
    "model_attributes_type": "keys and values",
}  # fmt: skip
SIGNS = dict(zip(BOUNDS, (">", ">=", "<", "<="), strict=True))
KeyPath = tuple[str, ...]


def translate_validation_error(
    error: ValidationError, tree: dict[str, Any], model: type[Config], where: Callable[[str], str]
) -> list[Problem]:
    """Return one problem per invalid key."""
    by_key: dict[KeyPath, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        by_key.setdefault(_key_path(detail, tree), []).append(detail)

    problems = []
    for path, details in by_key.items():
        # If a value matches the type of one union member, only report the errors inside that member.
        has_inner = any(len(inner) > len(path) and inner[: len(path)] == path for inner in by_key)
        if has_inner and all(_is_type_or_choice(detail) for detail in details):
            continue
        problem = _translate_key(path, details, model, where)
        if details[0]["type"] == "extra_forbidden" and (hint := _parameter_hint(path, tree)):
            problem = replace(problem, hint=hint)
        problems.append(problem)
    return problems


def _is_type_or_choice(detail: ErrorDetails) -> bool:
    return detail["type"] in TYPE_ERRORS or detail["type"] == "literal_error"


def _parameter_hint(path: KeyPath, tree: dict[str, Any]) -> str | None:
    """Return how to write an unknown key of a built-in reward or judge, which may be one of its parameters."""
    if path[0] not in ("rewards", "judges") or len(path) != 3:
        return None
    table, entry, name = path
    section = tree[table][entry]
    if "builtin" not in section or closest_match(name, RewardSourceSettings.model_fields, cutoff=0.8):
        return None
    return f"write parameters: {yaml_io.to_yaml({name: section[name]})}"


def invalid_keys(error: ValidationError, tree: dict[str, Any]) -> list[KeyPath]:
    """Return the path of the invalid key for each error of pydantic."""
    return [_key_path(detail, tree) for detail in error.errors(include_url=False)]


def _key_path(detail: ErrorDetails, tree: Any) -> KeyPath:
    """Return pydantic's location without names of union members, which are not keys of the file."""
    path: list[str] = []
    node = tree
    for depth, part in enumerate(detail["loc"], start=1):
        is_in_list = isinstance(node, list) and isinstance(part, int) and part < len(node)
        is_in_dict = isinstance(node, dict) and part in node
        is_missing_key = detail["type"] == "missing" and depth == len(detail["loc"])
        if is_in_list or is_in_dict:
            node = node[part]
        elif not is_missing_key:
            continue
        path.append(str(part))
    return tuple(path)


def _translate_key(
    path: KeyPath, details: list[ErrorDetails], model: type[Config], where: Callable[[str], str]
) -> Problem:
    name = ".".join(path)
    key = key_at(model, path) if path else None
    detail = next((each for each in details if not _is_type_or_choice(each)), details[0])
    kind = detail["type"]
    value = detail["input"]
    context = detail.get("ctx", {})
    # Validators of several keys can name the key to locate.
    location = where(".".join([*path, *context.get("key", "").split(".")]).strip("."))

    if kind in CODES:
        is_named = not path or re.search(rf"\b{re.escape(path[-1])}\b", detail["msg"])
        text = detail["msg"] if is_named else f"{name}: {detail['msg']}"
        return Problem(kind, text, location, context.get("hint"))
    if kind == "extra_forbidden":
        return _unknown_key(path, value, model, location)
    if kind == "missing":
        hint = f"{path[-1]}: {_first_sentence(key)}" if key else None
        return Problem("C05", f"{name} is missing", location, hint)
    if _is_type_or_choice(detail):
        return _type_or_choice_error(name, details, key, location)
    if kind == "finite_number" or kind.startswith(("greater_than", "less_than")):
        number = " a finite number" if kind == "finite_number" else ""
        bounds = (key and key.bounds) or context
        text = f"{name}: must be{number}{_shown_bounds(bounds)}, got {format_value(value)}"
        return Problem("C06", text, location)
    if kind == "too_short":
        text = f"{name}: needs at least {context['min_length']}, got {context['actual_length']}"
        return Problem("C06", text, location)
    if kind == "string_pattern_mismatch":
        text = f"{name}: {format_value(value)} has the wrong form"
        return Problem("C05", text, location, _first_sentence(key) if key else None)
    return Problem("C05", f"{name}: {detail['msg']}", location)


def _first_sentence(key: Key) -> str:
    return key.description.partition(". ")[0].rstrip(".")


def _shown_bounds(limits: dict[str, Any]) -> str:
    """Return the bounds of a number, such as " > 0 and <= 1"."""
    bounds = [f"{sign} {limits[name]:.15g}" for name, sign in SIGNS.items() if name in limits]
    return f" {' and '.join(bounds)}" if bounds else ""


# Unknown keys


def _unknown_key(path: KeyPath, value: Any, model: type[Config], location: str) -> Problem:
    """Return C01 with the closest key, or C02 with the section or file that the key belongs to."""
    name = path[-1]
    section = path[:-1]
    siblings = _keys_in(section, model)
    unknown = Problem("C01", f"unknown key {'.'.join(path)}", location)

    alias = find_alias(name)
    if alias and alias.key and section:
        is_here = alias.key in siblings or ("." in alias.key and alias.key in keys_of(model))
        if is_here:
            return replace(unknown, hint=_alias_hint(alias.key, alias, value))
    if alias and alias.key is None and section == ("ppo",):
        return replace(unknown, hint=f"{alias.note}; remove the line")

    if place := _correct_place(name, path, model, location):
        text, hint = place
        return Problem("C02", f"{'.'.join(path)} belongs {text}", location, hint)
    if len(siblings) <= 8:
        listed = f"keys here: {', '.join(siblings)}"
    else:
        listed = f"`rlhf explain {'.'.join(section) or '--all'}` lists the keys"
    return replace(unknown, hint=did_you_mean(name, siblings) or listed)


def _alias_hint(key: str, alias: Alias, value: Any) -> str:
    """Return how to write another system's option with the key that replaces it here."""
    if alias.note:
        return f"use {key}; {alias.note}"
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return f"write {key}: {alias.values.get(str(value), value)}"
    return f"use {key}"


def _keys_in(section: KeyPath, model: type[Config]) -> list[str]:
    if not section:
        return list(model.model_fields)
    key = key_at(model, section)
    if key is None and len(section) > 1:  # an entry such as rewards.style
        table = key_at(model, section[:-1])
        key = table.entry if table else None
    return list(key.section.model_fields) if key and key.section else []


def _correct_place(name: str, path: KeyPath, model: type[Config], location: str) -> tuple[str, str | None] | None:
    """Return (location, hint) of a key of this name in this config, under trainer: or in another file, or None."""
    stage = model.model_fields["stage"].default
    if keys := _keys_named(name, model):
        section = keys[0].rpartition(".")[0]
        place = f"under {section}:" if section else "at the top of the file"
        return place, _move_hint(keys[0], location)
    if stage in TRAINERS and name in trl_fields.fields_of(stage) and path[0] != "trainer":
        return "under trainer:", _move_hint(f"trainer.{name}", location)

    files: dict[str, list[str]] = {}
    for config_stage, config in CONFIGS.items():
        for key in _keys_named(name, config)[:1]:
            files.setdefault(key.rpartition(".")[0], []).append(f"{config_stage}.yaml")
    if not files:
        return None
    # A section of another file, such as ppo:, rather than a key of that name.
    section = min(files, key=len)
    place = f"in {' or '.join(files[section])}"
    return (f"{place}, under {section}:" if section else place), None


def _move_hint(key: str, location: str) -> str:
    """Return how to write a key in its section: in a file by its indent, for --set and `rlhf explain` with dots."""
    if not location or location.startswith(OVERRIDE):
        return f"write it as {key}"
    section = key.rpartition(".")[0]
    return f"indent it below `{section}:`" if section else "write it on a separate line, without an indent"


def _keys_named(name: str, model: type[Config]) -> list[str]:
    return [path for path, key in keys_of(model).items() if key.name == name and path.count(".") <= 1]


# Types and choices


def format_value(value: Any) -> str:
    """Format a value for a message, shortened to 60 characters."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "keys and values"
    if isinstance(value, list):
        return "a list"
    text = str(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _type_or_choice_error(name: str, details: list[ErrorDetails], key: Key | None, location: str) -> Problem:
    """Return the problem of a value that no member of a union accepts, by type, choice or both.

    C07 for a choice, with all of them and the nearest one; C06 for a boolean as number, C10 for a YAML 1.1 spelling,
    else C05.
    """
    value = details[0]["input"]
    choices: list[str] = []
    for detail in details:
        if detail["type"] == "literal_error":
            choices += re.findall(r"'([^']*)'", detail["ctx"]["expected"])
    types = [TYPE_ERRORS[detail["type"]] for detail in details if detail["type"] in TYPE_ERRORS]
    if choices and (isinstance(value, str) or not types) and not is_yaml_1_1(value):
        choices += types
        text = f"{name}: {format_value(value)} is not one of {', '.join(choices)}"
        hint = did_you_mean(value, choices) if isinstance(value, str) else None
        return Problem("C07", text, location, hint)

    types = list(dict.fromkeys([*types, *choices]))
    bounds = _shown_bounds(key.bounds if key else {})
    bounded = [kind + bounds if kind.endswith("number") else kind for kind in types]
    text = f"{name}: expected {' or '.join(bounded)}, got {format_value(value)}"
    code, hint = _type_hint(name, value, types)
    return Problem(code, text, location, hint)


def _type_hint(name: str, value: Any, types: list[str]) -> tuple[str, str | None]:
    """Return the code and the hint for a value that is of none of these types."""
    wants_number = any(kind.endswith("number") for kind in types)
    if isinstance(value, bool):
        if wants_number:
            return "C06", None
        return "C05", 'write it in quotes: "true"' if "text" in types else None
    if isinstance(value, str) and wants_number and (INTEGER.fullmatch(value) or FLOAT.fullmatch(value)):
        return "C05", f"remove the quotes: {value}"
    if is_yaml_1_1(value) and "true or false" in types:
        return "C10", "write true or false"
    if is_yaml_1_1(value) and wants_number:
        return "C10", "write a plain decimal number"
    if "a whole number" in types and isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return "C05", f"write {int(value)}"
    if "text" in types and isinstance(value, int | float):
        return "C05", f'write it in quotes: "{value}"'
    if re.fullmatch(r"rewards\.[^.]+", name) and isinstance(value, str):
        kind = f"builtin: {value}" if value in BUILTINS else "function: module:function"
        return "C05", f"write {{{kind}}}"
    if types == ["a list"] and isinstance(value, str | int | float):
        return "C05", f"write [{value}]"
    return "C05", None


# Fields of TRL


def check_trainer(trainer: dict[str, Any], model: type[Config], where: Callable[[str], str]) -> list[Problem]:
    """Return the problems of a `trainer:` section."""
    problems = [_check_field(name, value, model, where(f"trainer.{name}")) for name, value in trainer.items()]
    return [problem for problem in problems if problem]


def _check_field(name: str, value: Any, model: type[Config], location: str) -> Problem | None:
    key = f"trainer.{name}"
    stage = model.model_fields["stage"].default
    own_keys = trl_fields.settings_keys(model)
    if name in own_keys:
        return Problem("C02", f"{key} belongs under {stage}:", location, _move_hint(f"{stage}.{name}", location))
    if trl_fields.is_set_by_rlhf(name):
        instead = SET_BY_RLHF.get(name)
        hint = f"use {instead.format(stage=stage)}" if instead else "remove the line"
        return Problem("C02", f"{key} is set by the pipeline", location, hint)
    field = trl_fields.trainer_keys(model).get(name)
    if field is None:
        text = f"unknown key {key}: not a field of TRL's {TRAINERS[stage]}"
        return Problem("C01", text, location, _unknown_field_hint(name, stage, own_keys))
    annotation: Any = field.field.annotation
    try:
        TypeAdapter(annotation, config=Section.model_config).validate_python(value)
    except ValidationError as error:
        return _translate_key(("trainer", name), error.errors(include_url=False), model, lambda key: location)
    return None


def _unknown_field_hint(name: str, stage: str, own_keys: list[str]) -> str | None:
    """Return the config of TRL that has a field of this name, else the nearest field or key of the stage."""
    for other, config in TRAINERS.items():
        if name in trl_fields.fields_of(other):
            return f"only {config} has this field"
    near = closest_match(name, [*trl_fields.fields_of(stage), *own_keys])
    if near is None:
        return None
    return f"did you mean {stage}.{near}?" if near in own_keys else f"did you mean {near}?"
