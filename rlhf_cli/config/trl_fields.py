"""`trainer:` checked against TRL's own fields, from a list inside the package: TRL itself takes seconds to import."""

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from rlhf_cli.config.base import Config
from rlhf_cli.config.paths import field_shape
from rlhf_cli.config.values import not_a_choice, wrong_type
from rlhf_cli.errors import Problem, closest_match

TRAINERS = {"sft": "SFTConfig", "reward": "RewardConfig"}
FIELDS_FILE = Path(__file__).with_name("trl_fields.json")
# Fields that the pipeline sets itself -> where to say it instead (None: nowhere).
OWNED: dict[str, str | None] = {
    "output_dir": "run", "seed": "seed", "data_seed": "seed", "run_name": "output.run_name",
    "report_to": "output.report_to", "project": "output.project", "save_steps": "output.save_steps",
    "save_total_limit": "output.keep", "logging_dir": "run",
    "overwrite_output_dir": "--fresh", "do_train": None, "do_eval": "data.eval", "do_predict": None,
    "eval_strategy": "{stage}.eval_steps", "train_sampling_strategy": "{stage}.group_by_length",
    "length_column_name": None, "chat_template_path": "model.chat_template", "model_init_kwargs": "model",
    "trust_remote_code": "--trust-remote-code", "dataset_text_field": "data.columns", "dataset_kwargs": None,
    "dataset_num_proc": None, "eos_token": None, "pad_token": None, "local_rank": None, "shuffle_dataset": None,
    "truncation_mode": None, "assistant_only_loss": None, "disable_tqdm": None, "use_cpu": None,
    "prediction_loss_only": None,
}  # fmt: skip
OWNED_FAMILIES = ("hub_", "push_to_hub", "resume_", "save_", "trackio_")
WORDS = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "string": "text",
         "array": "a list", "object": "keys and values", "null": "null"}  # fmt: skip
TYPES: dict[str, Callable[[Any], bool]] = {
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "null": lambda value: value is None,
}


@cache
def fields_of(stage: str) -> dict[str, dict[str, Any]]:
    """Name -> {types, choices (where closed), default} of each field of the stage's TRL config."""
    fields: dict[str, dict[str, Any]] = _file()[TRAINERS[stage]]
    return fields


def made_from() -> dict[str, str]:
    """The versions of TRL and transformers whose fields these are."""
    versions: dict[str, str] = _file()["made_from"]
    return versions


@cache
def _file() -> Any:
    return json.loads(FIELDS_FILE.read_text(encoding="utf-8"))


def handed_on(model: type[Config]) -> dict[str, dict[str, Any]]:
    """`fields_of` those that `trainer:` takes: neither the pipeline nor a key of ours sets them."""
    stage = model.model_fields["stage"].default
    if stage not in TRAINERS:
        return {}
    own = _own(model)
    return {
        name: field
        for name, field in fields_of(stage).items()
        if name not in own and name not in OWNED and not name.startswith(OWNED_FAMILIES)
    }


def _own(model: type[Config]) -> list[str]:
    """The keys of the section with the stage's own numbers."""
    settings = field_shape(model.model_fields[model.model_fields["stage"].default]).model
    assert settings is not None
    return list(settings.model_fields)


def check(trainer: dict[str, Any], model: type[Config], where: Callable[[str], str]) -> list[Problem]:
    """What is wrong with a `trainer:` section, key by key."""
    stage = model.model_fields["stage"].default
    found = (_wrong(name, value, stage, _own(model)) for name, value in trainer.items())
    return [
        Problem(each.code, each.text, where(f"trainer.{name}"), each.hint)
        for name, each in zip(trainer, found, strict=True)
        if each
    ]


def _wrong(name: str, value: Any, stage: str, own: list[str]) -> Problem | None:
    key, fields = f"trainer.{name}", fields_of(stage)
    if name in own:
        return Problem("C02", f"{key} belongs under {stage}:", None, f"write it as {stage}.{name}")
    if name in OWNED or name.startswith(OWNED_FAMILIES):
        instead = OWNED.get(name)
        return Problem(
            "C02",
            f"{key} is set by the pipeline",
            None,
            f"use {instead.format(stage=stage)}" if instead else "remove the line",
        )
    if name not in fields:
        return Problem(
            "C01", f"unknown key {key}: not a field of TRL's {TRAINERS[stage]}", None, _meant(name, stage, own)
        )
    return _wrong_value(key, value, fields[name])


def _meant(name: str, stage: str, own: list[str]) -> str | None:
    others = [config for other, config in TRAINERS.items() if other != stage and name in fields_of(other)]
    if others:
        return f"only {others[0]} has this field"
    near = closest_match(name, [*fields_of(stage), *own])
    if near is None:
        return None
    return f"did you mean {stage}.{near}?" if near in own else f"did you mean {near}?"


def _wrong_value(key: str, value: Any, field: dict[str, Any]) -> Problem | None:
    if isinstance(value, float) and not math.isfinite(value):
        return Problem("C06", f"{key}: must be a finite number, got {value}")
    if not any(TYPES[kind](value) for kind in field["types"]):
        code, text, hint = wrong_type(key, [WORDS[kind] for kind in field["types"]], value)
        return Problem(code, text, None, hint)
    if isinstance(value, str) and "choices" in field and value not in field["choices"]:
        return not_a_choice(key, field["choices"], value)
    return None
