"""Configs of sft.yaml and reward.yaml, and the table of all four configs."""

from dataclasses import replace
from typing import Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from rlhf_cli.config.adapters import TrainingConfig
from rlhf_cli.config.base import Config
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.sections import STAGE, RewardData, RewardModel, SFTData, SFTModel
from rlhf_cli.config.sources import DataSource
from rlhf_cli.config.training import RewardSettings, SFTSettings

TRAINER = (
    "Any other field of TRL's {}, by its TRL name, except those that rlhf sets itself. `rlhf explain trainer.NAME` "
    "describes a field. [TRL 1.16, trl/trainer/{}_config.py; its defaults apply]"
)


class SFTConfig(TrainingConfig):
    """sft.yaml: supervised fine-tuning."""

    stage: Literal["sft"] = Field("sft", description=STAGE)
    model: SFTModel = Field(description="Model to start from.")
    data: SFTData = Field(description="Rows to train on.")
    sft: SFTSettings = Field(default_factory=SFTSettings, description="Options of the training.")
    trainer: dict[str, Any] = Field(default_factory=dict, description=TRAINER.format("SFTConfig", "sft"))

    def sources(self) -> dict[str, DataSource]:
        """Return the data sources that the stage reads, by key path."""
        found = self.data.sources(self.where)
        if self.model.new:
            key, name = "model.new.tokenizer.train", self.model.new.tokenizer.train
            # If it is data.train, use the same rows (subset, max_rows); otherwise a separate source.
            same = found["data.train"] if name == self.data.train else DataSource(name)
            found[key] = replace(same, where=self.where(key), columns={}, share=None)
        return found


class RewardConfig(TrainingConfig):
    """reward.yaml: reward modelling."""

    stage: Literal["reward"] = Field("reward", description=STAGE)
    model: RewardModel = Field(default_factory=RewardModel, description="Model to start from.")
    data: RewardData = Field(description="Pairs to train on.")
    reward: RewardSettings = Field(default_factory=RewardSettings, description="Options of the training.")
    trainer: dict[str, Any] = Field(default_factory=dict, description=TRAINER.format("RewardConfig", "reward"))

    @model_validator(mode="after")
    def _dropout_is_on(self) -> Self:
        adapters = self.model.adapters
        if adapters and adapters.lora_dropout and self.trainer.get("disable_dropout") is not False:
            text = "model.adapters.lora_dropout has no effect: reward training turns dropout off"
            hint = "set trainer.disable_dropout: false, or remove lora_dropout"
            raise PydanticCustomError("C17", text, {"hint": hint, "key": "model.adapters.lora_dropout"})
        return self

    def sources(self) -> dict[str, DataSource]:
        """Return the data sources that the stage reads, by key path."""
        return self.data.sources(self.where)


CONFIGS: dict[str, type[Config]] = {"sft": SFTConfig, "reward": RewardConfig, "ppo": PPOConfig, "eval": EvalConfig}
