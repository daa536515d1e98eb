"""How the models of a run are kept in memory, and how many rows at once: the first that the memory plan says fits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_cli import config, system
from rlhf_cli.commands.init.pairs import Lengths
from rlhf_cli.commands.plan import memory_savings
from rlhf_cli.config.base import Config
from rlhf_cli.config.loading import apply_overrides
from rlhf_cli.config.machinery.section import Origin
from rlhf_cli.config.machinery.yaml_io import YamlFile, to_yaml, with_value
from rlhf_cli.config.stages import CONFIGS
from rlhf_cli.errors import RLHFError, did_you_mean
from rlhf_cli.models import build
from rlhf_cli.planning import memory, phase_memory
from rlhf_cli.planning.estimate import overhead_bytes, stage_phases
from rlhf_cli.planning.stage_models import Target, adapter_kind, mode_of

MAX_ROWS = {"sft": 32, "reward": 16, "dpo": 16, "ppo": 32, "eval": 64}
MIN_ROWS = {"sft": 2, "reward": 1, "dpo": 1, "ppo": 2, "eval": 2}  # fewer make a run slow: less memory is better first
MIN_ROLLOUT_ROWS = 8
EPISODES_PER_UPDATE = 64
BEST_OF = 4
ADAPTER_RATE = 10  # times the learning rate of whole weights, as the defaults have it (docs/scaling.md)
KINDS = (None, "lora", "qlora")  # of adapters, each in less memory than the one before
ADAPTERS = ("auto", "none", "lora", "qlora")
MODEL_KEYS = ("model.path", "models.sft", "models.ppo", "models.reward", "rewards.reward.model")


@dataclass(frozen=True)
class Placement:
    """How models are kept in memory, with the rows per process of each stage; `rollout_rows` None: the first choice."""

    adapters: str | None  # lora or qlora
    savings: tuple[str, ...] = ()  # names of memory_savings
    rows: Mapping[str, int] | None = None
    rollout_rows: int | None = None
    fullest: str = ""  # the stage that needs most
    bytes: int = 0

    def __str__(self) -> str:
        kinds = {None: "whole weights", "lora": "LoRA adapters on one base", "qlora": "LoRA adapters on one 4-bit base"}
        *parts, last = [kinds[self.adapters], *self.savings]
        return f"{', '.join(parts)} and {last}" if parts else last


CHECKPOINTING, ADAMW_8BIT, OFFLOAD, POLICY_HEAD = SAVINGS = tuple(memory_savings("ppo"))
# They are tried in this order. Adapters train fewer weights, at other rates, so they come after the savings.
PLACEMENTS = (
    *(Placement(None, SAVINGS[:count]) for count in range(len(SAVINGS))),
    Placement(None, (CHECKPOINTING, ADAMW_8BIT, POLICY_HEAD)),
    Placement(None, SAVINGS),
    *(Placement(kind, used) for kind in ("lora", "qlora") for used in ((), (CHECKPOINTING,))),
)


class Batch(NamedTuple):
    """Rows of a stage that are tried first, rows of a step, and responses generated at once (None: the default)."""

    rows: int
    total: int
    rollout: int | None = None


FIRST = {name: Batch(rows, 2 * rows, EPISODES_PER_UPDATE * (name == "ppo") or None) for name, rows in MAX_ROWS.items()}


@dataclass
class MemoryPlanner:
    """The memory of a run's stages by the estimator of `rlhf plan`.

    `make` returns the config of a stage with overrides.
    """

    body: Any  # the base model's transformers config
    target: Target
    first: Mapping[str, Batch]  # by stage
    lengths: Mapping[str, memory.Lengths]  # by stage
    make: Callable[[str, Sequence[str]], Config]

    def __post_init__(self) -> None:
        self.process = 0 if self.target.gpu else system.process_memory()
        self.available = phase_memory.GPU_SHARE * self.target.memory

    @classmethod
    def of(cls, body: Any, lengths: Lengths, target: Target, *, baselines: bool = False) -> "MemoryPlanner":
        """Return a planner for `rlhf init preferences`; with `baselines` for DPO, too."""
        longest, generated = lengths.max_length, memory.Lengths(lengths.prompt_max, lengths.response_length)
        rows = {"sft": memory.Lengths(1, longest - 1), "reward": memory.Lengths(longest - 1, 1)}
        rows |= {"dpo": rows["sft"]} if baselines else {}
        rows |= {"ppo": generated, "eval": generated}
        first = {stage: FIRST[stage] for stage in rows}
        return cls(body, target, first, rows, lambda stage, overrides: _config(stage, overrides, lengths))

    def choose(
        self, adapters: str, *, own: str | None = None, where: str = "--base", hint: str
    ) -> tuple[Placement, Placement | None]:
        """Return the first placement that fits, with its rows, and the first of all if it does not fit.

        `adapters` is one of ADAPTERS, `own` the kind that the stages have. Raises RLHFError E03 if nothing fits.
        """
        kinds = KINDS[KINDS.index(own) :] if adapters == "auto" else [None if adapters == "none" else adapters]
        wanted = [p for p in PLACEMENTS if p.adapters in kinds and (self.target.gpu or OFFLOAD not in p.savings)]
        simplest = self._fill(PLACEMENTS[0] if own is None else Placement(own), dict.fromkeys(MAX_ROWS, 1))
        for least in (MIN_ROWS, dict.fromkeys(MIN_ROWS, 1)):
            for placement in wanted:
                filled = self._fill(placement, least)
                if filled.bytes <= self.available:
                    return filled, simplest if simplest.bytes > self.available else None
        size, room = system.format_bytes(filled.bytes), system.format_bytes(self.target.memory)
        text = f"with {filled} the {filled.fullest} stage needs {size}, and {self.target.name} has {room}"
        raise RLHFError("E03", text, where=where, hint=f"{hint}; --gpu NAME prepares a folder for another machine")

    def _fill(self, placement: Placement, least: Mapping[str, int]) -> Placement:
        """Return a placement with the most rows of each stage that fit, down to `least`."""
        rows, needed, rollout = {}, {}, None
        for stage, first in self.first.items():
            generated: list[Any] = _halved(first.rollout, MIN_ROLLOUT_ROWS) if first.rollout else [None]
            for count, at_once in [(n, at) for at in generated for n in _halved(first.rows, least[stage])]:
                rows[stage] = count
                values = self.values(stage, placement, count, at_once)
                needed[stage] = self.needed(stage, values, adapters=placement.adapters is not None)
                if stage == "ppo":
                    rollout = at_once if at_once != first.rollout else None
                if needed[stage] <= self.available:
                    break
        fullest = max(needed, key=lambda stage: needed[stage])
        return replace(placement, rows=rows, rollout_rows=rollout, fullest=fullest, bytes=needed[fullest])

    def values(self, stage: str, placement: Placement, rows: int, rollout_rows: int | None) -> dict[str, Any]:
        """Return the values of a stage's config by key."""
        if stage == "eval":
            return {"eval.per_device_batch_size": rows}
        is_ppo = stage == "ppo"
        return {
            "models.adapters" if is_ppo else "model.adapters": placement.adapters and {"kind": placement.adapters},
            f"{stage}.per_device_train_batch_size": rows,
            f"{stage}.gradient_accumulation_steps": self.first[stage].total // rows,
            **dict(saving for name, saving in memory_savings(stage).items() if name in placement.savings),
            **({"ppo.local_rollout_forward_batch_size": rollout_rows} if is_ppo and rollout_rows else {}),
        }

    def needed(self, stage: str, values: Mapping[str, Any], *, adapters: bool) -> int:
        """Return the bytes that a stage needs with these values; `adapters`: whether the run trains adapters."""
        made: Any = self.make(stage, [f"{key}={to_yaml(value)}" for key, value in values.items()])
        sampled: dict[str, Any] = {}
        if stage == "eval":
            sampled = {"adapters": MODEL_KEYS[2:] if adapters else (), "sampled": made.eval.n}
        bodies, lengths = dict.fromkeys(MODEL_KEYS, self.body), self.lengths[stage]
        _, phases = stage_phases(made, bodies, mode_of(made), self.target, lengths, **sampled)
        peak = max(phase.total for phase in phases)
        return peak + sum(overhead_bytes(stage, peak, self.target, self.process).values())


