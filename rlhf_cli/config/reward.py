"""Config of reward.yaml."""

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat

from rlhf_cli.config.machinery.section import AtLeastTwo
from rlhf_cli.config.sections import PairConfig, TrainerSettings

SAMPLING_BATCH_SIZE = 64  # answers that are sampled at a time for reward.normalize


class RewardSettings(TrainerSettings):
    """Reward modelling by TRL's RewardTrainer."""

    learning_rate: NonNegativeFloat = 1e-5
    center_rewards_coefficient: NonNegativeFloat | None = 0.01
    normalize: Literal["none", "sft"] = "sft"
    normalize_samples: AtLeastTwo = 256


class RewardConfig(PairConfig):
    """reward.yaml: reward modelling."""

    stage: Literal["reward"] = "reward"
    reward: RewardSettings = Field(default_factory=RewardSettings)
    trainer: dict[str, Any] = Field(default_factory=dict)
