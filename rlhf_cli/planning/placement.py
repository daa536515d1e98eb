"""How the models of a run are kept in memory, and how many rows at once: the first that the memory plan says fits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

from rlhf_cli import system
from rlhf_cli.config.base import Config
from rlhf_cli.config.machinery.yaml_io import to_yaml
from rlhf_cli.errors import RLHFError, did_you_mean
from rlhf_cli.planning import memory
from rlhf_cli.planning.estimate import DataSize, StageInputs, estimate_stage
from rlhf_cli.planning.model_size import Lengths
from rlhf_cli.planning.target import Target

MAX_ROWS = {"sft": 32, "reward": 16, "dpo": 16, "ppo": 32, "eval": 64}
MIN_ROWS = {"sft": 2, "reward": 1, "dpo": 1, "ppo": 2, "eval": 2}  # fewer make a run slow: less memory is better first
MIN_ROLLOUT_ROWS = 8
EPISODES_PER_UPDATE = 64
MANY_STEPS = 1000  # of a run whose sizes are not chosen yet
KINDS = (None, "lora", "qlora")  # of adapters, each in less memory than the one before
ADAPTERS = ("auto", "none", "lora", "qlora")
MODEL_KEYS = ("model.path", "models.sft", "models.ppo", "models.reward", "rewards.reward.model")

# Settings that save memory with whole weights, in the order to try them: checkpointing takes time, 8-bit AdamW rounds
# its moments, offload takes time in PPO. A value head on the policy changes the algorithm, so it comes last.
CHECKPOINTING = "gradient checkpointing"
ADAMW_8BIT = "8-bit AdamW"
OFFLOAD = "offload in PPO"
POLICY_HEAD = "policy_head in PPO"
SAVINGS = (CHECKPOINTING, ADAMW_8BIT, OFFLOAD, POLICY_HEAD)


def memory_savings(stage: str) -> dict[str, tuple[str, Any]]:
    """Return the savings that a stage has, each with its key and value."""
    savings: dict[str, tuple[str, Any]] = {
        CHECKPOINTING: (f"{stage}.gradient_checkpointing", True),
        ADAMW_8BIT: ("ppo.optim" if stage == "ppo" else "trainer.optim", "adamw_8bit"),
    }
    if stage == "ppo":
        savings[OFFLOAD] = ("ppo.offload", True)
        savings[POLICY_HEAD] = ("models.value", "policy_head")
    return savings


@dataclass(frozen=True)
class Placement:
    """How models are kept in memory, with the rows per process of each stage; `rollout_rows` None: the first choice."""

    adapters: str | None  # lora or qlora
    savings: tuple[str, ...] = ()  # of SAVINGS
    rows: Mapping[str, int] | None = None
    rollout_rows: int | None = None
    fullest: str = ""  # the stage that needs most
    bytes: int = 0

    def __str__(self) -> str:
        kinds = {None: "whole weights", "lora": "LoRA adapters on one base", "qlora": "LoRA adapters on one 4-bit base"}
        *parts, last = [kinds[self.adapters], *self.savings]
        return f"{', '.join(parts)} and {last}" if parts else last


# They are tried in this order. Adapters train fewer weights, at other rates, so they come after the savings.
PLACEMENTS = (
    Placement(None),
    Placement(None, (CHECKPOINTING,)),
    Placement(None, (CHECKPOINTING, ADAMW_8BIT)),
    Placement(None, (CHECKPOINTING, ADAMW_8BIT, OFFLOAD)),
    Placement(None, (CHECKPOINTING, ADAMW_8BIT, POLICY_HEAD)),
    Placement(None, SAVINGS),
    Placement("lora"),
    Placement("lora", (CHECKPOINTING,)),
    Placement("qlora"),
    Placement("qlora", (CHECKPOINTING,)),
)


class Batch(NamedTuple):
    """Rows of a stage that are tried first, rows of a step, and responses generated at once (None: the default)."""

    rows: int
    total: int
    rollout: int | None = None


FIRST = {name: Batch(rows, 2 * rows) for name, rows in MAX_ROWS.items()}
FIRST["ppo"] = Batch(MAX_ROWS["ppo"], EPISODES_PER_UPDATE, EPISODES_PER_UPDATE)


@dataclass
class MemoryPlanner:
    """The memory of a run's stages by the estimator of `rlhf plan`.

    `make` returns the config of a stage with overrides.
    """

    body: Any  # the base model's transformers config
    target: Target
    first: Mapping[str, Batch]  # by stage
    lengths: Mapping[str, Lengths]  # by stage
    make: Callable[[str, Sequence[str]], Config]

    def __post_init__(self) -> None:
        self.process = 0 if self.target.gpu else system.process_memory()
        self.usable = self.target.usable

    def choose(
        self, adapters: str, *, own: str | None = None, where: str = "--base", hint: str
    ) -> tuple[Placement, Placement | None]:
        """Return the first placement that fits, with its rows, and the first of all if it does not fit.

        `adapters` is one of ADAPTERS, `own` the kind that the stages have. Raises RLHFError E03 if nothing fits.
        """
        kinds = KINDS[KINDS.index(own) :] if adapters == "auto" else [None if adapters == "none" else adapters]
        wanted = [each for each in PLACEMENTS if each.adapters in kinds]
        if not self.target.gpu:
            wanted = [each for each in wanted if OFFLOAD not in each.savings]

        one_row = dict.fromkeys(MAX_ROWS, 1)
        simplest = self._fill(PLACEMENTS[0] if own is None else Placement(own), one_row)
        for least in (MIN_ROWS, one_row):
            for placement in wanted:
                filled = self._fill(placement, least)
                if filled.bytes <= self.usable:
                    return filled, simplest if simplest.bytes > self.usable else None

        size = system.format_bytes(filled.bytes)
        text = f"with {filled} the {filled.fullest} stage needs {size}, and {self.target.describe_usable()}"
        raise RLHFError("E03", text, where=where, hint=f"{hint}; --gpu NAME prepares a folder for another machine")

    def _fill(self, placement: Placement, least: Mapping[str, int]) -> Placement:
        """Return a placement with the most rows of each stage that fit, down to `least`."""
        rows: dict[str, int] = {}
        needed: dict[str, int] = {}
        rollout = None
        for stage, first in self.first.items():
            for count, at_once in _batches(first, least[stage]):
                rows[stage] = count
                values = self.values(stage, placement, count, at_once)
                needed[stage] = self.needed(stage, values, adapters=placement.adapters is not None)
                if stage == "ppo":
                    rollout = at_once if at_once != first.rollout else None
                if needed[stage] <= self.usable:
                    break
        fullest = max(needed, key=lambda stage: needed[stage])
        return replace(placement, rows=rows, rollout_rows=rollout, fullest=fullest, bytes=needed[fullest])

    def values(self, stage: str, placement: Placement, rows: int, rollout_rows: int | None) -> dict[str, Any]:
        """Return the values of a stage's config by key."""
        if stage == "eval":
            return {"eval.per_device_batch_size": rows}
        section = "models" if stage == "ppo" else "model"
        values: dict[str, Any] = {
            f"{section}.adapters": placement.adapters and {"kind": placement.adapters},
            f"{stage}.per_device_train_batch_size": rows,
            f"{stage}.gradient_accumulation_steps": self.first[stage].total // rows,
        }
        for name, (key, value) in memory_savings(stage).items():
            if name in placement.savings:
                values[key] = value
        if stage == "ppo" and rollout_rows:
            values["ppo.local_rollout_forward_batch_size"] = rollout_rows
        return values

    def needed(self, stage: str, values: Mapping[str, Any], *, adapters: bool) -> int:
        """Return the bytes that a stage needs with these values; `adapters`: whether the run trains adapters."""
        config: Any = self.make(stage, [f"{key}={to_yaml(value)}" for key, value in values.items()])
        inputs = StageInputs(
            bodies=dict.fromkeys(MODEL_KEYS, self.body),
            data=DataSize(self.lengths[stage], "rows", 1),
            adapters=MODEL_KEYS[2:] if adapters else (),
            sampled=config.eval.n if stage == "eval" else 0,
        )
        tensors = estimate_stage(config, inputs, None, self.target).peak.total
        overhead = memory.estimate_overhead(stage, tensors, steps=MANY_STEPS, gpu=self.target.gpu, process=self.process)
        return tensors + overhead.total