def memory_line(what: object, chosen: Placement, target: Target, other: str = "", than: Placement | None = None) -> str:
    """Return one line: how the models are kept in memory, and why: `other` needs more than there is."""
    size, room = system.format_bytes(chosen.bytes), system.format_bytes(target.memory)
    reason = f"; {other} {system.format_bytes(than.bytes)}" if than else ""
    return f"memory: {what}: at most {size} in {chosen.fullest}; {target.name} has {room}{reason}"


def _config(stage: str, overrides: Sequence[str], lengths: Lengths) -> Config:
    """Return the config of a stage of `rlhf init preferences` as far as its memory depends on it."""
    longest = {"max_length": lengths.max_length}
    training: dict[str, Any] = {"model": {"path": "/base"}, "data": {"train": "none"}, stage: longest}
    models, response = {"sft": "/sft", "reward": "/reward"}, {"response_length": lengths.response_length}
    generating = {"models": models, "data": {"prompts": "none"}}
    trees: dict[str, dict[str, Any]] = {
        "ppo": {**generating, "ppo": {"total_episodes": 64, **response}},
        "eval": {**generating, "models": {**models, "ppo": "/ppo"}, "eval": {"temperature": 1.0, **response}},
    }
    source = YamlFile("", {"run": "/run", **trees.get(stage, training)}, {}, [])
    apply_overrides(overrides, source, CONFIGS[stage])
    made = CONFIGS[stage].model_validate(source.tree)
    made._origin = Origin(Path(f"/run/{stage}.yaml"), f"{stage}.yaml")
    return made


