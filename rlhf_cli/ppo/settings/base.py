"""What the sections of the settings share: strictness, and where defaults come from.

A description ends with the source of its default in brackets: a paper and its part, a system and its file, or a
command of this repository in backticks, then `; a remark` where one is needed. `rlhf explain` reads it.
"""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

TRL = "[TRL 1.12, trl/experimental/ppo/ppo_config.py]"
TRL_STEP = "[TRL 0.11, trl/trainer/ppo_config.py]"
TLDR = "[TRL 1.12, examples/scripts/ppo/ppo_tldr.py]"
HF = "[transformers 5.23, src/transformers/training_args.py]"


class Settings(BaseModel):
    """Strict and frozen: an unknown key, a string for a number, `true` for a number, nan and inf are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True)


class Range(Settings):
    """A whole number drawn anew each time, uniform over min..max, both included."""

    min: int = Field(ge=1)
    max: int = Field(ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise PydanticCustomError("C06", "min is above max", {"hint": "swap the two"})
        return self
