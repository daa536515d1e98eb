"""pydantic's complaints in our words: a code, the place in the file, and the fix."""

import re
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from rlhf_cli.codes import CODES
from rlhf_cli.config.base import Config
from rlhf_cli.config.keys import field_at, parts_of
from rlhf_cli.config.unknown import unknown_key
from rlhf_cli.config.values import not_a_choice, shown_value, wrong_type
from rlhf_cli.config.yaml_source import is_yaml_1_1
from rlhf_cli.errors import Problem

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
