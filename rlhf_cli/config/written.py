"""Values and comments of a YAML that is written for people."""

import json
import re
from typing import Any

from rlhf_cli.config.yaml_source import parse_value

COLUMN = 34  # where comments stand
PLAIN = re.compile(r"[A-Za-z./~][\w./~-]*")


def written(value: Any) -> str:
    """A value on one line, which reads back as it was; a text in quotes where it needs them."""
    if isinstance(value, str):
        plain = PLAIN.fullmatch(value) and parse_value(value) == value
        return value if plain else json.dumps(value, ensure_ascii=not value.isprintable())
    if isinstance(value, float):
        short = f"{value:g}"
        return re.sub(r"e([+-])0", r"e\1", short if "e" in short and float(short) == value else str(value))
    if isinstance(value, dict):
        return "{" + ", ".join(f"{written(key)}: {written(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(written, value)) + "]"
    return json.dumps(value)


def commented(line: str, comment: str) -> str:
    """A line of a YAML with a comment behind it, in the column of all comments."""
    return f"{line:<{COLUMN - 2}}  # {comment}" if comment else line


def aligned(text: str) -> str:
    """The YAML with its comments in one column, whatever the length of the values."""
    lines = [re.fullmatch(r"( *[^# ].*?) {2,}# (.*)", line) or line for line in text.rstrip().splitlines()]
    return "\n".join(line if isinstance(line, str) else commented(line[1], line[2]) for line in lines) + "\n"
