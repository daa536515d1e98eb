"""Config of reward.yaml."""

from typing import Any, Literal

from pydantic import Field

from rlhf_cli.config.sections import PairConfig, TrainerSettings

SAMPLING_BATCH_SIZE = 64  # answers that are sampled at a time for reward.normalize


class RewardSettings(TrainerSettings):
    """Reward modelling by TRL's RewardTrainer."""

    learning_rate: float = Field(1e-5, ge=0)
    center_rewards_coefficient: float | None = Field(0.01, ge=0)
    normalize: Literal["none", "sft"] = "sft"
    normalize_samples: int = Field(256, ge=2)


class RewardConfig(PairConfig):
    """reward.yaml: reward modelling."""

    stage: Literal["reward"] = "reward"
    reward: RewardSettings = Field(default_factory=RewardSettings)
    trainer: dict[str, Any] = Field(default_factory=dict)
