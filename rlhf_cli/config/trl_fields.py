"""The fields of TRL's configs that `trainer:` accepts, stored in trl_fields.json: TRL imports slowly."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from rlhf_cli.config.base import Config
from rlhf_cli.config.fields import fields_of as keys_of_section

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
    return name in OWNED or name.startswith(OWNED_FAMILIES)


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
