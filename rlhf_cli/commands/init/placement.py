"""How the models of a run are kept in memory, and how many rows at once: the first that the memory plan says fits."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_cli import system
from rlhf_cli.commands.init.pairs import Lengths
from rlhf_cli.config.base import Config, Origin
from rlhf_cli.config.training import CONFIGS
from rlhf_cli.errors import RLHFError
from rlhf_cli.stages import plan_phases
from rlhf_cli.stages.plan_estimate import fragmentation, library_bytes, stage_phases
from rlhf_cli.stages.plan_models import Target, mode_of

MAX_ROWS = {"sft": 32, "reward": 16, "ppo": 32, "eval": 64}
MIN_ROWS = {"sft": 2, "reward": 1, "ppo": 2, "eval": 2}  # fewer make a run slow: less memory is better first
EPISODES_PER_UPDATE = 64
BEST_OF = 4
ADAPTERS = ("auto", "none", "lora", "qlora")


@dataclass(frozen=True)
class Placement:
    """How models are kept in memory, with the rows per process of each stage; `rollout_rows` None: an update's rows."""

    adapters: str | None  # lora or qlora
    checkpointing: bool
    eight_bits: bool = False  # AdamW's moments
    rows: Mapping[str, int] | None = None
    rollout_rows: int | None = None
    fullest: str = ""  # the stage that needs most
    bytes: int = 0

    def __str__(self) -> str:
        kinds = {None: "whole weights", "lora": "LoRA adapters on one base", "qlora": "LoRA adapters on one 4-bit base"}
        more = " and gradient checkpointing" * self.checkpointing + " and 8-bit AdamW" * self.eight_bits
        return kinds[self.adapters] + more


# What is tried in this order: first what costs no quality, then what costs time, then adapters.
PLACEMENTS = (
    Placement(None, False),
    Placement(None, True),
    Placement(None, True, eight_bits=True),
    Placement("lora", False),
    Placement("lora", True),
    Placement("qlora", False),
    Placement("qlora", True),
)


class MemoryPlanner:
    """The memory of a run's stages by the estimator of `rlhf plan`, for a base model's transformers config."""

    def __init__(self, body: Any, lengths: Lengths, target: Target) -> None:
        self.body, self.lengths, self.target = body, lengths, target
        self.process = 0 if target.gpu else system.process_memory()
        self.available = plan_phases.GPU_SHARE * target.memory

    def choose(self, adapters: str) -> tuple[Placement, Placement | None]:
        """Return the first placement that fits, with its rows, and the whole weights if they do not fit.

        `adapters` is one of ADAPTERS. Raises RLHFError E03 if nothing fits.
        """
        wanted = [each for each in PLACEMENTS if adapters in ("auto", each.adapters or "none")]
        whole = self._fill(PLACEMENTS[0], dict.fromkeys(MAX_ROWS, 1))
        for least in (MIN_ROWS, dict.fromkeys(MIN_ROWS, 1)):
            for placement in wanted:
                filled = self._fill(placement, least)
                if filled.bytes <= self.available:
                    return filled, whole if whole.bytes > self.available else None
        size, room = system.format_bytes(filled.bytes), system.format_bytes(self.target.memory)
        text = f"with {filled} the {filled.fullest} stage needs {size}, and {self.target.name} has {room}"
        hint = "take a smaller base model" + (", or leave --adapters out" if adapters != "auto" else "")
        raise RLHFError("E03", text, where="--base", hint=f"{hint}; --gpu NAME prepares a folder for another machine")

    def _fill(self, placement: Placement, least: Mapping[str, int]) -> Placement:
        """Return a placement with the most rows of each stage that fit, down to `least`."""
        rows, needed, rollout = {}, {}, None
        for stage, most in MAX_ROWS.items():
            choices = [(count, at_once) for at_once in (64, 32, 16, 8) for count in _halved(most, least[stage])]
            for count, at_once in choices if stage == "ppo" else [each for each in choices if each[1] == 64]:
                rows[stage] = count
                needed[stage] = self._needed(stage, placement, count, at_once)
                if stage == "ppo":
                    rollout = at_once if at_once < EPISODES_PER_UPDATE else None
                if needed[stage] <= self.available:
                    break
        fullest = max(needed, key=lambda stage: needed[stage])
        made = placement.adapters, placement.checkpointing, placement.eight_bits
        return Placement(*made, rows=rows, rollout_rows=rollout, fullest=fullest, bytes=needed[fullest])

    def _needed(self, stage: str, placement: Placement, rows: int, rollout_rows: int) -> int:
        """Return the bytes that a stage needs with `rows` at once."""
        config = _config(stage, placement, rows, rollout_rows, self.lengths)
        keys = ("model.path", "models.sft", "models.ppo", "models.reward")
        longest, response = self.lengths.max_length, self.lengths.response_length
        lengths = {
            "sft": plan_phases.Lengths(1, longest - 1),
            "reward": plan_phases.Lengths(longest - 1, 1),
        }.get(stage, plan_phases.Lengths(self.lengths.prompt_max, response))
        bodies, mode = dict.fromkeys(keys, self.body), mode_of(config)
        adapters = keys[2:] if placement.adapters else ()
        sampled: dict[str, Any] = {"adapters": adapters, "sampled": EPISODES_PER_UPDATE} if stage == "eval" else {}
        _, phases = stage_phases(config, bodies, mode, self.target, lengths, **sampled)
        peak = max(phase.total for phase in phases)
        return peak + fragmentation(peak, self.target) + library_bytes(stage, self.target, self.process)


def _config(stage: str, placement: Placement, rows: int, rollout_rows: int, lengths: Lengths) -> Config:
    """Return the config of a stage as far as its memory depends on it."""
    adapters: dict[str, Any] = {"adapters": {"kind": placement.adapters}} if placement.adapters else {}
    batch = {"per_device_train_batch_size": rows, "gradient_checkpointing": placement.checkpointing}
    parts, trainer = {"gradient_accumulation_steps": 2}, {"optim": "adamw_8bit"} if placement.eight_bits else {}
    training = {"model": {"path": "/base", **adapters}, "data": {"train": "none"}, "trainer": trainer}
    prompts, models = {"prompts": "none"}, {"sft": "/sft", "reward": "/reward"}
    optim = {"optim": "adamw_8bit"} if placement.eight_bits else {}
    ppo = {**batch, **optim, "gradient_accumulation_steps": EPISODES_PER_UPDATE // rows, "total_episodes": 64}
    ppo |= {"response_length": lengths.response_length, "local_rollout_forward_batch_size": rollout_rows}
    evaluation = {"per_device_batch_size": rows, "temperature": 1.0, "response_length": lengths.response_length}
    sections: dict[str, dict[str, Any]] = {
        "sft": {**training, "sft": {**batch, **parts, "max_length": lengths.max_length}},
        "reward": {**training, "reward": {**batch, **parts, "max_length": lengths.max_length}},
        "ppo": {"models": {**models, **adapters}, "data": prompts, "ppo": ppo},
        "eval": {"models": {**models, "ppo": "/ppo"}, "data": prompts, "eval": evaluation},
    }
    config = CONFIGS[stage].model_validate({"run": "/run", **sections[stage]})
    config._origin = Origin(Path(f"/run/{stage}.yaml"), f"{stage}.yaml")
    return config


def _halved(most: int, least: int) -> list[int]:
    """Return `most`, half of it, and so on, down to `least`."""
    return [most >> shift for shift in range(most.bit_length()) if most >> shift >= least]
