"""Problems of invalid keys and values: from pydantic's validation errors, and of the fields under `trainer:`."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from rlhf_cli.config.base import Config
from rlhf_cli.config.machinery import trl_fields, yaml_io
from rlhf_cli.config.machinery.aliases import SET_BY_RLHF, find_alias
from rlhf_cli.config.machinery.fields import BOUNDS, Key, key_at, keys_of
from rlhf_cli.config.machinery.section import Section, Where
from rlhf_cli.config.machinery.trl_fields import TRAINERS
from rlhf_cli.config.machinery.yaml_io import FLOAT, INTEGER, is_yaml_1_1
from rlhf_cli.config.ppo import BUILTINS, RewardSourceSettings
from rlhf_cli.config.stages import CONFIGS
from rlhf_cli.errors import CODES, OVERRIDE, Problem, closest_match, did_you_mean
from rlhf_cli.trees import Tree

# pydantic's error -> what it expected
TYPE_ERRORS = {
    "int_type": "a whole number", "float_type": "a number", "bool_type": "true or false", "string_type": "text",
    "list_type": "a list", "dict_type": "keys and values", "model_type": "keys and values",
    "model_attributes_type": "keys and values",
}  # fmt: skip
TYPE_OR_CHOICE_ERRORS = {*TYPE_ERRORS, "literal_error"}
SIGNS = dict(zip(BOUNDS, (">", ">=", "<", "<="), strict=True))
MAX_LISTED_KEYS = 8
KeyPath = tuple[str, ...]


@dataclass(frozen=True)
class InvalidKey:
    """A key that pydantic refuses, with an error of each member of its union."""

    path: KeyPath
    errors: Sequence[ErrorDetails]
    model: type[Config]
    where: Where

    @property
    def name(self) -> str:
        """Return the path as it is written, such as ppo.kl_coef."""
        return ".".join(self.path)

    @property
    def error(self) -> ErrorDetails:
        """Return the error to report: the first one behind a type that fits, if there is one."""
        of_values = [error for error in self.errors if error["type"] not in TYPE_OR_CHOICE_ERRORS]
        return of_values[0] if of_values else self.errors[0]

    @property
    def value(self) -> Any:
        """Return the value that the user wrote."""
        return self.error["input"]

    @property
    def key(self) -> Key | None:
        """Return the key of the config, None for an entry of a list or table and for a section's own check."""
        return key_at(self.model, self.path) if self.path else None

    @property
    def location(self) -> str:
        """Return where the key is written. A validator of several keys can name the one to locate."""
        located = self.error.get("ctx", {}).get("key")
        path = (*self.path, located) if located else self.path
        return self.where(".".join(path))

    def bounds(self) -> str:
        """Return the bounds of a number, such as " > 0 and <= 1"."""
        limits = self.key.bounds if self.key else {}
        limits = limits or self.error.get("ctx", {})
        bounds = [f"{sign} {limits[name]:.15g}" for name, sign in SIGNS.items() if name in limits]
        return f" {' and '.join(bounds)}" if bounds else ""

    def problem(self, code: str, text: str, hint: str | None = None) -> Problem:
        """Return a problem at this key."""
        return Problem(code, text, self.location, hint)


