"""Hardware checks before training: dtypes, disk space, memory, and the packages of trackers and optimizers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rlhf_cli import distributed, runs, system, terminal, tracking
from rlhf_cli.config.base import Config
from rlhf_cli.config.common import LoRA
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.ppo_options import PPOSettings
from rlhf_cli.config.training import RewardConfig, SFTConfig
from rlhf_cli.errors import RLHFError, install_hint, shown
from rlhf_cli.models import build, devices, memory
from rlhf_cli.runs.parents import Parent

POLICY_KEYS = ("models.sft", "models.ppo", "models.base")
# Values of the `optim` keys and of adapters.kind that need bitsandbytes; the names are transformers'.
BITSANDBYTES = {
    "qlora", "adamw_8bit", "adamw_bnb_8bit", "ademamix", "ademamix_8bit", "lion_8bit", "lion_32bit",
    "paged_adamw_8bit", "paged_adamw_32bit", "paged_ademamix_8bit", "paged_ademamix_32bit", "paged_lion_8bit",
    "paged_lion_32bit", "rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit", "galore_adamw_8bit",
    "galore_adamw_8bit_layerwise",
}  # fmt: skip
HEADS = ("lm_head.", "score.")  # prefixes of parameters; a reward model has no lm_head


def is_scorer_key(key: str) -> bool:
    """Return True for keys of ppo.yaml and eval.yaml that name a one-label model: reward, value or judge."""
    return key not in POLICY_KEYS and not key.endswith(".pipeline")


def check(config: Config, parents: Mapping[str, Parent], *, runs_here: bool = True) -> str:
    """Check that this machine can run a stage. Return the memory it needs at least as a line, "" if unknown.

    Warns E01, E02. Raises RLHFError E03 if the output cannot be written, or disk or memory cannot hold the run, E06 if
    a tracker is not installed, E09 if the package of an extra is not.
    The estimate is a lower bound: it counts neither model.new nor input models that do not exist yet. Without
    `runs_here` too little memory is a warning, because the stage may be meant for a larger machine with the same disk.
    """
    _warn_unsupported(config)
    tracking.require(config)
    _require_bitsandbytes(config)
    system.require_writable(config.folder, where=config.where("run"), hint="set `run:` to another folder")
    trained, frozen = _count_trained_and_frozen(config, parents)
    if "optim" in getattr(config, "trainer", {}):  # TRL's other optimizers may take less
        return ""
    _check_disk(config, trained)
    needed = _bytes_in_dtype(config, memory.training_bytes(trained, frozen))
    _check_memory(config, trained, frozen, needed, runs_here=runs_here)
    contents = "weights, gradients and the optimizer" if trained else "the weights that the adapters use"
    text = f"memory: {system.format_bytes(needed)} of {system.format_bytes(devices.memory_bytes())} for {contents}"
    return f"{text}; `rlhf plan` counts the rest, and time" if needed else ""


def settings_for_this_machine(settings: PPOSettings) -> PPOSettings:
    """Return the settings without those this process does not support; `check` warns of them."""
    return supported_settings(
        settings, bf16=devices.supports_dtype("bfloat16"), gpu=not _on_cpu(), group=distributed.world_size() > 1
    )


def supported_settings(settings: PPOSettings, *, bf16: bool, gpu: bool, group: bool) -> PPOSettings:
    """Return the settings without those that need a missing bfloat16, GPU or process group."""
    supported = {"bf16": bf16, "offload": gpu, "fsdp": group}
    return settings.model_copy(update={key: getattr(settings, key) and ok for key, ok in supported.items()})


def _on_cpu() -> bool:
    return devices.device().type == "cpu"


def _warn_unsupported(config: Config) -> None:
    """Warn of settings that have no effect here (E01) or are slow (E02)."""
    section = "model" if config.stage in ("sft", "reward") else "models"
    dtypes = {f"{section}.dtype": getattr(config, section).dtype}
    if config.stage != "eval" and getattr(config, config.stage).bf16:
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
    if adapter_kind(config) == "qlora" and _on_cpu():
        text = f"weights in 4 bits work on {devices.device_name()}, but slowly"
        where = config.where("model.adapters.kind")
        terminal.warn("E02", text, where=where, hint="lora is faster if the weights fit in memory without quantization")


def _require_bitsandbytes(config: Config) -> None:
    """Raise RLHFError E09 if the config asks for 4 or 8 bits and bitsandbytes is not installed."""
    requested = {"model.adapters.kind": adapter_kind(config)}
    if isinstance(config, PPOConfig):
        requested["ppo.optim"] = config.ppo.optim
    elif isinstance(config, SFTConfig | RewardConfig) and "optim" in config.trainer:
        requested["trainer.optim"] = config.trainer["optim"]
    for key, value in requested.items():
        if value in BITSANDBYTES and find_spec("bitsandbytes") is None:
            text = f"{key}: {value} needs bitsandbytes, which is not installed"
            raise RLHFError("E09", text, where=config.where(key), hint=install_hint("qlora"))


def adapter_kind(config: Config) -> str | None:
    """Return the kind of adapters a stage trains, None if it trains full models."""
    adapters: LoRA | None = None
    if isinstance(config, SFTConfig | RewardConfig):
        adapters = config.model.adapters
    elif isinstance(config, PPOConfig):
        adapters = config.models.adapters
    return adapters.kind if adapters else None


def _check_disk(config: Config, trained: int) -> None:
    """Raise RLHFError E03 if the disk cannot hold the checkpoints: those kept and one being written, minus existing."""
    existing = len(runs.state_steps(config.folder / "state"))
    count = max(1, config.output.keep + 1 - existing)
    checkpoint_bytes = _bytes_in_dtype(config, memory.CHECKPOINT_BYTES * trained)
    free = system.free_disk_bytes(config.folder)
    if free is not None and count * checkpoint_bytes > free:
        needed = system.format_bytes(count * checkpoint_bytes)
        text = f"{count} checkpoints of {system.format_bytes(checkpoint_bytes)} need at least {needed}; "
        text += f"{system.format_bytes(free)} are free"
        hint = "free disk space, or set `run:` to a folder on another disk; output.keep is the number of checkpoints"
        raise RLHFError("E03", text, where=shown(config.folder), hint=hint)


def _check_memory(config: Config, trained: int, frozen: int, needed: int, *, runs_here: bool) -> None:
    sharing = distributed.local_world_size() if _on_cpu() else 1  # each process holds all models
    device, available = devices.device_name(), devices.memory_bytes() // sharing
    if needed > available:
        counts = f"{trained:,} trained" + (f" and {frozen:,} frozen" if frozen else "") + " parameters"
        room = system.format_bytes(available)
        text = f"{counts} need at least {system.format_bytes(needed)} of memory, {device} has {room}"
        text += f" for each of {sharing} processes" if sharing > 1 else ""
        key = "model.path" if config.stage in ("sft", "reward") else "models.sft"
        hint = "use a smaller model, or a larger machine"
        if runs_here:
            raise RLHFError("E03", text, where=config.where(key), hint=hint)
        terminal.warn("E03", text, where=config.where(key), hint=hint)


def _bytes_in_dtype(config: Any, float32_bytes: int) -> int:
    """Convert a size in float32 to the dtype of the config's weights."""
    dtype = (config.model if config.stage in ("sft", "reward") else config.models).dtype
    halved = dtype not in ("auto", "float32") and devices.supports_dtype(dtype)
    return float32_bytes // 2 if halved else float32_bytes


