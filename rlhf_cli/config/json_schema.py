"""JSON Schemas of the configs for editors.

The schemas are draft 7, which all editors support, without references and titles, so that an editor shows the
description, type, choices and default of each key.
"""

import json
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rlhf_cli.config.base import Config
from rlhf_cli.config.machinery import trl_fields
from rlhf_cli.config.machinery.fields import Key, fields_of, keys_of, parse_source
from rlhf_cli.config.stages import CONFIGS

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
    definitions = tree.get("$defs", {})
    _add_descriptions(tree, model)
    for section in {(key.entry or key).section for key in keys_of(model).values()}:
        if section:
            _add_descriptions(definitions[section.__name__], section)
    simplified: dict[str, Any] = _simplify(tree, definitions)

    keys = trl_fields.trainer_keys(model)
    if keys:
        fields = trl_fields.fields_of(model.model_fields["stage"].default)
        trainer = simplified["properties"]["trainer"]
        trainer["properties"] = {name: _trl_field_schema(key, fields[name]) for name, key in keys.items()}
        trainer["additionalProperties"] = False
    return simplified


def _add_descriptions(node: dict[str, Any], section: type[BaseModel]) -> None:
    for name, key in fields_of(section).items():
        node["properties"][name]["description"] = _editor_description(key)


def _editor_description(key: Key) -> str:
    """Return the meaning of a key, with the paper or system of its default and without pages."""
    source = parse_source(key.source) if key.source else None
    if source is None or source.kind == "page":
        return key.meaning
    form = "{authors} {year}, {where}, {part}" if source.kind == "paper" else "{name} {version}"
    name = form.format(**source.parts)
    if source.remark:
        name += f"; {source.remark}"
    return f"{key.meaning} Source of the default: {name}."


def _simplify(node: Any, definitions: dict[str, Any]) -> Any:
    """Return pydantic's schema with references inlined, without titles, and with `null` as an additional type."""
    if isinstance(node, list):
        return [_simplify(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        inlined = definitions[name] | node
        del inlined["$ref"]
        return _simplify(inlined, definitions)

    simplified: dict[str, Any] = {}
    for key, value in node.items():
        if key == "properties":
            simplified[key] = {name: _simplify(item, definitions) for name, item in value.items()}
        elif key in ("default", "enum", "const"):
            simplified[key] = value
        elif key not in ("title", "$defs"):
            simplified[key] = _simplify(value, definitions)
    return _merge_null(simplified)


def _merge_null(node: dict[str, Any]) -> dict[str, Any]:
    """Merge `anyOf` of one type and null to a list of types, with the description of the key, not of its section."""
    match [item for item in node.get("anyOf", []) if item != {"type": "null"}]:
        case [{"type": str()} as only] if "const" not in only:
            pass
        case _:
            return node

    merged: dict[str, Any] = only | node
    del merged["anyOf"]
    merged["type"] = [only["type"], "null"]
    if "enum" in only:
        merged["enum"] = [*only["enum"], None]
    return merged


def _trl_field_schema(key: Key, field: dict[str, Any]) -> dict[str, Any]:
    types = field["types"]
    node = {"type": types[0] if len(types) == 1 else types, "default": field["default"]}
    if "choices" in field:
        node["enum"] = field["choices"]
    node["description"] = key.description
    return node
