"""Hardware checks before training: dtypes, disk space, memory, and the packages of trackers and optimizers."""

import math
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rlhf_cli import distributed, runs, system, terminal
from rlhf_cli.config.base import Config
from rlhf_cli.config.ppo import PPOConfig, PPOSettings
from rlhf_cli.config.stages import TRLConfig
from rlhf_cli.errors import RLHFError, install_hint, shown
from rlhf_cli.models import compiled, devices, load, weight_files
from rlhf_cli.planning.memory import Lengths
from rlhf_cli.planning.stage_models import (
    ADAMW_8BIT_NAMES,
    FixedMemory,
    Target,
    adapter_kind,
    fixed_memory,
    mode_of,
    models_in_memory,
    ppo_plan,
)
from rlhf_cli.runs.parents import Parent
from rlhf_cli.tracking import trackers

# Values of the `optim` keys and of adapters.kind that need bitsandbytes; the names are transformers'.
BITSANDBYTES = {
    "qlora", "adamw_8bit", "adamw_bnb_8bit", "ademamix", "ademamix_8bit", "lion_8bit", "lion_32bit",
    "paged_adamw_8bit", "paged_adamw_32bit", "paged_ademamix_8bit", "paged_ademamix_32bit", "paged_lion_8bit",
    "paged_lion_32bit", "rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit", "galore_adamw_8bit",
    "galore_adamw_8bit_layerwise",
}  # fmt: skip
MIN_COMPILED_PARAMETERS = 100_000_000  # of `models.compile: auto`: smaller models save less time than compiling takes
HEADS = ("lm_head.", "score.")  # prefixes of parameters; a reward model has no lm_head


def check(config: Config, parents: Mapping[str, Parent], *, runs_here: bool = True) -> str:
    """Check that this machine can run a stage. Return the memory it needs at least as a line, "" if unknown.

    Warns E01, E02. Raises RLHFError E03 if the output cannot be written, or disk or memory cannot hold the run, E06 if
    a tracker is not installed, E09 if the package of an extra is not.
    The estimate is a lower bound: it counts neither model.new nor input models that do not exist yet. Without
    `runs_here` too little memory is a warning, because the stage may be meant for a larger machine with the same disk.
    """
    _warn_unsupported(config)
    trackers.require(config)
    _require_bitsandbytes(config)
    system.require_writable(config.folder, where=config.where("run"), hint="set `run:` to another folder")
    trainer = getattr(config, "trainer", {})
    if "optim" in trainer and trainer["optim"] not in ADAMW_8BIT_NAMES:  # TRL's other optimizers may take less
        return ""
    target = Target.of(None, distributed.world_size(), sharing=distributed.local_world_size())
    fixed = _fixed_memory(config, parents, target)
    _check_disk(config, round(fixed.checkpoint))
    _check_memory(config, fixed, target, runs_here=runs_here)
    if not fixed.total:
        return ""
    text = f"memory: {system.format_bytes(fixed.total)} of {system.format_bytes(target.memory)} for {_kinds(fixed)}"
    return f"{text}; `rlhf plan` counts the rest, and time"


def _fixed_memory(config: Config, parents: Mapping[str, Parent], target: Target) -> FixedMemory:
    """Return what the existing models need; nothing if one cannot be read: loading reports the error."""
    try:
        return fixed_memory(config, *_bodies(config, parents), target)
    except (RLHFError, ValueError):
        return FixedMemory({}, 0)


def _bodies(config: Config, parents: Mapping[str, Parent]) -> tuple[dict[str, Any], set[str]]:
    """Return the configs of the existing models by key, and the keys of those that are no adapters of models.sft."""
    keys = {use.key for use in models_in_memory(config)} & parents.keys()
    sft = parents.get("models.sft")
    separate = {key for key in keys if not (sft and runs.is_adapter_of(parents[key], sft))}
    return {key: load.read_config(parents[key].model) for key in keys}, separate


def rollout_rows(
    config: PPOConfig, parents: Mapping[str, Parent], prompt_length: int, episodes: int, target: Target
) -> int | None:
    """Return how many of a process's `episodes` fit in the target's memory at a time; None if a model is unknown."""
    try:
        bodies, separate = _bodies(config, parents)
        lengths = Lengths(prompt_length, config.ppo.max_response_length)
        return ppo_plan(config, bodies, mode_of(config), target, separate, lengths)[1].rollout_rows(episodes)
    except (RLHFError, ValueError):
        return None


def _kinds(fixed: FixedMemory) -> str:
    *kinds, last = [kind for kind, size in fixed.kinds.items() if size]
    return f"{', '.join(kinds)} and {last}" if kinds else last


def settings_for_this_machine(settings: PPOSettings) -> PPOSettings:
    """Return the settings without those this process does not support; `check` warns of them."""
    return Target.of(None, distributed.world_size()).usable(settings)


def compiles(config: PPOConfig, policy: Any) -> bool:
    """Return True if PPO's models run compiled (`models.compile`). `auto`: not with shards or a 4-bit base."""
    if config.models.compile != "auto":
        return config.models.compile
    device = devices.device()
    if config.ppo.fsdp or adapter_kind(config) == "qlora" or not compiled.is_supported(device):
        return False
    if sum(weight.numel() for weight in policy.parameters()) < MIN_COMPILED_PARAMETERS:
        return False
    if problem := compiled.compiler_problem(device):
        terminal.say(f"ppo      layers run as they are, not compiled: {problem}")
    return not problem


