"""What this machine supports: warnings and errors before a stage, and the settings that have an effect here."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from rlhf_cli import distributed, system, terminal
from rlhf_cli.config.base import Config
from rlhf_cli.config.ppo import PPOConfig, PPOSettings
from rlhf_cli.config.stages import TRLConfig, adapter_kind
from rlhf_cli.errors import RLHFError, install_hint
from rlhf_cli.models import compiled, devices
from rlhf_cli.planning import fits
from rlhf_cli.runs.parents import Parent
from rlhf_cli.tracking import trackers

# Values of the `optim` keys and of adapters.kind that need bitsandbytes; the names are transformers'.
BITSANDBYTES = {
    "qlora", "adamw_8bit", "adamw_bnb_8bit", "ademamix", "ademamix_8bit", "lion_8bit", "lion_32bit",
    "paged_adamw_8bit", "paged_adamw_32bit", "paged_ademamix_8bit", "paged_ademamix_32bit", "paged_lion_8bit",
    "paged_lion_32bit", "rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit", "galore_adamw_8bit",
    "galore_adamw_8bit_layerwise",
}  # fmt: skip


def check(config: Config, parents: Mapping[str, Parent], *, runs_here: bool = True) -> str:
    """Check that this machine can run a stage. Return the memory it needs at least as a line, "" if unknown.

    Warns E01, E02. Raises RLHFError as `fits.require_fits`, E03 if the output cannot be written, E06 if a tracker is
    not installed, E09 if the package of an extra is not.
    """
    _warn_unsupported(config)
    trackers.require(config)
    _require_bitsandbytes(config)
    system.require_writable(config.folder, where=config.where("run"), hint="set `run:` to another folder")
    return fits.require_fits(config, parents, runs_here=runs_here)


def settings_for_this_machine(settings: PPOSettings) -> PPOSettings:
    """Return the settings without those this process does not support; `check` warns of them."""
    return settings.usable(
        gpu=devices.device().type == "cuda", processes=distributed.world_size(), bf16=devices.use_bf16(settings.bf16)
    )


def compiles(config: PPOConfig, policy: Any) -> bool:
    """Return True if PPO's models run compiled (`models.compile`)."""
    if not compiled.is_wanted(config, sum(weight.numel() for weight in policy.parameters())):
        return False
    device = devices.device()
    if config.models.compile != "auto":
        return True
    if not compiled.is_supported(device):
        return False
    if problem := compiled.compiler_problem(device):
        terminal.say(f"ppo      layers run as they are, not compiled: {problem}")
        return False
    return True


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
