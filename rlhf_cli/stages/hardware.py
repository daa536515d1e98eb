"""What a config asks of this machine, before anything is trained: number formats, a writable disk, room, memory,
trackers."""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlhf_cli import distributed, runs, system, terminal, tracking
from rlhf_cli.config.adapters import LoRA
from rlhf_cli.config.base import Config
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.ppo_options import PPOSettings
from rlhf_cli.config.training import RewardConfig, SFTConfig
from rlhf_cli.errors import RLHFError, install_hint, shown
from rlhf_cli.models import devices, weights
from rlhf_cli.runs.parents import Parent

# Bytes for each number that is trained, in float32: the weight and AdamW's two averages in a state, and the gradient.
STATE, MEMORY, WEIGHT = 12, 16, 4
POLICIES = ("models.sft", "models.ppo", "models.base")
# Of the two `optim` and adapters.kind, what bitsandbytes does; the names are transformers'.
BITSANDBYTES = {
    "qlora", "adamw_8bit", "adamw_bnb_8bit", "ademamix", "ademamix_8bit", "lion_8bit", "lion_32bit",
    "paged_adamw_8bit", "paged_adamw_32bit", "paged_ademamix_8bit", "paged_ademamix_32bit", "paged_lion_8bit",
    "paged_lion_32bit", "rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit", "galore_adamw_8bit",
    "galore_adamw_8bit_layerwise",
}  # fmt: skip
NOT_COUNTED = ("__metadata__", "lm_head.", "score.")  # a reward model has no lm_head


def is_scorer(key: str) -> bool:
    """Whether a key of ppo.yaml or eval.yaml names a model with one label: a reward model, a value model or a judge."""
    return key not in POLICIES and not key.endswith(".pipeline")


def check(config: Config, parents: Mapping[str, Parent], *, runs_here: bool = True) -> str:
    """What a training takes of the memory at least, in a line; "" where that is not known.

    Warns E01, E02. Raises RLHFError E03 where the output cannot be written, or disk or memory cannot hold the run, E06
    where a tracker is not installed, E09 where the package of an extra is not.
    A lower bound: what does not fit cannot work. Parents that are not there yet, and model.new, are not counted.
    Without `runs_here` too little memory is a warning: the stage may be meant for a larger machine, on the same disk.
    """
    _warn_of_formats(config)
    tracking.require(config)
    _require_bits(config)
    system.require_writable(config.folder, where=config.where("run"), hint="set `run:` to another folder")
    trained, frozen = _counts(config, parents)
    if "optim" in getattr(config, "trainer", {}):  # TRL's other optimizers may take less
        return ""
    _check_disk(config, trained)
    needed = _scaled(config, MEMORY * trained + WEIGHT * frozen)
    _check_memory(config, trained, frozen, needed, runs_here=runs_here)
    what = "weights, gradients and the optimizer" if trained else "the weights that adapters stand beside"
    text = f"memory: {system.format_bytes(needed)} of {system.format_bytes(devices.memory_bytes())} for {what}"
    return f"{text}; `rlhf plan` counts the rest, and time" if needed else ""


def usable_here(settings: PPOSettings) -> PPOSettings:
    """`usable` in this process; what is not is said by `check`."""
    return usable(
        settings, bf16=devices.supports_dtype("bfloat16"), gpu=not _on_cpu(), group=distributed.world_size() > 1
    )


def usable(settings: PPOSettings, *, bf16: bool, gpu: bool, group: bool) -> PPOSettings:
    """The settings that a machine can follow: one that has bfloat16, a GPU, several processes, or lacks them."""
    possible = {"bf16": bf16, "offload": gpu, "fsdp": group}
    return settings.model_copy(update={key: getattr(settings, key) and can for key, can in possible.items()})


def _on_cpu() -> bool:
    return devices.device().type == "cpu"


def _warn_of_formats(config: Any) -> None:
    section = "model" if config.stage in ("sft", "reward") else "models"
    wishes = {f"{section}.dtype": getattr(config, section).dtype}
    if config.stage != "eval" and getattr(config, config.stage).bf16:
        wishes[f"{config.stage}.bf16"] = "bfloat16"
    for key, name in wishes.items():
        if name != "auto" and not devices.supports_dtype(name):
            text = f"{name} does not work on {devices.device_name()}, float32 is used"
            terminal.warn("E01", text, where=config.where(key), hint=f"leave {key} out")
    if isinstance(config, PPOConfig) and config.ppo.offload and _on_cpu():
        text = "offload sends models from a GPU into the CPU's memory, where they are here: nothing is done for it"
        terminal.warn("E01", text, where=config.where("ppo.offload"), hint="leave ppo.offload out")
    if isinstance(config, PPOConfig) and config.ppo.fsdp and distributed.world_size() == 1:
        text = "fsdp cuts models up over several processes, and this is one: nothing is done for it"
        terminal.warn("E01", text, where=config.where("ppo.fsdp"), hint="start several: --nproc N")
    if adapters_of(config) == "qlora" and _on_cpu():
        text = f"weights in 4 bits work on {devices.device_name()}, but slowly"
        where = config.where("model.adapters.kind")
        terminal.warn("E02", text, where=where, hint="lora is faster where the weights fit the memory as they are")


def _require_bits(config: Any) -> None:
    """Raises RLHFError E09 where 4 or 8 bits are asked for, and bitsandbytes is not installed."""
    asked = {"model.adapters.kind": adapters_of(config)}
    if isinstance(config, PPOConfig):
        asked["ppo.optim"] = config.ppo.optim
    elif "optim" in getattr(config, "trainer", {}):
        asked["trainer.optim"] = config.trainer["optim"]
    for key, value in asked.items():
        if value in BITSANDBYTES and find_spec("bitsandbytes") is None:
            text = f"{key}: {value} needs bitsandbytes, which is not installed"
            raise RLHFError("E09", text, where=config.where(key), hint=install_hint("qlora"))


