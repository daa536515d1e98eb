"""Minimum quality of a reward model before PPO optimises it."""

from typing import Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from rlhf_cli.ppo.settings.base import Settings

PAGE = "[docs/rewards.md]"


class RewardRequirements(Settings):
    """Bounds on the report card of every reward model in rewards; omitted keys are not checked."""

    accuracy: float | None = Field(
        None, ge=0, le=1, description=f"Minimum accuracy on the evaluation pairs. Default: not checked. {PAGE}"
    )
    accuracy_low: float | None = Field(
        None,
        ge=0,
        le=1,
        description=(
            "Minimum lower bound of the 95 % confidence interval of the accuracy; above 0.5 it excludes guessing. "
            f"Default: not checked. {PAGE}"
        ),
    )
    ece: float | None = Field(
        None,
        ge=0,
        le=1,
        description=(
            "Maximum expected calibration error (Guo et al. 2017, arXiv 1706.04599, equation 3). Default: not "
            f"checked. {PAGE}"
        ),
    )
    length_correlation: float | None = Field(
        None,
        ge=0,
        le=1,
        description=f"Maximum absolute rank correlation of score and answer length. Default: not checked. {PAGE}",
    )

    @model_validator(mode="after")
    def _asks_something(self) -> Self:
        if not self.model_dump(exclude_none=True):
            hint = f"set one of {', '.join(type(self).model_fields)}, or remove it"
            raise PydanticCustomError("C17", "require_reward has no requirement", {"hint": hint})
        return self
