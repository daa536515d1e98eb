"""Change the YAMLs of a preset with a large model, so that they fit a GPU."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_cli import config
from rlhf_cli.config.machinery.yaml_io import to_yaml, with_value
from rlhf_cli.config.sections import LEARNING_RATE_FACTOR, scaled_rate
from rlhf_cli.config.stages import adapter_kind
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import build
from rlhf_cli.planning.model_size import Lengths
from rlhf_cli.planning.placement import Batch, MemoryPlanner, Placement, memory_line, require_known
from rlhf_cli.planning.target import Target
from rlhf_cli.runs.layout import configs_in


def fit_preset(folder: Path, fields: Mapping[str, Any], prompt: int, *, adapters: str | None, gpu: str | None) -> str:
    """Change the YAMLs of a preset in `folder` if they do not fit a GPU; return one line that says why.

    `fields` are those of its base model's config, `prompt` the tokens of its longest prompt, `adapters` is one of
    ADAPTERS. Raises RLHFError C07 for other adapters or an unknown GPU, C11 for adapters without a GPU, E03 if nothing
    fits.
    """
    target = Target.of(gpu, 1)
    if not target.gpu:
        if adapters:
            hint = "name the GPU, e.g. --gpu h100"
            raise RLHFError("C11", "--adapters fits the preset to a GPU, and this machine has none", hint=hint)
        return "memory: the preset as it is, as this machine has no GPU; --gpu NAME fits it to one"
    adapters = adapters or "auto"
    require_known(adapters)

    configs: dict[str, Any] = {path.stem: config.load(path.stem, path) for path in configs_in(folder)}
    kind = adapter_kind(configs["ppo"])
    planner = _planner(build.new_config(fields), target, prompt, configs)

    needed = {stage: planner.needed(stage, {}, adapters=kind is not None) for stage in configs}
    fullest = max(needed, key=lambda stage: needed[stage])
    as_it_is = Placement(kind, fullest=fullest, bytes=needed[fullest])
    fits = as_it_is.bytes <= planner.usable
    if fits and adapters in ("auto", kind or "none"):
        return memory_line("the preset as it is", as_it_is, target)

    hint = "take a larger GPU"
    if adapters != "auto":
        hint += ", or leave --adapters out"
    chosen, _ = planner.choose(adapters, own=kind, where="--gpu", hint=hint)
    for preset in configs.values():
        values = _values(preset, planner, chosen, has_adapters=kind is not None)
        _write_values(preset, values, f"for {target.name}")
    return memory_line(chosen, chosen, target, "as it is the preset needs", None if fits else as_it_is)


def _planner(body: Any, target: Target, prompt: int, configs: Mapping[str, Any]) -> MemoryPlanner:
    """Return the planner of the stages that a preset has, with its rows first."""
    generated = Lengths(prompt, configs["ppo"].ppo.max_response_length)
    lengths: dict[str, Lengths] = {}
    first: dict[str, Batch] = {}
    for stage, each in configs.items():
        settings = getattr(each, stage)
        lengths[stage] = generated if stage in ("ppo", "eval") else Lengths(1, settings.max_length - 1)
        first[stage] = _first_batch(stage, settings)
    return MemoryPlanner(
        body,
        target,
        first=first,
        lengths=lengths,
        make=lambda stage, overrides: config.load(stage, configs[stage].file, overrides),
    )


def _first_batch(stage: str, settings: Any) -> Batch:
    """Return the rows that a preset has."""
    if stage == "eval":
        return Batch(settings.per_device_batch_size, settings.n)
    rows = settings.per_device_train_batch_size
    rollout = settings.local_rollout_forward_batch_size if stage == "ppo" else None
    return Batch(rows, rows * settings.gradient_accumulation_steps, rollout)


def _values(preset: Any, planner: MemoryPlanner, chosen: Placement, *, has_adapters: bool) -> dict[str, Any]:
    """Return the values of a stage's YAML by key, with the rates and evaluation rows that belong to a placement."""
    stage = preset.stage
    settings = getattr(preset, stage)
    assert chosen.rows
    values = planner.values(stage, chosen, chosen.rows[stage], chosen.rollout_rows)

    if stage in ("sft", "reward", "dpo"):
        rows = values[f"{stage}.per_device_train_batch_size"]
        values[f"{stage}.per_device_eval_batch_size"] = min(rows, settings.per_device_eval_batch_size)

    gets_adapters = chosen.adapters is not None
    if stage != "eval" and has_adapters != gets_adapters:
        factor = LEARNING_RATE_FACTOR if gets_adapters else 1 / LEARNING_RATE_FACTOR
        values[f"{stage}.learning_rate"] = scaled_rate(settings.learning_rate, factor)
    return values


def _write_values(preset: Any, values: Mapping[str, Any], reason: str) -> None:
    """Change a YAML to values by key, with a comment that has the value of the preset."""
    before = preset.model_dump()
    text = preset.file.read_text(encoding="utf-8")
    for key, value in values.items():
        section, _, name = key.partition(".")
        old = before.get(section, {}).get(name)
        if name == "adapters" and old:  # a placement changes the kind alone
            old = {"kind": old["kind"]}
        if value != old:
            comment = reason if old is None else f"{reason}; the preset has {to_yaml(old)}"
            text = with_value(text, key, value, comment)
    preset.file.write_text(text, encoding="utf-8")
