"""JSON Schemas of configs for editors, sources of defaults in descriptions, and values for shell completion.

The schemas are draft 7, which all editors support, without references and titles, so that an editor shows the
description, type, choices and default of each key.
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
from rlhf_cli.config.paths import PathField, default_of, flatten_annotation, keys_of
from rlhf_cli.config.training import CONFIGS

SOURCE_FORMS = {
    "paper": r"(?P<authors>[^,;`]+) (?P<year>\d{4}), (?P<where>arXiv \d{4}\.\d{4,5}|https?://[^\s,;]+), "
    r"(?P<part>(?:section|table|equation|appendix|detail|algorithm|figure) [^,;]+)",
    "system": r"(?P<name>[^,;`]+) (?P<version>(?=\S*\d)[\w.+-]+), (?P<file>[\w./-]+\.\w+)",
    "page": r"(?P<page>docs/[a-z-]+\.md)(?:, section (?P<section>[^,;]+))?",
    "command": r"`(?P<command>(?:make|rlhf) [^`]+)`",
}
BRACKET = re.compile(r"(?P<meaning>.*\S)\s+\[(?P<source>[^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*)\]", re.DOTALL)


@dataclass(frozen=True)
class DefaultSource:
    """Source of a default: `kind` is paper, system, page or command, `parts` the named groups of its form."""

    kind: str
    parts: dict[str, str]
    remark: str | None


def parse_source(text: str) -> DefaultSource | None:
    """Return the source that the text of a bracket names, or None if it has none of the four forms."""
    for kind, form in SOURCE_FORMS.items():
        if match := re.fullmatch(rf"{form}(?:; (?P<remark>\S.*))?", text):
            parts = {name: value for name, value in match.groupdict().items() if value and name != "remark"}
            return DefaultSource(kind, parts, match["remark"])
    return None


def split_description(description: str) -> tuple[str, str | None]:
    """Split a description into (meaning, source); the source is None if the description does not end in one."""
    match = BRACKET.fullmatch(description)
    return (match["meaning"], match["source"]) if match and parse_source(match["source"]) else (description, None)


def editor_description(description: str) -> str:
    """Return a description for an editor, with the paper or system of its default and without pages and commands."""
    meaning, source_text = split_description(description)
    source = parse_source(source_text) if source_text else None
    if source is None or source.kind in ("page", "command"):
        return meaning
    where = ("authors", "year", "where", "part") if source.kind == "paper" else ("name", "version")
    parts = [source.parts[part] for part in where]
    name = ", ".join([" ".join(parts[:2]), *parts[2:]])
    return f"{meaning} Source of the default: {name}{f'; {source.remark}' if source.remark else ''}."


DIALECT = "http://json-schema.org/draft-07/schema#"
FOLDER = ".schema"  # inside the run folder, so that both move together
MODELINE = "# yaml-language-server: $schema="


def schema(stage: str | None = None) -> dict[str, Any]:
    """Return the JSON Schema of one stage's config, or of any of the four."""
    if stage is None:
        return {"$schema": DIALECT, "anyOf": [_schema(model) for model in CONFIGS.values()]}
    return {"$schema": DIALECT, **_schema(CONFIGS[stage])}


@cache
def schema_text(stage: str | None) -> str:
    """Return the schema as the text that is printed and written to files."""
    return json.dumps(schema(stage), indent=1, ensure_ascii=False) + "\n"


def write_schemas(folder: Path, stages: Iterable[str]) -> None:
    """Write the schemas of stages to the folder `.schema` of a run."""
    (folder / FOLDER).mkdir()
    for stage in stages:
        (folder / FOLDER / f"{stage}.json").write_text(schema_text(stage), encoding="utf-8")


def with_modeline(text: str, file: Path, schema_file: Path) -> str:
    """Return a config with a first line that names its schema, relative to the folder of `file`."""
    body = text.partition("\n")[2] if text.startswith(MODELINE) else text
    return f"{MODELINE}{Path(os.path.relpath(schema_file, file.parent)).as_posix()}\n{body}"