def adapters_of(config: Config) -> str | None:
    """The kind of adapters that a stage trains; None where whole models are trained."""
    ours: LoRA | None = None
    if isinstance(config, SFTConfig | RewardConfig):
        ours = config.model.adapters
    elif isinstance(config, PPOConfig):
        ours = config.models.adapters
    return ours.kind if ours else None


def _check_disk(config: Config, trained: int) -> None:
    """The states that are kept and the one that is being written, less those that are there."""
    there = len(runs.state_steps(config.folder / "state"))
    states, one = max(1, config.output.keep + 1 - there), _scaled(config, STATE * trained)
    free = system.free_disk_bytes(config.folder)
    if free is not None and states * one > free:
        needed, available = system.format_bytes(states * one), system.format_bytes(free)
        text = f"{states} states of {system.format_bytes(one)} need {needed} at least, {available} are free"
        hint = "make room there, or set `run:` to a folder on another disk; output.keep says how many states are kept"
        raise RLHFError("E03", text, where=shown(config.folder), hint=hint)


def _check_memory(config: Config, trained: int, frozen: int, needed: int, *, runs_here: bool) -> None:
    sharing = distributed.local_world_size() if _on_cpu() else 1  # each has all of the models
    device, there = devices.device_name(), devices.memory_bytes() // sharing
    if needed > there:
        what = f"{trained:,} numbers that are trained" + (f" and {frozen:,} that are not" if frozen else "")
        text = (
            f"{what} need {system.format_bytes(needed)} of memory at least, {device} has {system.format_bytes(there)}"
        )
        text += f" for each of {sharing} processes" if sharing > 1 else ""
        key = "model.path" if config.stage in ("sft", "reward") else "models.sft"
        hint = "use a smaller model, or a larger machine"
        if runs_here:
            raise RLHFError("E03", text, where=config.where(key), hint=hint)
        terminal.warn("E03", text, where=config.where(key), hint=hint)


def _scaled(config: Any, count: int) -> int:
    """Bytes in the format of the weights, of those that float32 would take."""
    dtype = (config.model if config.stage in ("sft", "reward") else config.models).dtype
    return count if dtype in ("auto", "float32") or not devices.supports_dtype(dtype) else count // 2


@dataclass(frozen=True)
class Use:
    """A model that a stage holds in memory: what for, the key that names it, and whether it is trained."""

    role: str
    key: str
    trained: bool


def uses(config: Config) -> list[Use]:
    """The models of a stage, those that are there at one time. What is only read is loaded once a folder.

    In an evaluation `models.ppo` stands for itself and models.base, which are there one after the other.
    """
    named = {reference.key: reference.path for reference in runs.references(config)}
    if isinstance(config, SFTConfig | RewardConfig):
        return [Use("policy" if config.stage == "sft" else "reward", "model.path", trained=True)]
    if isinstance(config, EvalConfig):
        policies = [Use("policy", key, trained=False) for key in ("models.sft", "models.ppo")]
        return policies + [Use("judge", key, trained=False) for key in named if key not in POLICIES]
    assert isinstance(config, PPOConfig)
    found = [Use("policy", "models.sft", trained=True), Use("reference", "models.sft", trained=False)]
    if config.models.value != "policy_head":
        key = "models.reward" if config.models.value == "reward" else "models.value"
        found.append(Use("value", key, trained=True))
    read = {path: key for key, path in reversed(named.items()) if is_scorer(key) and key != "models.value"}
    return found + [Use("reward", key, trained=False) for key in reversed(read.values())]


def _counts(config: Config, parents: Mapping[str, Parent]) -> tuple[int, int]:
    """(trained, frozen) numbers of the models that are there, their heads left out."""
    folders = {parent.model: numbers(parent) for parent in parents.values()}
    sizes = {key: folders[parent.model] for key, parent in parents.items()}
    shared = isinstance(config, PPOConfig) and config.ppo.num_shared_layers  # how much of the policy learns is unknown
    adapters = adapters_of(config)  # how large they get is not counted; weights in 4 bits are read whole at the end
    counts = [0, 0]
    if isinstance(config, PPOConfig) and adapters:
        return 0, sum(folders[folder] for folder in bodies(config, parents))
    for use in uses(config):
        learns = use.trained and not adapters and not (shared and use.role == "policy")
        counts[not learns] += 0 if shared and use.role == "policy" else sizes.get(use.key, 0)
    return counts[0], counts[1]


def bodies(config: PPOConfig, parents: Mapping[str, Parent]) -> set[Path]:
    """The models, by folder, whose weights PPO with adapters holds, once each: what is no adapter of models.sft's."""
    sft = parents.get("models.sft")
    found = [parents[use.key] for use in uses(config) if use.key in parents]
    return {parent.model for parent in found if parent is sft or not (sft and runs.is_adapter_of(parent, sft))}


def numbers(parent: Parent) -> int:
    """Numbers in the safetensors files that are loaded of a model, by their headers: one file, else the index's.

    Of an adapter those of its base, into which it is added.
    """
    if parent.base:
        return numbers(parent.base)
    return sum(map(_in_file, weights.weight_files(parent.model)))


def _in_file(path: Path) -> int:
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, 100_000_000)))
        counted = [name for name in header if not name.startswith(NOT_COUNTED) and not name.endswith(weights.BUFFERS)]
        return sum(math.prod(header[name]["shape"]) for name in counted)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        return 0  # damaged, which loading it tells
