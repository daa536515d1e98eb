"""The JSON Schema of configs, in the form that editors do most with, and where editors find it.

That is draft 7, the newest that all of them know, without references and titles: what an editor shows at a key is that
key's own description in plain words, type, choices and default.
"""

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from rlhf_cli.config import trl_fields
from rlhf_cli.config.base import Config
from rlhf_cli.config.paths import PathKey, default_of, keys_of, parts_of
from rlhf_cli.config.training import CONFIGS

FORMS = {
    "paper": r"(?P<authors>[^,;`]+) (?P<year>\d{4}), (?P<where>arXiv \d{4}\.\d{4,5}|https?://[^\s,;]+), "
    r"(?P<part>(?:section|table|equation|appendix|detail|algorithm|figure) [^,;]+)",
    "system": r"(?P<name>[^,;`]+) (?P<version>(?=\S*\d)[\w.+-]+), (?P<file>[\w./-]+\.\w+)",
    "page": r"(?P<page>docs/[a-z-]+\.md)(?:, section (?P<section>[^,;]+))?",
    "command": r"`(?P<command>(?:make|rlhf) [^`]+)`",
}
BRACKET = re.compile(r"(?P<meaning>.*\S)\s+\[(?P<source>[^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*)\]", re.DOTALL)


@dataclass(frozen=True)
class Source:
    """Source of a default: `kind` is paper, system, page or command, `parts` the named groups of its form."""

    kind: str
    parts: dict[str, str]
    remark: str | None


def parse(text: str) -> Source | None:
    """Return the source that the text of a bracket names, or None if it has none of the four forms."""
    for kind, form in FORMS.items():
        if match := re.fullmatch(rf"{form}(?:; (?P<remark>\S.*))?", text):
            parts = {name: value for name, value in match.groupdict().items() if value and name != "remark"}
            return Source(kind, parts, match["remark"])
    return None


def split(description: str) -> tuple[str, str | None]:
    """Return (meaning, source) of a description; the source is None if the description does not end in one."""
    match = BRACKET.fullmatch(description)
    return (match["meaning"], match["source"]) if match and parse(match["source"]) else (description, None)


def in_an_editor(description: str) -> str:
    """Return a description for an editor, with the paper or system of its default and without pages and commands."""
    meaning, found = split(description)
    source = parse(found) if found else None
    if source is None or source.kind in ("page", "command"):
        return meaning
    where = ("authors", "year", "where", "part") if source.kind == "paper" else ("name", "version")
    parts = [source.parts[part] for part in where]
    name = ", ".join([" ".join(parts[:2]), *parts[2:]])
    return f"{meaning} Source of the default: {name}{f'; {source.remark}' if source.remark else ''}."


DIALECT = "http://json-schema.org/draft-07/schema#"
FOLDER = ".schema"  # in a run's folder, so that the two move together
MODELINE = "# yaml-language-server: $schema="


def schema(stage: str | None = None) -> dict[str, Any]:
    """JSON Schema of one stage's config, or of all four (any of which a file may be)."""
    if stage is None:
        return {"$schema": DIALECT, "anyOf": [_schema(model) for model in CONFIGS.values()]}
    return {"$schema": DIALECT, **_schema(CONFIGS[stage])}


@cache
def as_text(stage: str | None) -> str:
    """`schema`, as it is printed, and as its file holds it."""
    return json.dumps(schema(stage), indent=1, ensure_ascii=False) + "\n"


def write_beside(folder: Path, stages: Iterable[str]) -> None:
    """Write the schemas of stages into the `.schema/` of a run's folder."""
    (folder / FOLDER).mkdir()
    for stage in stages:
        (folder / FOLDER / f"{stage}.json").write_text(as_text(stage), encoding="utf-8")


def pointed(text: str, file: Path, schema: Path) -> str:
    """A config's text with a first line that tells editors its schema, as seen from the file's folder."""
    kept = text.partition("\n")[2] if text.startswith(MODELINE) else text
    return f"{MODELINE}{Path(os.path.relpath(schema, file.parent)).as_posix()}\n{kept}"


def _schema(model: type[Config]) -> dict[str, Any]:
    tree = model.model_json_schema()
    found: dict[str, Any] = _plain(tree, tree.get("$defs", {}))
    if handed_on := trl_fields.handed_on(model):
        found["properties"]["trainer"] |= {
            "properties": {name: _field_of_trl(name, field) for name, field in handed_on.items()},
            "additionalProperties": False,
        }
    return found


def _plain(node: Any, named: dict[str, Any]) -> Any:
    """A schema of pydantic's with what it refers to in place, without titles, and `null` as one more type."""
    if isinstance(node, list):
        return [_plain(each, named) for each in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        target = named[node["$ref"].rpartition("/")[2]]
        return _plain({**target, **{key: value for key, value in node.items() if key != "$ref"}}, named)
    kept = {key: value for key, value in node.items() if key not in ("title", "$defs")}
    found = {
        key: {name: _plain(each, named) for name, each in value.items()} if key == "properties" else
        value if key in ("default", "enum", "const") else
        in_an_editor(value) if key == "description" else _plain(value, named)
        for key, value in kept.items()
    }  # fmt: skip
    return _with_null(found)


def _with_null(node: dict[str, Any]) -> dict[str, Any]:
    """`anyOf` of one type and null, as that type or null; the description of the key, not of its section, stays."""
    null = {"type": "null"}
    others = [each for each in node.get("anyOf", [null]) if each != null]
    if len(others) != 1 or not isinstance(others[0].get("type"), str) or "const" in others[0]:
        return node
    merged = {**others[0], **{key: value for key, value in node.items() if key != "anyOf"}}
    merged["type"] = [others[0]["type"], "null"]
    return merged | ({"enum": [*others[0]["enum"], None]} if "enum" in merged else {})


def _field_of_trl(name: str, field: dict[str, Any]) -> dict[str, Any]:
    version = trl_fields.made_from()["trl"].rpartition(".")[0]
    types = field["types"]
    told = {"type": types[0] if len(types) == 1 else types, "default": field["default"]}
    told |= {"enum": field["choices"]} if "choices" in field else {}
    return told | {"description": f"The field {name} of TRL {version}'s trainer, handed on as it is."}


def listed(stage: str) -> dict[str, list[str]]:
    """Path of each key of a stage that holds a value -> words that it takes: a number's default, choices, true, null.

    Fields of TRL's that `trainer:` hands on are among them; what lies in tables, under names of the user's, is not.
    """
    model = CONFIGS[stage]
    found = {path: _words(field) for path, field in keys_of(model).items() if ".NAME" not in path}
    found |= {f"trainer.{name}": _words_of_trl(field) for name, field in trl_fields.handed_on(model).items()}
    sections = {path.rpartition(".")[0] for path in found}
    return {path: words for path, words in found.items() if path not in sections}


def _words(field: FieldInfo) -> list[str]:
    found = _number(default_of(field, None))
    for part in (*field.metadata, *parts_of(field.annotation)):
        if get_origin(part) is Literal:
            found += map(str, get_args(part))
        elif isinstance(part, PathKey):
            found += part.words
        elif part is bool:
            found += ["true", "false"]
        elif part is NoneType:
            found.append("null")
    return list(dict.fromkeys(found))


def _words_of_trl(field: dict[str, Any]) -> list[str]:
    words = {"boolean": ["true", "false"], "null": ["null"]}
    typed = [word for kind in field["types"] for word in words.get(kind, [])]
    return _number(field["default"]) + field.get("choices", []) + typed


def _number(default: Any) -> list[str]:
    return [str(default)] if isinstance(default, int | float) and not isinstance(default, bool) else []
