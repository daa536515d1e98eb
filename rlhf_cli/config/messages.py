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
from rlhf_cli.config.machinery.aliases import SET_BY_RLHF, find_alias
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
        if has_inner and all(detail["type"] in (*TYPE_ERRORS, "literal_error") for detail in details):
            continue
        problem = _translate_key(path, details, model, where)
        if details[0]["type"] == "extra_forbidden" and path[0] in ("rewards", "judges") and len(path) == 3:
            section = tree[path[0]][path[1]]
            if "builtin" in section and not closest_match(path[-1], RewardSourceSettings.model_fields, cutoff=0.8):
                problem = replace(problem, hint=f"write parameters: {yaml_io.to_yaml({path[-1]: section[path[-1]]})}")
        problems.append(problem)
    return problems


def invalid_keys(error: ValidationError, tree: dict[str, Any]) -> list[KeyPath]:
    """Return the path of the invalid key for each error of pydantic."""
    return [_key_path(detail, tree) for detail in error.errors(include_url=False)]


def _key_path(detail: ErrorDetails, tree: Any) -> KeyPath:
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


def _translate_key(
    path: KeyPath, details: list[ErrorDetails], model: type[Config], where: Callable[[str], str]
) -> Problem:
    name = ".".join(path)
    detail = next((each for each in details if each["type"] not in (*TYPE_ERRORS, "literal_error")), details[0])
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    # Validators of several keys can name the key to locate.
    location = where(".".join([*path, *context.get("key", "").split(".")]).strip("."))
    key = key_at(model, path) if path else None
    if kind in CODES:
        is_named = not path or re.search(rf"\b{re.escape(path[-1])}\b", detail["msg"])
        return Problem(kind, detail["msg"] if is_named else f"{name}: {detail['msg']}", location, context.get("hint"))
    if kind == "extra_forbidden":
        return _unknown_key(path, value, model, location)
    if kind == "missing":
        return Problem("C05", f"{name} is missing", location, f"{path[-1]}: {_first_sentence(key)}" if key else None)
    if kind in TYPE_ERRORS or kind == "literal_error":
        return _type_or_choice_error(name, details, key, location)
    if kind == "finite_number" or kind.startswith(("greater_than", "less_than")):
        number = " a finite number" if kind == "finite_number" else ""
        text = f"{name}: must be{number}{_shown_bounds((key and key.bounds) or context)}, got {format_value(value)}"
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
    name, section = path[-1], path[:-1]
    unknown = Problem("C01", f"unknown key {'.'.join(path)}", location)
    siblings = _keys_in(section, model)
    alias = find_alias(name)
    new = alias.key if alias and section else None
    if alias and new and (new in siblings or ("." in new and new in keys_of(model))):
        is_scalar = isinstance(value, str | int | float) and not isinstance(value, bool)
        replacement = f"write {new}: {alias.values.get(str(value), value)}" if is_scalar else f"use {new}"
        return replace(unknown, hint=f"use {new}; {alias.note}" if alias.note else replacement)
    if alias and alias.key is None and section == ("ppo",):
        return replace(unknown, hint=f"{alias.note}; remove the line")
    if place := _correct_place(name, path, model, location):
        return Problem("C02", f"{'.'.join(path)} belongs {place[0]}", location, place[1])
    listed = f"`rlhf explain {'.'.join(section) or '--all'}` lists the keys"
    listed = f"keys here: {', '.join(siblings)}" if len(siblings) <= 8 else listed
    return replace(unknown, hint=did_you_mean(name, siblings) or listed)


def _keys_in(section: KeyPath, model: type[Config]) -> list[str]:
    if not section:
        return list(model.model_fields)
    key, table = key_at(model, section), key_at(model, section[:-1]) if section[1:] else None
    if key is None and table:  # an entry such as rewards.style
        key = table.entry
    return list(key.section.model_fields) if key and key.section else []


