"""The config class of each stage."""

from rlhf_cli.config.base import Config
from rlhf_cli.config.dpo import DPOConfig
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.reward import RewardConfig
from rlhf_cli.config.sections import LoRA, TrainerSettings
from rlhf_cli.config.sft import SFTConfig

TRLConfig = SFTConfig | RewardConfig | DPOConfig
CONFIGS: dict[str, type[Config]] = {
    "sft": SFTConfig, "reward": RewardConfig, "dpo": DPOConfig, "ppo": PPOConfig, "eval": EvalConfig,
}  # fmt: skip
MODES = ("full", "lora", "qlora")  # PPO's adapters share one base
AnyConfig = TRLConfig | PPOConfig | EvalConfig


def settings_of(config: TRLConfig) -> TrainerSettings:
    """Return the section `sft:`, `reward:` or `dpo:`."""
    settings: TrainerSettings = getattr(config, config.stage)
    return settings


def adapter_kind(config: Config) -> str | None:
    """Return the kind of adapters a stage trains, None if it trains full models."""
    adapters: LoRA | None = None
    if isinstance(config, TRLConfig):
        adapters = config.model.adapters
    elif isinstance(config, PPOConfig):
        adapters = config.models.adapters
    return adapters.kind if adapters else None


def mode_of(config: Config) -> str:
    """Return the mode of a config, one of MODES."""
    return adapter_kind(config) or "full"
