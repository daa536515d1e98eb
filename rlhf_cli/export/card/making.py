"""How a model was made: its stages, their data and settings, and the course of PPO."""

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from rlhf_cli.checkpoints import FOREIGN
from rlhf_cli.checkpoints.adapters import is_hub_id
from rlhf_cli.config import CONFIGS
from rlhf_cli.config.keys import field_at, field_shape
from rlhf_cli.config.rewards import KINDS
from rlhf_cli.export.card.markdown import bullets, code, table, text
from rlhf_cli.export.card.subject import Subject, data_name, sha256_of
from rlhf_cli.report import facts
from rlhf_cli.report.differences import flat, from_defaults, said
from rlhf_cli.report.health import readings
from rlhf_cli.report.runs import Stage, is_number

SHORT = 12  # hex digits of a hash
LIBRARIES = ("torch", "transformers", "trl", "peft", "bitsandbytes", "tokenizers", "safetensors")
COURSE = ("objective/scores", "objective/kl_k1", "objective/response_length", "objective/eos_fraction")
_TRAINING = ("learning_rate", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps")
# Told also where they are at their default: what a reader asks for first.
HEADLINE = {
    "sft": tuple(f"sft.{key}" for key in (*_TRAINING, "max_length")),
    "reward": tuple(f"reward.{key}" for key in (*_TRAINING, "max_length")),
    "ppo": tuple(
        f"ppo.{key}"
        for key in (
            "recipe", "total_episodes", "learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps",
            "num_ppo_epochs", "num_mini_batches", "response_length", "temperature", "kl_coef", "kl_estimator", "gamma",
            "lam", "cliprange", "vf_coef", "missing_eos_penalty",
        )
    ),
}  # fmt: skip
# Of no interest elsewhere, or of this machine alone: what is logged and saved, who is asked over the network.
UNTOLD = {"output", "run", "logging_steps", "num_sample_generations", "push_to_hub_if_best"}
UNTOLD |= {"url", "headers", "timeout", "retries", "batch_size"}
SOURCES = {
    "model": "a reward model",
    "models": "several reward models together",
    "function": "a Python function",
    "builtin": "a rule",
    "url": "a service that is asked over the network",
    "pipeline": "a text classifier",
}


def blocks(about: Subject) -> Iterator[str]:
    """The section, part by part."""
    yield "## How it was made"
    yield table(
        ("stage", "starts from", "trained for", "time", "device", "seed", "model, sha256"),
        (_stage(about, each) for each in about.stages),
    )
    if rewards := list(_rewards(about)):
        yield "What PPO was trained to raise:"
        yield bullets(rewards)
    yield "### Data"
    yield table(("stage", "key", "data", "rows", "sha256"), _data(about))
    yield "Rows are all that a file holds: fewer were used where some are too long, or `data.max_rows` is set."
    yield "### Settings"
    yield "Those that differ from the defaults, and the main ones."
    yield table(("stage", "key", "value", "default"), (row for each in about.stages for row in _settings(about, each)))
    versions = facts.versions(about.stages)
    libraries = [("rlhf-cli", versions.get("rlhf")), *((name, versions.get(name)) for name in LIBRARIES)]
    made_with = ", ".join(f"{name} {text(version)}" for name, version in libraries if version)
    git = (about.stage.manifest or {}).get("git")
    where = f" The git repository around its folder stood at revision {code(str(git))} then." if git else ""
    yield f"Trained with {made_with}.{where}"
    if course := list(_course(about.stage)):
        yield "### Course of PPO"
        yield bullets(course)


def _stage(about: Subject, stage: Stage) -> list[str]:
    row, manifest = facts.stage_row(stage), stage.manifest or {}
    started = [parent(about, told) for key, told in stage.told("parents").items() if not key.startswith("rewards.")]
    started = started or ["fresh weights"]
    of_the_end = "" if stage is not about.stage or about.chosen.last else " at its end"
    made = _short(sha256_of(stage)) + of_the_end
    return [
        _label(about, stage),
        "; ".join(started),
        row.steps,
        row.time,
        text(row.device),
        str(manifest.get("seed", "")),
        made,
    ]


def _label(about: Subject, stage: Stage) -> str:
    return about.labels.get(sha256_of(stage), stage.name)


def parent(about: Subject, told: Mapping[str, Any]) -> str:
    """A model that a stage read, without a place of this machine."""
    if told["stage"] != FOREIGN:
        return f"{about.labels.get(told['sha256'], told['stage'])} {_short(told['sha256'])}"
    name = told["path"] if is_hub_id(told["path"]) else PurePosixPath(told["path"]).name
    return code(name + (f" at {told['revision']}" if "revision" in told else "")) + f" {_short(told['sha256'])}"


def _short(sha256: Any) -> str:
    return code(str(sha256)[:SHORT])


def _rewards(about: Subject) -> Iterator[str]:
    """The terms of PPO's reward; none of another stage."""
    stage = about.stage
    for name, source in (stage.setting("rewards") or {}).items():
        kind = next(kind for kind in KINDS if source.get(kind))
        models = [told for key, told in stage.told("parents").items() if key.startswith(f"rewards.{name}.")]
        named = f" ({', '.join(parent(about, told) for told in models)})" if models else ""
        weight = f"weight {source['weight']:g}" if source["weight"] else "not optimised: a judge that was only watched"
        yield f"{code(name)}: {SOURCES[kind]}{named}, {weight}"
    kl_coef, start = stage.setting("ppo.kl_coef"), " at the start" if stage.setting("ppo.adap_kl_ctrl") else ""
    if is_number(kl_coef):
        yield f"less {kl_coef:g}{start} times the KL divergence from the SFT model, in nats"


def _data(about: Subject) -> Iterator[list[str]]:
    for stage in [*about.stages, *([about.run.stages["eval"]] if about.is_evaluated else [])]:
        for row in facts.data_rows([stage]):
            yield [_label(about, stage), code(row.key), code(data_name(stage, row.key)), row.rows, _short(row.sha256)]


def _settings(about: Subject, stage: Stage) -> Iterator[list[str]]:
    set_otherwise = {each.key: each for each in from_defaults(stage)}
    main = {key: value for key, value in flat(stage.config or {}).items() if key in HEADLINE.get(stage.name, ())}
    for key in [*main, *(key for key in set_otherwise if key not in main)]:
        each = set_otherwise.get(key)
        value = each.value if each else said(main[key])
        if UNTOLD.isdisjoint(key.split(".")) and not _is_place(stage.name, key) and "/" not in value:
            default = value if each is None else (each.default or "").removeprefix("-")
            yield [_label(about, stage), code(key), code(value), code(default)]


def _is_place(stage: str, key: str) -> bool:
    field = field_at(CONFIGS[stage], tuple(key.split(".")))
    return field is not None and field_shape(field).path is not None


def _course(stage: Stage) -> Iterator[str]:
    """Where PPO's main metrics began and ended, and how that is to be read."""
    if stage.name == "ppo":
        for reading in readings(stage):
            if reading.key in COURSE:
                yield f"{reading.title} ({code(reading.key)}): {text(reading.sentence)}"