@dataclass(frozen=True)
class ModelUse:
    """A model that a stage keeps in memory: its role, the key that names it, and if it is trained."""

    role: str
    key: str
    trained: bool


def models_in_memory(config: Config) -> list[ModelUse]:
    """Return the models a stage keeps in memory at the same time; frozen models are loaded once per folder.

    In an evaluation `models.ppo` stands for itself and models.base, which are loaded one after the other.
    """
    folders = {reference.key: reference.path for reference in runs.references(config)}
    if isinstance(config, SFTConfig | RewardConfig):
        return [ModelUse("policy" if config.stage == "sft" else "reward", "model.path", trained=True)]
    if isinstance(config, EvalConfig):
        policies = [ModelUse("policy", key, trained=False) for key in ("models.sft", "models.ppo")]
        return policies + [ModelUse("judge", key, trained=False) for key in folders if key not in POLICY_KEYS]
    assert isinstance(config, PPOConfig)
    models = [ModelUse("policy", "models.sft", trained=True), ModelUse("reference", "models.sft", trained=False)]
    if config.models.value != "policy_head":
        key = "models.reward" if config.models.value == "reward" else "models.value"
        models.append(ModelUse("value", key, trained=True))
    scorers = {path: key for key, path in reversed(folders.items()) if is_scorer_key(key) and key != "models.value"}
    return models + [ModelUse("reward", key, trained=False) for key in reversed(scorers.values())]


def _count_trained_and_frozen(config: Config, parents: Mapping[str, Parent]) -> tuple[int, int]:
    """Return the trained and frozen parameters of the existing models, without their heads."""
    by_folder = {parent.model: count_parameters(parent) for parent in parents.values()}
    by_key = {key: by_folder[parent.model] for key, parent in parents.items()}
    partly_shared = isinstance(config, PPOConfig) and config.ppo.num_shared_layers  # trained share unknown
    adapters = adapter_kind(config)  # their own size is not counted; 4-bit weights are loaded in full at the end
    if isinstance(config, PPOConfig) and adapters:
        return 0, sum(by_folder[folder] for folder in full_weight_folders(config, parents))
    trained = frozen = 0
    for use in models_in_memory(config):
        if partly_shared and use.role == "policy":
            continue
        count = by_key.get(use.key, 0)
        if use.trained and not adapters:
            trained += count
        else:
            frozen += count
    return trained, frozen


def full_weight_folders(config: PPOConfig, parents: Mapping[str, Parent]) -> set[Path]:
    """Return the folders of models whose full weights PPO with adapters loads: all but adapters of models.sft."""
    sft = parents.get("models.sft")
    used = [parents[use.key] for use in models_in_memory(config) if use.key in parents]
    return {parent.model for parent in used if parent is sft or not (sft and runs.is_adapter_of(parent, sft))}


def count_parameters(parent: Parent, *, heads: bool = False) -> int:
    """Return the number of parameters in the headers of a model's safetensors files; of an adapter, its base's."""
    if parent.base:
        return count_parameters(parent.base, heads=heads)
    return sum(_count_in_file(path, () if heads else HEADS) for path in build.weight_files(parent.model))


def _count_in_file(path: Path, uncounted: tuple[str, ...]) -> int:
    try:
        with safe_open(path, "pt") as file:
            names = [name for name in file.keys() if not name.startswith(uncounted)]  # noqa: SIM118
            counted = [name for name in names if not name.endswith(build.BUFFERS)]
            return sum(math.prod(file.get_slice(name).get_shape()) for name in counted)
    except (OSError, SafetensorError):
        return 0  # corrupt: loading it reports the error
