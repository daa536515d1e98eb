"""Error messages for config values of a wrong type or choice."""

import json
from collections.abc import Iterable
from typing import Any

from rlhf_cli.config.yaml_io import is_number, is_yaml_1_1
from rlhf_cli.errors import Problem, closest_match


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


def wrong_type(key: str, expected: Iterable[str], value: Any, bounds: str = "") -> tuple[str, str, str | None]:
    """Return (code, text, hint) for a wrong type: C06 for a boolean as number, C10 for YAML 1.1 spellings, else C05."""
    types = list(dict.fromkeys(expected))
    number = any(name.endswith("number") for name in types)
    bounded = [name + bounds if name.endswith("number") else name for name in types]
    text = f"{key}: expected {' or '.join(bounded)}, got {format_value(value)}"
    if isinstance(value, bool):
        return (
            ("C06", text, None) if number else ("C05", text, 'write it in quotes: "true"' if "text" in types else None)
        )
    if number and isinstance(value, str) and is_number(value):
        return "C05", text, f"remove the quotes: {value}"
    if is_yaml_1_1(value) and ("true or false" in types or number):
        return "C10", text, "write true or false" if "true or false" in types else "write a plain decimal number"
    if "a whole number" in types and isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return "C05", text, f"write {int(value)}"
    if "text" in types and isinstance(value, int | float):
        return "C05", text, f'write it in quotes: "{value}"'
    if types == ["a list"] and isinstance(value, str | int | float):
        return "C05", text, f"write [{value}]"
    return "C05", text, None


def not_a_choice(key: str, choices: list[str], value: Any) -> Problem:
    """Return C07 with all choices and the nearest one."""
    near = closest_match(value, choices) if isinstance(value, str) else None
    text = f"{key}: {format_value(value)} is not one of {', '.join(choices)}"
    return Problem("C07", text, None, f"did you mean {near}?" if near else None)
