"""Settings of a run by their dotted keys in config.yaml, beside their defaults and those of other runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from rlhf_cli.config.machinery.fields import key_at
from rlhf_cli.config.stages import CONFIGS
from rlhf_cli.runs.layout import STAGES
from rlhf_cli.runs.read import Run, Stage
from rlhf_cli.trees import flatten

RUN_FOLDERS = {f"../{name}" for name in STAGES} | {".."}  # the default paths in a config.yaml
REQUIRED = object()  # in place of a default


@dataclass(frozen=True)
class Difference:
    """A setting that is not at its default. `default` is None for a required key, `-` for a key without one."""

    stage: str
    key: str
    value: str
    default: str | None


def from_defaults(stage: Stage) -> list[Difference]:
    """Return the settings of a stage's config.yaml that are not at their defaults."""
    differences = []
    for key, value in flatten(stage.config or {}).items():
        if key == "stage" or _is_run_folder(stage.name, key, value):
            continue
        config_key = key_at(CONFIGS[stage.name], key.split("."))
        default = config_key.default(REQUIRED) if config_key else REQUIRED
        if default != value:
            text = None if default is REQUIRED else value_text(default)
            differences.append(Difference(stage.name, key, value_text(value), text if config_key else "-"))
    return differences


def between(runs: Sequence[Run]) -> list[tuple[str, str, list[str]]]:
    """Return (stage, key, value in each run) of the keys that differ; `-` where a run lacks the key.

    Runs without the stage are not compared.
    """
    differences = []
    for stage in STAGES:
        configs = [_settings(run, stage) for run in runs]
        keys = dict.fromkeys(chain.from_iterable(configs))
        for key in keys:
            values = [value_text(config[key]) if key in config else "-" for config in configs]
            present = {value for config, value in zip(configs, values, strict=True) if config}
            are_folders = all(_is_run_folder(stage, key, config.get(key)) for config in configs)
            if len(present) > 1 and not are_folders:
                differences.append((stage, key, values))
    return differences


def _settings(run: Run, stage: str) -> dict[str, Any]:
    """Return the settings of a run's stage by dotted key; empty without the stage or its config."""
    config = run.stages[stage].config if stage in run.stages else None
    return flatten(config or {})


def value_text(value: Any) -> str:
    """Return a value as in YAML, but `none` for null."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{', '.join(map(value_text, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _is_run_folder(stage: str, key: str, value: Any) -> bool:
    config_key = key_at(CONFIGS[stage], key.split("."))
    return config_key is not None and config_key.path_field is not None and value in RUN_FOLDERS
