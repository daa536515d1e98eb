"""Config of reward.yaml."""

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat

from rlhf_cli.config.base import ModelPath
from rlhf_cli.config.machinery.section import AtLeastTwo
from rlhf_cli.config.sections import PairConfig, RewardModel, TrainerSettings

SAMPLING_BATCH_SIZE = 64  # answers that are sampled at a time for reward.normalize


class RewardSettings(TrainerSettings):
    """Reward modelling by TRL's RewardTrainer."""

    learning_rate: NonNegativeFloat = 1e-5
    keep: Literal["best", "last"] = "best"
    center_rewards_coefficient: NonNegativeFloat | None = 0.01
    normalize: Literal["none", "sft"] = "sft"
    normalize_samples: AtLeastTwo = 256

    @property
    def keeps_another_checkpoint(self) -> bool:
        """True if the best step's checkpoint may stay beside the newest: of several evaluations, as far as is known."""
        several = self.num_train_epochs > 1 or self.eval_steps is not None
        return self.keep == "best" and several


class RoundRewardModel(RewardModel):
    """Initial model of reward training: the SFT model, or in a further round a reward model."""

    start: ModelPath | None = None


class RewardConfig(PairConfig):
    """reward.yaml: reward modelling."""

    stage: Literal["reward"] = "reward"
    model: RoundRewardModel = Field(default_factory=RoundRewardModel)
    reward: RewardSettings = Field(default_factory=RewardSettings)
    trainer: dict[str, Any] = Field(default_factory=dict)
