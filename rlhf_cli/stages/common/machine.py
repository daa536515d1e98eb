"""What this machine supports: warnings and errors before a stage, and the settings that have an effect here."""

from collections.abc import Mapping
from typing import Any

from rlhf_cli import distributed, system, terminal
from rlhf_cli.config.base import Config
from rlhf_cli.config.ppo import PPOConfig, PPOSettings
from rlhf_cli.models import compiled, devices, lora
from rlhf_cli.planning import fits
from rlhf_cli.runs.parents import Parent
from rlhf_cli.tracking import trackers


def check(config: Config, parents: Mapping[str, Parent], *, runs_here: bool = True) -> str:
    """Check that this machine can run a stage. Return the memory it needs at least as a line, "" if unknown.

    Warns E01, E02. Raises RLHFError as `fits.require_fits`, E03 if the output cannot be written, E06 if a tracker is
    not installed, E09 if the package of an extra is not.
    """
    devices.warn_unsupported(config)
    trackers.require(config)
    lora.require_bitsandbytes(config)
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