def _on_cpu() -> bool:
    return devices.device().type == "cpu"


def _warn_unsupported(config: Config) -> None:
    """Warn of settings that have no effect here (E01) or are slow (E02)."""
    section = "model" if isinstance(config, TRLConfig) else "models"
    dtypes = {f"{section}.dtype": getattr(config, section).dtype}
    if getattr(config, config.stage).bf16:
        dtypes[f"{config.stage}.bf16"] = "bfloat16"
    for key, dtype in dtypes.items():
        if dtype != "auto" and not devices.supports_dtype(dtype):
            text = f"{dtype} does not work on {devices.device_name()}, float32 is used"
            terminal.warn("E01", text, where=config.where(key), hint=f"leave {key} out")
    if isinstance(config, PPOConfig) and config.ppo.offload and _on_cpu():
        text = "offload moves models from a GPU to CPU memory, and this machine has no GPU: it has no effect"
        terminal.warn("E01", text, where=config.where("ppo.offload"), hint="leave ppo.offload out")
    if isinstance(config, PPOConfig) and config.ppo.fsdp and distributed.world_size() == 1:
        text = "fsdp shards models over several processes, and this is one process: it has no effect"
        terminal.warn("E01", text, where=config.where("ppo.fsdp"), hint="start several: --nproc N")
    elif isinstance(config, PPOConfig) and config.ppo.fsdp == "hybrid" and distributed.num_machines() == 1:
        text = f"fsdp: hybrid replicates models over machines, and all {distributed.world_size()} processes are on one"
        hint = "ppo.fsdp: true is the same; a launcher for several machines sets LOCAL_WORLD_SIZE"
        terminal.warn("E01", text, where=config.where("ppo.fsdp"), hint=hint)
    if adapter_kind(config) == "qlora" and _on_cpu():
        text = f"weights in 4 bits work on {devices.device_name()}, but slowly"
        where = config.where(f"{section}.adapters.kind")
        terminal.warn("E02", text, where=where, hint="lora is faster if the weights fit in memory without quantization")


def _require_bitsandbytes(config: Config) -> None:
    """Raise RLHFError E09 if the config asks for 4 or 8 bits and bitsandbytes is not installed."""
    section = "models" if isinstance(config, PPOConfig) else "model"
    requested = {f"{section}.adapters.kind": adapter_kind(config)}
    if isinstance(config, PPOConfig):
        requested["ppo.optim"] = config.ppo.optim
    elif isinstance(config, TRLConfig) and "optim" in config.trainer:
        requested["trainer.optim"] = config.trainer["optim"]
    for key, value in requested.items():
        if value in BITSANDBYTES and find_spec("bitsandbytes") is None:
            text = f"{key}: {value} needs bitsandbytes, which is not installed"
            raise RLHFError("E09", text, where=config.where(key), hint=install_hint("qlora"))


def _check_disk(config: Config, checkpoint: int) -> None:
    """Raise RLHFError E03 if the disk cannot hold the checkpoints: those kept and one being written, minus existing."""
    count = max(1, config.output.keep + 1 - len(runs.state_steps(config.folder / "state")))
    free = system.free_disk_bytes(config.folder)
    if free is not None and count * checkpoint > free:
        text = (
            f"{count} checkpoints of {system.format_bytes(checkpoint)} need {system.format_bytes(count * checkpoint)}; "
        )
        text += f"{system.format_bytes(free)} are free"
        hint = "free disk space, or set `run:` to a folder on another disk; output.keep is the number of checkpoints"
        raise RLHFError("E03", text, where=shown(config.folder), hint=hint)


def _check_memory(config: Config, fixed: FixedMemory, target: Target, *, runs_here: bool) -> None:
    if fixed.total > target.memory:
        text = f"{_kinds(fixed)} need {system.format_bytes(fixed.total)} of memory, {target.name} has "
        text += system.format_bytes(target.memory)
        text += f" for each of {target.processes} processes" if target.processes > 1 else ""
        key = "model.path" if isinstance(config, TRLConfig) else "models.sft"
        hint = "`rlhf plan` lists settings that save memory; or use a smaller model, or a larger machine"
        if runs_here:
            raise RLHFError("E03", text, where=config.where(key), hint=hint)
        terminal.warn("E03", text, where=config.where(key), hint=hint)


def count_parameters(parent: Parent, *, heads: bool = False) -> int:
    """Return the number of parameters in the headers of a model's safetensors files; of an adapter, its base's."""
    if parent.base:
        return count_parameters(parent.base, heads=heads)
    return sum(_count_in_file(path, () if heads else HEADS) for path in weight_files.weight_files(parent.model))


def _count_in_file(path: Path, uncounted: tuple[str, ...]) -> int:
    try:
        with safe_open(path, "pt") as file:
            names = [name for name in file.keys() if not name.startswith(uncounted)]  # noqa: SIM118
            counted = [name for name in names if not name.endswith(weight_files.BUFFERS)]
            return sum(math.prod(file.get_slice(name).get_shape()) for name in counted)
    except (OSError, SafetensorError):
        return 0  # corrupt: loading it reports the error