def memory_line(what: object, chosen: Placement, target: Target, other: str = "", than: Placement | None = None) -> str:
    """Return one line: how the models are kept in memory, and why: `other` needs more than there is."""
    size = system.format_bytes(chosen.bytes)
    reason = f"; {other} {system.format_bytes(than.bytes)}" if than else ""
    return f"memory: {what}: at most {size} in {chosen.fullest}; {target.describe_usable()}{reason}"


def _batches(first: Batch, least: int) -> list[tuple[int, int | None]]:
    """Return the rows to try, with the responses at once: fewer rows first, then fewer responses."""
    rows = _halved(first.rows, least)
    if first.rollout is None:
        return [(count, None) for count in rows]
    rollouts = _halved(first.rollout, MIN_ROLLOUT_ROWS)
    return [(count, rollout) for rollout, count in product(rollouts, rows)]


def _halved(most: int, least: int) -> list[int]:
    """Return `most`, half of it, and so on, down to `least`."""
    sizes = [most]
    while sizes[-1] // 2 >= max(1, min(most, least)):
        sizes.append(sizes[-1] // 2)
    return sizes


def require_known(adapters: str) -> None:
    """Raise RLHFError C07 for a value of --adapters that is not one of ADAPTERS."""
    if adapters not in ADAPTERS:
        text = f"--adapters {adapters}: not one of {', '.join(ADAPTERS)}"
        raise RLHFError("C07", text, hint=did_you_mean(adapters, ADAPTERS))
