"""The config class of each stage."""

from rlhf_cli.config.base import Config
from rlhf_cli.config.dpo import DPOConfig
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.reward import RewardConfig
from rlhf_cli.config.sections import TrainerSettings
from rlhf_cli.config.sft import SFTConfig

TRLConfig = SFTConfig | RewardConfig | DPOConfig
CONFIGS: dict[str, type[Config]] = {
    "sft": SFTConfig, "reward": RewardConfig, "dpo": DPOConfig, "ppo": PPOConfig, "eval": EvalConfig,
}  # fmt: skip
AnyConfig = TRLConfig | PPOConfig | EvalConfig


def settings_of(config: TRLConfig) -> TrainerSettings:
    """Return the section `sft:`, `reward:` or `dpo:`."""
    settings: TrainerSettings = getattr(config, config.stage)
    return settings
