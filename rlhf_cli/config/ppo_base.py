"""Base class of the PPO options, and sources of their defaults (see rlhf_cli/config/origins.py)."""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

TRL = "[TRL 1.12, trl/experimental/ppo/ppo_config.py]"
TRL_STEP = "[TRL 0.11, trl/trainer/ppo_config.py]"
TLDR = "[TRL 1.12, examples/scripts/ppo/ppo_tldr.py]"
HF = "[transformers 5.23, src/transformers/training_args.py]"


class Settings(BaseModel):
    """Strict, frozen section: rejects unknown keys, strings or booleans for numbers, nan and inf."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True)


class Range(Settings):
    """Integer that is sampled uniformly from min..max (inclusive) on each use."""

    min: int = Field(ge=1)
    max: int = Field(ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise PydanticCustomError("C06", "min is greater than max", {"hint": "swap them"})
        return self
