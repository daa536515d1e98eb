"""Config of sft.yaml."""

from dataclasses import replace
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from rlhf_cli.config.base import ModelPath
from rlhf_cli.config.machinery.section import AtLeastTwo, Section, invalid
from rlhf_cli.config.sections import SFTData, SFTModel, TrainerSettings, TrainingConfig, WordCount, cut_prompts
from rlhf_cli.config.sources import DataSource


class SFTSettings(TrainerSettings):
    """Supervised fine-tuning by TRL's SFTTrainer."""

    learning_rate: NonNegativeFloat = 2e-5
    packing: bool = False
    completion_only_loss: bool = True


class BestOfSettings(Section):
    """Sampling of the rows of SFT: the reward model's best of n answers to each prompt."""

    n: AtLeastTwo = 16
    reward: ModelPath
    response_length: PositiveInt = 53
    temperature: PositiveFloat = 0.7
    missing_eos_penalty: NonNegativeFloat | None = 1.0
    per_device_batch_size: PositiveInt = 64
    truncate_prompt_words: WordCount | None = None


class SFTConfig(TrainingConfig):
    """sft.yaml: supervised fine-tuning."""

    stage: Literal["sft"] = "sft"
    model: SFTModel
    data: SFTData
    best_of: BestOfSettings | None = None
    sft: SFTSettings = Field(default_factory=SFTSettings)
    trainer: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_best_of(self) -> Self:
        if self.best_of is None:
            return self
        length, limit = self.best_of.response_length, self.sft.max_length
        refused = {
            "model.new": (self.model.new, "samples from a trained model", "set model.path instead"),
            "model.chat_template": (self.model.chat_template, "samples with the template of model.path", "remove it"),
            "sft.packing": (self.sft.packing, "counts its steps before the rows are sampled", "remove it"),
            "best_of.response_length": (length >= limit, f"needs room for a prompt in sft.max_length {limit}",
                                        f"raise sft.max_length above {length}"),
        }  # fmt: skip
        for key, (value, reason, hint) in refused.items():
            if value:
                raise invalid(f"{key} does not go with best_of, which {reason}", hint, key)
        return self

    def sources(self) -> dict[str, DataSource]:
        """Return the data sources that the stage reads, by key path."""
        sources = super().sources()
        words = self.best_of.truncate_prompt_words if self.best_of else None
        if words is not None:
            sources = {key: cut_prompts(source, words) for key, source in sources.items()}

        if self.model.new:
            key = "model.new.tokenizer.train"
            name = self.model.new.tokenizer.train
            # If it is data.train, use the same rows (subset, max_rows); otherwise a separate source.
            source = sources["data.train"] if name == self.data.train else DataSource(name)
            sources[key] = replace(source, where=self.where(key), columns={}, share=None)
        return sources
