"""The JSON Schema of configs, in the form that editors do most with, and where editors find it.

That is draft 7, the newest that all of them know, without references and titles: what an editor shows at a key is that
key's own description in plain words, type, choices and default.
"""

import json
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from rlhf_cli.config import trl
from rlhf_cli.config.base import Config
from rlhf_cli.config.origins import in_an_editor
from rlhf_cli.config.stages import CONFIGS

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
    if handed_on := trl.handed_on(model):
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
    version = trl.made_from()["trl"].rpartition(".")[0]
    types = field["types"]
    told = {"type": types[0] if len(types) == 1 else types, "default": field["default"]}
    told |= {"enum": field["choices"]} if "choices" in field else {}
    return told | {"description": f"The field {name} of TRL {version}'s trainer, handed on as it is."}
