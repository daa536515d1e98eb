"""Config of reward.yaml."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeFloat, model_validator

from rlhf_cli.config.base import ModelPath
from rlhf_cli.config.machinery.section import AtLeastTwo, invalid
from rlhf_cli.config.sections import PairConfig, RewardModel, TrainerSettings

SAMPLING_BATCH_SIZE = 64  # answers that are sampled at a time for reward.normalize
MIN_DEBIAS_ANSWERS = 32  # of them tell the slope of score on length to 18 % of the scores' deviation

MEMBER_SEEDS = 1000  # between the members' seeds: runs of neighbouring seeds (rlhf run --seeds) have no model in common


class RewardSettings(TrainerSettings):
    """Reward modelling by TRL's RewardTrainer."""

    learning_rate: NonNegativeFloat = 1e-5
    keep: Literal["best", "last"] = "best"
    center_rewards_coefficient: NonNegativeFloat | None = 0.01
    normalize: Literal["none", "sft"] = "sft"
    normalize_samples: AtLeastTwo = 256
    length_debias: bool = False
    ensemble: AtLeastTwo | None = None

    @model_validator(mode="after")
    def _check_length_debias(self) -> Self:
        if not self.length_debias:
            return self
        if self.normalize == "none":
            text = "length_debias measures its slope on the answers of normalize: sft"
            raise invalid(text, "set normalize: sft, or remove length_debias", "length_debias")
        if self.normalize_samples < MIN_DEBIAS_ANSWERS:
            text = f"length_debias needs at least {MIN_DEBIAS_ANSWERS} answers, and normalize_samples is "
            text += str(self.normalize_samples)
            raise invalid(text, f"set normalize_samples: {MIN_DEBIAS_ANSWERS} or more", "normalize_samples")
        return self

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

    @model_validator(mode="after")
    def _check_ensemble(self) -> Self:
        if self.reward.ensemble and self.model.start:
            text = "reward.ensemble cannot be combined with model.start: its members would share one trained head"
            raise invalid(text, "remove one of them", "reward.ensemble")
        if self.reward.ensemble and self.reward.normalize == "none":
            text = "reward.ensemble combines scores, which have no common scale with normalize: none"
            raise invalid(text, "set normalize: sft", "reward.normalize")
        return self

    @property
    def other_members(self) -> list[Self]:
        """Return the configs of the members of reward.ensemble but the first, which is this run's own reward model.

        Member N is a separate stage in RUN/members/N, with the seed of this one plus MEMBER_SEEDS (N - 1).
        """
        alone = self.reward.model_copy(update={"ensemble": None})
        members = []
        for number in range(2, (self.reward.ensemble or 1) + 1):
            run = Path(self.run, "members", str(number))
            seed = (self.seed + MEMBER_SEEDS * (number - 1)) % 2**32
            members.append(self.model_copy(update={"run": str(run), "seed": seed, "reward": alone}))
        return members
