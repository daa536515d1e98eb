"""Write trl_fields.json of config/machinery: name, types and default of each field of TRL's configs of three stages.

Run `python scripts/trl_fields.py` after an update of TRL or transformers.
"""

import dataclasses
import json
import typing
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parents[1] / "rlhf_cli" / "config" / "machinery" / "trl_fields.json"
JSON_TYPES = {
    int: "integer",
    float: "number",
    bool: "boolean",
    str: "string",
    dict: "object",
    list: "array",
    type(None): "null",
}


def describe() -> dict[str, dict[str, Any]]:
    """Return {config name: {field name: {types, choices, default}}} and the versions of the libraries. Imports TRL.

    Fields that are the same in all configs are under "shared".
    """
    from trl import DPOConfig, RewardConfig, SFTConfig

    made_from = {name: version(name) for name in ("trl", "transformers")}
    fields = {config.__name__: _fields(config) for config in (SFTConfig, RewardConfig, DPOConfig)}
    first, *others = fields.values()
    shared = {name: field for name, field in first.items() if all(other.get(name) == field for other in others)}
    own = {config: {name: each[name] for name in each if name not in shared} for config, each in fields.items()}
    return {"made_from": made_from, "shared": shared, **own}


def render(described: dict[str, dict[str, Any]]) -> str:
    """Return JSON with one field per line, so that a diff is readable."""
    blocks = []
    for config, fields in described.items():
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(field)}" for name, field in fields.items())
        blocks.append(f"{json.dumps(config)}: {{\n{lines}\n}}")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def _fields(config: type) -> dict[str, dict[str, Any]]:
    hints = typing.get_type_hints(config)
    return {field.name: _field(field, hints[field.name]) for field in dataclasses.fields(config) if field.init}


def _field(field: dataclasses.Field, hint: Any) -> dict[str, Any]:
    members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, type(int | str)) else (hint,)
    types = {name for member in members if (name := _json_type(member))}
    described: dict[str, Any] = {"types": sorted(types)}
    choices = [
        item.value for member in members if isinstance(member, type) and issubclass(member, Enum) for item in member
    ]
    if choices:
        described["choices"] = choices
    default = field.default_factory() if field.default is dataclasses.MISSING else field.default
    return {**described, "default": default.value if isinstance(default, Enum) else default}


def _json_type(member: Any) -> str | None:
    """Return the JSON type; None for a type that YAML cannot express, such as an object of accelerate."""
    if typing.get_origin(member) is typing.Literal:
        return JSON_TYPES[type(typing.get_args(member)[0])]
    plain = typing.get_origin(member) or member
    return "string" if issubclass(plain, Enum) else JSON_TYPES.get(plain)


if __name__ == "__main__":
    TARGET.write_text(render(describe()), encoding="utf-8")
    print(f"wrote {TARGET.name}")