def _schema(model: type[Config]) -> dict[str, Any]:
    tree = model.model_json_schema()
    simplified: dict[str, Any] = _simplify(tree, tree.get("$defs", {}))
    if fields := trl_fields.trainer_fields(model):
        simplified["properties"]["trainer"] |= {
            "properties": {name: _trl_field_schema(name, field) for name, field in fields.items()},
            "additionalProperties": False,
        }
    return simplified


def _simplify(node: Any, definitions: dict[str, Any]) -> Any:
    """Return pydantic's schema with references inlined, without titles, and with `null` as an additional type."""
    if isinstance(node, list):
        return [_simplify(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        target = definitions[node["$ref"].rpartition("/")[2]]
        return _simplify({**target, **{key: value for key, value in node.items() if key != "$ref"}}, definitions)
    relevant = {key: value for key, value in node.items() if key not in ("title", "$defs")}
    simplified = {
        key: {name: _simplify(item, definitions) for name, item in value.items()} if key == "properties" else
        value if key in ("default", "enum", "const") else
        editor_description(value) if key == "description" else _simplify(value, definitions)
        for key, value in relevant.items()
    }  # fmt: skip
    return _merge_null(simplified)


def _merge_null(node: dict[str, Any]) -> dict[str, Any]:
    """Merge `anyOf` of one type and null to a list of types, with the description of the key, not of its section."""
    null = {"type": "null"}
    types = [item for item in node.get("anyOf", [null]) if item != null]
    if len(types) != 1 or not isinstance(types[0].get("type"), str) or "const" in types[0]:
        return node
    merged = {**types[0], **{key: value for key, value in node.items() if key != "anyOf"}}
    merged["type"] = [types[0]["type"], "null"]
    return merged | ({"enum": [*types[0]["enum"], None]} if "enum" in merged else {})


def _trl_field_schema(name: str, field: dict[str, Any]) -> dict[str, Any]:
    version = trl_fields.source_versions()["trl"].rpartition(".")[0]
    types = field["types"]
    node = {"type": types[0] if len(types) == 1 else types, "default": field["default"]}
    node |= {"enum": field["choices"]} if "choices" in field else {}
    return node | {"description": f"The field {name} of TRL {version}'s trainer, handed on as it is."}


def completion_values(stage: str) -> dict[str, list[str]]:
    """Return completions for each key of a stage, by key path: a number's default, choices, true, false, null.

    Fields of TRL under `trainer:` are included; entries of tables, whose names the user chooses, are not.
    """
    model = CONFIGS[stage]
    completions = {path: _field_values(field) for path, field in keys_of(model).items() if ".NAME" not in path}
    completions |= {
        f"trainer.{name}": _trl_field_values(field) for name, field in trl_fields.trainer_fields(model).items()
    }
    sections = {path.rpartition(".")[0] for path in completions}
    return {path: values for path, values in completions.items() if path not in sections}


def _field_values(field: FieldInfo) -> list[str]:
    values = _numeric_default(default_of(field, None))
    for part in (*field.metadata, *flatten_annotation(field.annotation)):
        if get_origin(part) is Literal:
            values += map(str, get_args(part))
        elif isinstance(part, PathField):
            values += part.keywords
        elif part is bool:
            values += ["true", "false"]
        elif part is NoneType:
            values.append("null")
    return list(dict.fromkeys(values))


def _trl_field_values(field: dict[str, Any]) -> list[str]:
    values_of_type = {"boolean": ["true", "false"], "null": ["null"]}
    values = [value for kind in field["types"] for value in values_of_type.get(kind, [])]
    return _numeric_default(field["default"]) + field.get("choices", []) + values


def _numeric_default(default: Any) -> list[str]:
    return [str(default)] if isinstance(default, int | float) and not isinstance(default, bool) else []
