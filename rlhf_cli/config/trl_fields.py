"""The fields of TRL's configs that `trainer:` accepts, stored in trl_fields.json: TRL imports slowly."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from rlhf_cli.config.aliases import SET_BY_RLHF
from rlhf_cli.config.base import Config
from rlhf_cli.config.fields import fields_of as keys_of_section

TRAINERS = {"sft": "SFTConfig", "reward": "RewardConfig"}
FIELDS_FILE = Path(__file__).with_name("trl_fields.json")
# Beginnings of further fields that rlhf sets itself.
OWNED_FAMILIES = ("hub_", "push_to_hub", "resume_", "save_", "trackio_")


@cache
def fields_of(stage: str) -> dict[str, dict[str, Any]]:
    """Return {types, default, optional choices} of each field of the stage's TRL config, by name."""
    fields: dict[str, dict[str, Any]] = _file()[TRAINERS[stage]]
    return fields


def source_versions() -> dict[str, str]:
    """Return the versions of TRL and transformers that the fields were read from."""
    versions: dict[str, str] = _file()["made_from"]
    return versions


@cache
def _file() -> Any:
    return json.loads(FIELDS_FILE.read_text(encoding="utf-8"))


def is_owned(name: str) -> bool:
    """Return True if rlhf sets this field itself."""
    return name in SET_BY_RLHF or name.startswith(OWNED_FAMILIES)


def settings_keys(model: type[Config]) -> list[str]:
    """Return the keys of the section with the stage's options, such as sft:."""
    settings = keys_of_section(model)[model.model_fields["stage"].default].section
    return list(settings.model_fields) if settings else []


def trainer_fields(model: type[Config]) -> dict[str, dict[str, Any]]:
    """Return the fields that `trainer:` accepts: those that rlhf does not set and that have no key in the config."""
    stage = model.model_fields["stage"].default
    if stage not in TRAINERS:
        return {}
    own_keys = settings_keys(model)
    return {name: field for name, field in fields_of(stage).items() if name not in own_keys and not is_owned(name)}
