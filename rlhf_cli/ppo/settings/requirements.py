"""What a reward model must be worth before PPO optimises it."""

from typing import Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from rlhf_cli.ppo.settings.base import Settings

TEST = "[`pytest tests/test_require_reward.py`]"


class RewardRequirements(Settings):
    """Bounds on the report card of every reward model among the rewards; a key that is left out asks nothing."""

    accuracy: float | None = Field(
        None, ge=0, le=1, description=f"Least share of the evaluation pairs that the reward model gets right. {TEST}"
    )
    accuracy_low: float | None = Field(
        None,
        ge=0,
        le=1,
        description=f"Least lower end of that share's 95 % interval; above 0.5 it is no guessing. {TEST}",
    )
    ece: float | None = Field(
        None,
        ge=0,
        le=1,
        description=f"Largest calibration error (Guo et al. 2017, arXiv 1706.04599, equation 3). {TEST}",
    )
    length_correlation: float | None = Field(
        None,
        ge=0,
        le=1,
        description=f"Largest rank correlation, without its sign, of the score with the answer's length. {TEST}",
    )

    @model_validator(mode="after")
    def _asks_something(self) -> Self:
        if not self.model_dump(exclude_none=True):
            hint = f"give one of {', '.join(type(self).model_fields)}, or take it out"
            raise PydanticCustomError("C17", "require_reward asks for nothing", {"hint": hint})
        return self