def translate_validation_error(error: ValidationError, tree: Tree, model: type[Config], where: Where) -> list[Problem]:
    """Return one problem per invalid key."""
    by_path: dict[KeyPath, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        by_path.setdefault(_key_path(detail, tree), []).append(detail)

    problems = []
    for path, details in by_path.items():
        # If a value matches the type of one union member, only report the errors inside that member.
        has_inner = any(len(inner) > len(path) and inner[: len(path)] == path for inner in by_path)
        if has_inner and all(detail["type"] in TYPE_OR_CHOICE_ERRORS for detail in details):
            continue
        problem = _problem_of(InvalidKey(path, details, model, where))
        if details[0]["type"] == "extra_forbidden":
            problem = replace(problem, hint=_parameter_hint(path, tree) or problem.hint)
        problems.append(problem)
    return problems


def invalid_keys(error: ValidationError, tree: Tree) -> list[KeyPath]:
    """Return the path of the invalid key for each error of pydantic."""
    return [_key_path(detail, tree) for detail in error.errors(include_url=False)]


def _key_path(detail: ErrorDetails, tree: Tree) -> KeyPath:
    """Return pydantic's location without names of union members, which are not keys of the file."""
    location = detail["loc"]
    path: list[str] = []
    node: Any = tree
    for part in location:
        if isinstance(node, str):  # one value in place of a list
            break
        try:
            node = node[part]
        except (KeyError, TypeError):
            continue
        path.append(str(part))
    if detail["type"] == "missing":
        path.append(str(location[-1]))
    return tuple(path)


def _problem_of(invalid: InvalidKey) -> Problem:
    name = invalid.name
    value = format_value(invalid.value)
    message = invalid.error["msg"]
    context = invalid.error.get("ctx", {})
    match invalid.error["type"]:
        case "extra_forbidden":
            return _unknown_key(invalid)
        case "missing":
            return invalid.problem("C05", f"{name} is missing", f"{invalid.path[-1]}: {_first_sentence(invalid)}")
        case kind if kind in TYPE_OR_CHOICE_ERRORS:
            return _type_or_choice_problem(invalid)
        case "finite_number":
            return invalid.problem("C06", f"{name}: must be a finite number{invalid.bounds()}, got {value}")
        case "greater_than" | "greater_than_equal" | "less_than" | "less_than_equal":
            return invalid.problem("C06", f"{name}: must be{invalid.bounds()}, got {value}")
        case "too_short":
            needs = f"needs at least {context['min_length']}, got {context['actual_length']}"
            return invalid.problem("C06", f"{name}: {needs}")
        case "string_pattern_mismatch":
            return invalid.problem("C05", f"{name}: {value} has the wrong form", _first_sentence(invalid))
        case code if code in CODES:  # of a validator of ours
            is_named = not name or re.search(rf"\b{re.escape(invalid.path[-1])}\b", message)
            return invalid.problem(code, message if is_named else f"{name}: {message}", context["hint"])
    return invalid.problem("C05", f"{name}: {message}")


def _first_sentence(invalid: InvalidKey) -> str:
    """Return the first sentence of the description of a key, or of the list that an entry is in."""
    key = invalid.key or key_at(invalid.model, invalid.path[:-1])
    assert key
    return key.description.partition(". ")[0].rstrip(".")


# Unknown keys


def _parameter_hint(path: KeyPath, tree: Tree) -> str | None:
    """Return how to write an unknown key of a built-in reward or judge, which may be one of its parameters."""
    match path:
        case ("rewards" | "judges" as table, entry, name):
            source = tree[table][entry]
            if "builtin" in source and not closest_match(name, RewardSourceSettings.model_fields, cutoff=0.8):
                return f"write parameters: {yaml_io.to_yaml({name: source[name]})}"
    return None


def _unknown_key(invalid: InvalidKey) -> Problem:
    """Return C01 with the closest key, or C02 with the section or file that the key belongs to."""
    *section, name = invalid.path
    siblings = _siblings(invalid)
    text = f"unknown key {invalid.name}"
    if hint := _alias_hint(invalid, siblings):
        return invalid.problem("C01", text, hint)
    if problem := _misplaced(invalid):
        return problem

    if len(siblings) <= MAX_LISTED_KEYS:
        listed = f"keys here: {', '.join(siblings)}"
    else:
        listed = f"`rlhf explain {'.'.join(section) or '--all'}` lists the keys"
    return invalid.problem("C01", text, did_you_mean(name, siblings) or listed)


def _siblings(invalid: InvalidKey) -> list[str]:
    """Return the keys of the section that an unknown key is in."""
    section = invalid.path[:-1]
    if not section:
        return list(invalid.model.model_fields)
    key = key_at(invalid.model, section)
    if key is None:  # an entry such as rewards.style
        table = key_at(invalid.model, section[:-1])
        key = table and table.entry
    assert key and key.section
    return list(key.section.model_fields)


def _alias_hint(invalid: InvalidKey, siblings: list[str]) -> str | None:
    """Return what replaces an option of another system in this section or file, or None."""
    *section, name = invalid.path
    alias = find_alias(name)
    if alias is None or not section:
        return None
    if alias.key is None:
        return f"{alias.note}; remove the line" if section == ["ppo"] else None
    is_full_path = "." in alias.key and alias.key in keys_of(invalid.model)
    if alias.key not in siblings and not is_full_path:
        return None

    if alias.note:
        return f"use {alias.key}; {alias.note}"
    value = invalid.value
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return f"write {alias.key}: {alias.values.get(str(value), value)}"
    return f"use {alias.key}"


def _misplaced(invalid: InvalidKey) -> Problem | None:
    """Return the problem of a key that another section, `trainer:` or another file has, or None."""
    name = invalid.path[-1]
    stage = invalid.model.model_fields["stage"].default
    keys = _keys_named(name, invalid.model)
    if not keys and stage in TRAINERS and name in trl_fields.fields_of(stage):
        keys = [f"trainer.{name}"]
    if not keys:
        return _of_another_file(invalid)

    section = keys[0].rpartition(".")[0]
    place = f"under {section}:" if section else "at the top of the file"
    return invalid.problem("C02", f"{invalid.name} belongs {place}", _move_hint(keys[0], invalid.location))


def _of_another_file(invalid: InvalidKey) -> Problem | None:
    files: dict[str, list[str]] = {}
    for stage, model in CONFIGS.items():
        for key in _keys_named(invalid.path[-1], model)[:1]:
            section = key.rpartition(".")[0]
            files.setdefault(section, []).append(f"{stage}.yaml")
    if not files:
        return None

    # A section of another file, such as ppo:, rather than a key of that name.
    section = min(files, key=len)
    place = f"in {' or '.join(files[section])}"
    if section:
        place += f", under {section}:"
    return invalid.problem("C02", f"{invalid.name} belongs {place}")


def _move_hint(key: str, location: str) -> str:
    """Return how to write a key in its section: in a file by its indent, for --set and `rlhf explain` with dots."""
    if not location or location.startswith(OVERRIDE):
        return f"write it as {key}"
    section = key.rpartition(".")[0]
    return f"indent it below `{section}:`" if section else "write it on a separate line, without an indent"


def _keys_named(name: str, model: type[Config]) -> list[str]:
    """Return the keys of this name at the top of a file and in its sections."""
    return [path for path, key in keys_of(model).items() if key.name == name and path.count(".") <= 1]


# Types and choices


def format_value(value: Any) -> str:
    """Format a value for a message, shortened to 60 characters."""
    match value:
        case None:
            return "nothing"
        case dict():
            return "keys and values"
        case list():
            return "a list"
        case float():
            text = str(value)
        case _:
            text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _type_or_choice_problem(invalid: InvalidKey) -> Problem:
    """Return the problem of a value that no member of a union accepts, by type, choice or both.

    C07 for a choice, with all of them and the nearest one; C06 for a boolean as number, C10 for a YAML 1.1 spelling,
    else C05.
    """
    value = invalid.value
    choices: list[str] = []
    types: list[str] = []
    for error in invalid.errors:
        if error["type"] == "literal_error":
            choices += re.findall(r"'([^']*)'", error["ctx"]["expected"])
        else:
            types.append(TYPE_ERRORS[error["type"]])

    is_choice = isinstance(value, str) or not types
    if choices and is_choice and not is_yaml_1_1(value):
        known = [*choices, *types]
        text = f"{invalid.name}: {format_value(value)} is not one of {', '.join(known)}"
        return invalid.problem("C07", text, did_you_mean(value, known) if isinstance(value, str) else None)

    expected = list(dict.fromkeys([*types, *choices]))
    bounded = [f"{kind}{invalid.bounds()}" if kind.endswith("number") else kind for kind in expected]
    text = f"{invalid.name}: expected {' or '.join(bounded)}, got {format_value(value)}"
    code, hint = _code_and_hint(invalid, expected)
    return invalid.problem(code, text, hint)


def _code_and_hint(invalid: InvalidKey, types: list[str]) -> tuple[str, str | None]:
    """Return the code and the hint for a value that is of none of these types."""
    wants_text = "text" in types
    wants_whole = "a whole number" in types
    wants_number = wants_whole or "a number" in types
    match invalid.value:
        case bool() if wants_number:
            return "C06", None
        case bool():
            return "C05", 'write it in quotes: "true"' if wants_text else None
        case str(text) if wants_number and (INTEGER.fullmatch(text) or FLOAT.fullmatch(text)):
            return "C05", f"remove the quotes: {text}"
        case str(text) if "true or false" in types and is_yaml_1_1(text):
            return "C10", "write true or false"
        case str(text) if wants_number and is_yaml_1_1(text):
            return "C10", "write a plain decimal number"
        case float(number) if wants_whole and number.is_integer() and abs(number) < 1e15:
            return "C05", f"write {int(number)}"
        case int(number) | float(number) if wants_text:
            return "C05", f'write it in quotes: "{number}"'
        case str(text) if invalid.path[0] == "rewards" and len(invalid.path) == 2:
            kind = f"builtin: {text}" if text in BUILTINS else "function: module:function"
            return "C05", f"write {{{kind}}}"
        case str(item) | int(item) | float(item) if types == ["a list"]:
            return "C05", f"write [{item}]"
    return "C05", None


# Fields of TRL


def check_trainer(trainer: dict[str, Any], model: type[Config], where: Where) -> list[Problem]:
    """Return the problems of a `trainer:` section."""
    problems = [_check_field(name, value, model, where) for name, value in trainer.items()]
    return [problem for problem in problems if problem]


def _check_field(name: str, value: Any, model: type[Config], where: Where) -> Problem | None:
    key = f"trainer.{name}"
    location = where(key)
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
        return _problem_of(InvalidKey(("trainer", name), error.errors(include_url=False), model, where))
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
