"""The fields of TRL's configs that `trainer:` accepts, stored in trl_fields.json: TRL imports slowly."""

import json
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Literal, Union

from pydantic.fields import FieldInfo

from rlhf_cli.config.machinery.aliases import SET_BY_RLHF
from rlhf_cli.config.machinery.fields import Key
from rlhf_cli.config.machinery.fields import fields_of as keys_of_section
from rlhf_cli.config.machinery.section import Section

TRAINERS = {"sft": "SFTConfig", "reward": "RewardConfig", "dpo": "DPOConfig"}
FIELDS_FILE = Path(__file__).with_name("trl_fields.json")
# JSON type in trl_fields.json -> Python type
TYPES = {
    "integer": int, "number": float, "boolean": bool, "string": str, "array": list, "object": dict, "null": NoneType,
}  # fmt: skip
# Beginnings of further fields that rlhf sets itself.
SET_FAMILIES = ("hub_", "push_to_hub", "resume_", "save_", "trackio_")


@cache
def _file() -> dict[str, dict[str, Any]]:
    return dict(json.loads(FIELDS_FILE.read_text(encoding="utf-8")))


def fields_of(stage: str) -> dict[str, dict[str, Any]]:
    """Return {types, default, optional choices} of each field of the stage's TRL config, by name."""
    return _file()["shared"] | _file()[TRAINERS[stage]]


def made_from() -> dict[str, str]:
    """Return the versions of TRL and transformers that the fields were read from."""
    return _file()["made_from"]


def is_set_by_rlhf(name: str) -> bool:
    """Return True if rlhf sets this field itself."""
    return name in SET_BY_RLHF or name.startswith(SET_FAMILIES)


def settings_keys(model: type[Section]) -> list[str]:
    """Return the keys of the section with the stage's options, such as sft:."""
    settings = keys_of_section(model)[model.model_fields["stage"].default].section
    return list(settings.model_fields) if settings else []


@cache
def trainer_keys(model: type[Section]) -> dict[str, Key]:
    """Return the keys that `trainer:` accepts: fields that rlhf does not set and that have no key in the config."""
    stage = model.model_fields["stage"].default
    if stage not in TRAINERS:
        return {}
    own_keys = settings_keys(model)
    keys = {}
    for name, field in fields_of(stage).items():
        if name not in own_keys and not is_set_by_rlhf(name):
            keys[name] = _key(name, field)
    return keys


def _key(name: str, field: dict[str, Any]) -> Key:
    types: dict[str, Any] = {kind: TYPES[kind] for kind in field["types"]}
    if "choices" in field:
        types["string"] = Literal[tuple(field["choices"])]
    annotation: Any = Union[tuple(types.values())]  # noqa: UP007

    version = made_from()["trl"].rpartition(".")[0]  # without its patch number
    text = f"The field {name} of TRL {version}'s trainer, handed on as it is."
    info = FieldInfo(annotation=annotation, default=field["default"], description=text)
    return Key(f"trainer.{name}", info)