def _correct_place(name: str, path: KeyPath, model: type[Config], location: str) -> tuple[str, str | None] | None:
    """Return (location, hint) of a key of this name in this config, under trainer: or in another file, or None."""
    stage = model.model_fields["stage"].default
    if keys := _keys_named(name, model):
        section = keys[0].rpartition(".")[0]
        return f"under {section}:" if section else "at the top of the file", _move_hint(keys[0], location)
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
    return f"in {' or '.join(files[section])}" + (f", under {section}:" if section else ""), None


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
    expected = [detail["ctx"]["expected"] for detail in details if detail["type"] == "literal_error"]
    choices = [choice for text in expected for choice in re.findall(r"'([^']*)'", text)]
    types = [TYPE_ERRORS[detail["type"]] for detail in details if detail["type"] in TYPE_ERRORS]
    if choices and (isinstance(value, str) or not types) and not is_yaml_1_1(value):
        choices += types
        text = f"{name}: {format_value(value)} is not one of {', '.join(choices)}"
        return Problem("C07", text, location, did_you_mean(value, choices) if isinstance(value, str) else None)
    types = list(dict.fromkeys([*types, *choices]))
    number = any(type_name.endswith("number") for type_name in types)
    bounds = _shown_bounds(key.bounds if key else {})
    bounded = [type_name + bounds if type_name.endswith("number") else type_name for type_name in types]
    text = f"{name}: expected {' or '.join(bounded)}, got {format_value(value)}"
    code, hint = "C05", None
    if isinstance(value, bool):
        code = "C06" if number else "C05"
        hint = 'write it in quotes: "true"' if "text" in types and not number else None
    elif number and isinstance(value, str) and (INTEGER.fullmatch(value) or FLOAT.fullmatch(value)):
        hint = f"remove the quotes: {value}"
    elif is_yaml_1_1(value) and ("true or false" in types or number):
        code, hint = "C10", "write true or false" if "true or false" in types else "write a plain decimal number"
    elif "a whole number" in types and isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        hint = f"write {int(value)}"
    elif "text" in types and isinstance(value, int | float):
        hint = f'write it in quotes: "{value}"'
    elif re.fullmatch(r"rewards\.[^.]+", name) and isinstance(value, str):
        hint = f"write {{{f'builtin: {value}' if value in BUILTINS else 'function: module:function'}}}"
    elif types == ["a list"] and isinstance(value, str | int | float):
        hint = f"write [{value}]"
    return Problem(code, text, location, hint)


# Fields of TRL


def check_trainer(trainer: dict[str, Any], model: type[Config], where: Callable[[str], str]) -> list[Problem]:
    """Return the problems of a `trainer:` section."""
    problems = [_check_field(name, value, model, where(f"trainer.{name}")) for name, value in trainer.items()]
    return [problem for problem in problems if problem]


def _check_field(name: str, value: Any, model: type[Config], location: str) -> Problem | None:
    stage = model.model_fields["stage"].default
    key, own_keys = f"trainer.{name}", trl_fields.settings_keys(model)
    if name in own_keys:
        return Problem("C02", f"{key} belongs under {stage}:", location, _move_hint(f"{stage}.{name}", location))
    if trl_fields.is_set_by_rlhf(name):
        instead = SET_BY_RLHF.get(name)
        hint = f"use {instead.format(stage=stage)}" if instead else "remove the line"
        return Problem("C02", f"{key} is set by the pipeline", location, hint)
    field = trl_fields.trainer_keys(model).get(name)
    if field is None:
        text = f"unknown key {key}: not a field of TRL's {TRAINERS[stage]}"
        near = closest_match(name, [*trl_fields.fields_of(stage), *own_keys])
        nearest = near and f"did you mean {f'{stage}.' if near in own_keys else ''}{near}?"
        others = [config for other, config in TRAINERS.items() if name in trl_fields.fields_of(other)]
        return Problem("C01", text, location, f"only {others[0]} has this field" if others else nearest)
    annotation: Any = field.field.annotation
    try:
        TypeAdapter(annotation, config=Section.model_config).validate_python(value)
    except ValidationError as error:
        return _translate_key(("trainer", name), error.errors(include_url=False), model, lambda key: location)
    return None
