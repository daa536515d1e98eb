"""What a stage asks the planner before it trains: whether it fits this machine, and how many responses fit at once."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from rlhf_cli import distributed, runs, system, terminal
from rlhf_cli.config.base import Config
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.reward import RewardConfig
from rlhf_cli.config.stages import TRLConfig, mode_of
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.models import devices, load
from rlhf_cli.planning.estimate import ADAMW_8BIT_NAMES, FixedMemory, fixed_memory, ppo_memory
from rlhf_cli.planning.model_size import Lengths
from rlhf_cli.planning.target import Target
from rlhf_cli.runs.parents import Parent
from rlhf_cli.runs.resolve import models_in_memory


def require_fits(config: Config, parents: Mapping[str, Parent], *, runs_here: bool = True) -> str:
    """Check that disk and memory hold a stage. Return the memory it needs at least as a line, "" if unknown.

    The estimate is a lower bound: it counts neither model.new nor input models that do not exist yet. Raises RLHFError
    E03; without `runs_here` too little memory is a warning, because the stage may be meant for a larger machine with
    the same disk.
    """
    optimizer = getattr(config, "trainer", {}).get("optim")
    if optimizer is not None and optimizer not in ADAMW_8BIT_NAMES:  # TRL's other optimizers may take less
        return ""

    target = _target()
    fixed = _fixed_memory(config, parents, target)
    _check_disk(config, round(fixed.checkpoint))
    _check_memory(config, fixed, target, runs_here=runs_here)
    if not fixed.total:
        return ""
    size = system.format_bytes(fixed.total)
    room = system.format_bytes(target.memory)
    return f"memory: {size} of {room} for {_kinds(fixed)}; `rlhf plan` counts the rest, and time"


class RolloutRows(NamedTuple):
    """Responses that are generated at a time, and the bytes of GPU memory that they fit in."""

    rows: int
    usable: float


def rollout_rows(
    config: PPOConfig, parents: Mapping[str, Parent], prompt_length: int, episodes: int
) -> RolloutRows | None:
    """Return how many of a process's `episodes` fit in its GPU at a time, once all models are loaded; None on a CPU.

    All of them if a model cannot be counted, such as one that runs only with --trust-remote-code.
    """
    target = _target()
    if not target.gpu:
        return None
    target = replace(target, memory=devices.available_bytes())
    lengths = Lengths(prompt_length, config.ppo.max_response_length)
    try:
        bodies, adapters = _bodies(config, parents)
        _, ppo = ppo_memory(config, bodies, mode_of(config), target, lengths, adapters)
    except (RLHFError, ValueError):
        return RolloutRows(episodes, target.usable)
    return RolloutRows(ppo.rollout_rows(episodes), target.usable)


def _target() -> Target:
    return Target.of(None, distributed.world_size(), sharing=distributed.local_world_size())


def _fixed_memory(config: Config, parents: Mapping[str, Parent], target: Target) -> FixedMemory:
    """Return what the existing models need; nothing if one cannot be read: loading reports the error."""
    try:
        bodies, adapters = _bodies(config, parents)
        return fixed_memory(config, bodies, adapters, target)
    except (RLHFError, ValueError):
        return FixedMemory({}, 0)


def _bodies(config: Config, parents: Mapping[str, Parent]) -> tuple[dict[str, Any], set[str]]:
    """Return the configs of the existing models by key, and the keys of those that are adapters of models.sft."""
    needed = {use.key for use in models_in_memory(config)}
    models = {key: parent for key, parent in parents.items() if key in needed}
    bodies = {key: load.read_config(parent.model) for key, parent in models.items()}

    sft = parents.get("models.sft")
    if sft is None:
        return bodies, set()
    adapters = {key for key, parent in models.items() if runs.is_adapter_of(parent, sft)}
    return bodies, adapters


def _kinds(fixed: FixedMemory) -> str:
    *kinds, last = [kind for kind, size in fixed.kinds.items() if size]
    return f"{', '.join(kinds)} and {last}" if kinds else last


def _check_disk(config: Config, checkpoint: int) -> None:
    """Raise RLHFError E03 if the disk cannot hold the checkpoints: those kept and one being written, minus existing."""
    kept = config.output.keep
    if isinstance(config, RewardConfig) and "data.eval" in config.sources() and config.reward.keeps_another_checkpoint:
        kept += 1
    count = sum(
        max(1, kept + 1 - len(runs.state_steps(each.folder / "state"))) for each in (config, *config.other_members)
    )
    free = system.free_disk_bytes(config.folder)
    if free is None or count * checkpoint <= free:
        return
    size = system.format_bytes(checkpoint)
    needed = system.format_bytes(count * checkpoint)
    text = f"{count} checkpoints of {size} need {needed}; {system.format_bytes(free)} are free"
    hint = "free disk space, or set `run:` to a folder on another disk; output.keep is the number of checkpoints"
    raise RLHFError("E03", text, where=shown(config.folder), hint=hint)


def _check_memory(config: Config, fixed: FixedMemory, target: Target, *, runs_here: bool) -> None:
    if fixed.total <= target.memory:
        return
    size = system.format_bytes(fixed.total)
    room = system.format_bytes(target.memory)
    text = f"{_kinds(fixed)} need {size} of memory, {target.name} has {room}"
    if target.processes > 1:
        text += f" for each of {target.processes} processes"
    key = "model.path" if isinstance(config, TRLConfig) else "models.sft"
    hint = "`rlhf plan` lists settings that save memory; or use a smaller model, or a larger machine"
    if runs_here:
        raise RLHFError("E03", text, where=config.where(key), hint=hint)
    terminal.warn("E03", text, where=config.where(key), hint=hint)
