"""Config of reward.yaml."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeFloat, model_validator

from rlhf_cli.config.base import ModelPath
from rlhf_cli.config.machinery.section import AtLeastTwo, invalid
from rlhf_cli.config.sections import PairConfig, RewardModel, TrainerSettings

SAMPLING_BATCH_SIZE = 64  # answers that are sampled at a time for reward.normalize


class RewardSettings(TrainerSettings):
    """Reward modelling by TRL's RewardTrainer."""

    learning_rate: NonNegativeFloat = 1e-5
    center_rewards_coefficient: NonNegativeFloat | None = 0.01
    normalize: Literal["none", "sft"] = "sft"
    normalize_samples: AtLeastTwo = 256
    ensemble: AtLeastTwo | None = None


class RoundRewardModel(RewardModel):
    """Initial model of reward training: the SFT model, or in a further round a reward model."""

    start: ModelPath | None = None


class RewardConfig(PairConfig):
    """reward.yaml: reward modelling."""

    stage: Literal["reward"] = "reward"
    model: RoundRewardModel = Field(default_factory=RoundRewardModel)
    reward: RewardSettings = Field(default_factory=RewardSettings)
    trainer: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_ensemble(self) -> Self:
        if self.reward.ensemble and self.model.start:
            text = "reward.ensemble cannot be combined with model.start: its members would share one trained head"
            raise invalid(text, "remove one of them", "reward.ensemble")
        return self

    @property
    def other_members(self) -> list[Self]:
        """Return the configs of the members of reward.ensemble but the first, which is this run's own reward model.

        Member N is a separate stage in RUN/members/N, with the seed of this one plus N - 1.
        """
        alone = self.reward.model_copy(update={"ensemble": None})
        members = []
        for number in range(2, (self.reward.ensemble or 1) + 1):
            run = Path(self.run, "members", str(number))
            seed = (self.seed + number - 1) % 2**32
            members.append(self.model_copy(update={"run": str(run), "seed": seed, "reward": alone}))
        return members
