"""Check `trainer:` against the fields of TRL's configs, stored in trl_fields.json: TRL imports slowly."""

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from rlhf_cli.config.base import Config
from rlhf_cli.config.paths import field_kind
from rlhf_cli.config.value_errors import not_a_choice, wrong_type
from rlhf_cli.errors import Problem, closest_match

TRAINERS = {"sft": "SFTConfig", "reward": "RewardConfig"}
FIELDS_FILE = Path(__file__).with_name("trl_fields.json")
# Fields that rlhf sets itself -> the key or option to use instead, or None.
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
TYPE_NAMES = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "string": "text",
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


def trainer_fields(model: type[Config]) -> dict[str, dict[str, Any]]:
    """Return the fields that `trainer:` accepts: those that rlhf does not set and that have no key of their own."""
    stage = model.model_fields["stage"].default
    if stage not in TRAINERS:
        return {}
    settings_keys = _settings_keys(model)
    return {
        name: field
        for name, field in fields_of(stage).items()
        if name not in settings_keys and name not in OWNED and not name.startswith(OWNED_FAMILIES)
    }


def _settings_keys(model: type[Config]) -> list[str]:
    """Return the keys of the section with the stage's options, such as sft:."""
    settings = field_kind(model.model_fields[model.model_fields["stage"].default]).model
    assert settings is not None
    return list(settings.model_fields)


def check_trainer(trainer: dict[str, Any], model: type[Config], where: Callable[[str], str]) -> list[Problem]:
    """Return the problems of a `trainer:` section."""
    stage = model.model_fields["stage"].default
    settings_keys = _settings_keys(model)
    problems = {name: _check_field(name, value, stage, settings_keys) for name, value in trainer.items()}
    return [
        Problem(problem.code, problem.text, where(f"trainer.{name}"), problem.hint)
        for name, problem in problems.items()
        if problem
    ]


def _check_field(name: str, value: Any, stage: str, settings_keys: list[str]) -> Problem | None:
    key, fields = f"trainer.{name}", fields_of(stage)
    if name in settings_keys:
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
            "C01",
            f"unknown key {key}: not a field of TRL's {TRAINERS[stage]}",
            None,
            _suggest(name, stage, settings_keys),
        )
    return _check_value(key, value, fields[name])


def _suggest(name: str, stage: str, settings_keys: list[str]) -> str | None:
    configs = [config for trainer_stage, config in TRAINERS.items() if name in fields_of(trainer_stage)]
    if configs:
        return f"only {configs[0]} has this field"
    near = closest_match(name, [*fields_of(stage), *settings_keys])
    if near is None:
        return None
    return f"did you mean {stage}.{near}?" if near in settings_keys else f"did you mean {near}?"


def _check_value(key: str, value: Any, field: dict[str, Any]) -> Problem | None:
    if isinstance(value, float) and not math.isfinite(value):
        return Problem("C06", f"{key}: must be a finite number, got {value}")
    if not any(TYPES[kind](value) for kind in field["types"]):
        code, text, hint = wrong_type(key, [TYPE_NAMES[kind] for kind in field["types"]], value)
        return Problem(code, text, None, hint)
    if isinstance(value, str) and "choices" in field and value not in field["choices"]:
        return not_a_choice(key, field["choices"], value)
    return None