def _halved(most: int, least: int) -> list[int]:
    """Return `most`, half of it, and so on, down to `least`."""
    return [most >> shift for shift in range(most.bit_length()) if most >> shift >= min(most, least)]


def require_known(adapters: str) -> None:
    """Raise RLHFError C07 for a value of --adapters that is not one of ADAPTERS."""
    if adapters not in ADAPTERS:
        text = f"--adapters {adapters}: not one of {', '.join(ADAPTERS)}"
        raise RLHFError("C07", text, hint=did_you_mean(adapters, ADAPTERS))


def fit_preset(folder: Path, fields: Mapping[str, Any], prompt: int, adapters: str | None, gpu: str | None) -> str:
    """Change the YAMLs of a preset in `folder` if they do not fit a GPU; return one line that says why.

    `fields` are those of its base model's config, `prompt` the tokens of its longest prompt, `adapters` is one of
    ADAPTERS. Raises RLHFError C07 for other adapters or an unknown GPU, C11 for adapters without a GPU, E03 if nothing
    fits.
    """
    target = Target.of(gpu, 1)
    if not target.gpu and adapters:
        hint = "name the GPU, e.g. --gpu h100"
        raise RLHFError("C11", "--adapters fits the preset to a GPU, and this machine has none", hint=hint)
    if not target.gpu:
        return "memory: the preset as it is, as this machine has no GPU; --gpu NAME fits it to one"
    adapters = adapters or "auto"
    require_known(adapters)
    files = {stage: folder / f"{stage}.yaml" for stage in MAX_ROWS if (folder / f"{stage}.yaml").exists()}
    own: dict[str, Any] = {stage: config.load(stage, file) for stage, file in files.items()}
    settings, kind = {stage: getattr(each, stage) for stage, each in own.items()}, adapter_kind(own["ppo"])
    generated = memory.Lengths(prompt, settings["ppo"].max_response_length)
    lengths = {
        stage: generated if stage in ("ppo", "eval") else memory.Lengths(1, each.max_length - 1)
        for stage, each in settings.items()
    }
    first = {"eval": Batch(settings["eval"].per_device_batch_size, settings["eval"].n)}
    for stage, each in settings.items():
        if stage != "eval":
            rows = each.per_device_train_batch_size
            rollout = each.local_rollout_forward_batch_size if stage == "ppo" else None
            first[stage] = Batch(rows, rows * each.gradient_accumulation_steps, rollout)
    body = build.new_config(fields)
    planner = MemoryPlanner(body, target, first, lengths, lambda stage, each: config.load(stage, files[stage], each))
    needed = {stage: planner.needed(stage, {}, adapters=kind is not None) for stage in files}
    fullest = max(needed, key=lambda stage: needed[stage])
    as_it_is = Placement(kind, fullest=fullest, bytes=needed[fullest])
    fits = as_it_is.bytes <= planner.available
    if fits and adapters in ("auto", kind or "none"):
        return memory_line("the preset as it is", as_it_is, target)
    hint = "take a larger GPU" if adapters == "auto" else "take a larger GPU, or leave --adapters out"
    chosen, _ = planner.choose(adapters, own=kind, where="--gpu", hint=hint)
    for stage, file in files.items():
        values = planner.values(stage, chosen, (chosen.rows or {})[stage], chosen.rollout_rows)
        if stage not in ("ppo", "eval"):
            rows = values[f"{stage}.per_device_train_batch_size"]
            values[f"{stage}.per_device_eval_batch_size"] = min(rows, settings[stage].per_device_eval_batch_size)
        if stage != "eval" and bool(chosen.adapters) != bool(kind):
            rate = settings[stage].learning_rate
            values[f"{stage}.learning_rate"] = rate * ADAPTER_RATE if chosen.adapters else rate / ADAPTER_RATE
        _write_values(file, own[stage].model_dump(), values, f"for {target.name}")
    return memory_line(chosen, chosen, target, "as it is the preset needs", None if fits else as_it_is)


def _write_values(file: Path, before: Mapping[str, Any], values: Mapping[str, Any], reason: str) -> None:
    """Change a YAML to values by key, with a comment that has the value of the preset."""
    text = file.read_text(encoding="utf-8")
    for key, value in values.items():
        section, _, name = key.partition(".")
        old = before.get(section, {}).get(name)
        old = {"kind": old["kind"]} if name == "adapters" and old else old
        if value != old:
            text = with_value(text, key, value, reason if old is None else f"{reason}; the preset has {to_yaml(old)}")
    file.write_text(text, encoding="utf-8")
