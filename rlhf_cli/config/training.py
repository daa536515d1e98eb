"""Configs of sft.yaml, reward.yaml and dpo.yaml, and the table of all configs."""

import math
from dataclasses import replace
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rlhf_cli.config.base import Config, ModelPath, Section, invalid
from rlhf_cli.config.common import RewardData, RewardModel, SFTData, SFTModel, TrainingConfig, WordCount, cut_prompts
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.sources import DataSource

SCHEDULERS = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
    "reduce_lr_on_plateau", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay",
]  # fmt: skip


class TrainerSettings(Section):
    """Options shared by SFT, reward and DPO training, under TRL's names."""

    num_train_epochs: float = Field(1.0, gt=0)
    max_steps: int | None = Field(None, gt=0)
    per_device_train_batch_size: int = Field(8, gt=0)
    per_device_eval_batch_size: int = Field(8, gt=0)
    gradient_accumulation_steps: int = Field(1, gt=0)
    max_length: int = Field(1024, gt=1)
    lr_scheduler_type: SCHEDULERS = "cosine"
    warmup_steps: int | None = Field(None, ge=0)
    warmup_ratio: float = Field(0.03, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    adam_epsilon: float = Field(1e-8, gt=0)
    gradient_checkpointing: bool = False
    bf16: bool | None = None
    logging_steps: int = Field(10, gt=0)
    eval_steps: int | None = Field(None, gt=0)
    group_by_length: bool = True

    def steps(self, rows: int, processes: int = 1) -> int:
        """Return the optimizer steps of a training on `rows` rows in `processes` processes, as transformers counts."""
        if self.max_steps is not None:
            return self.max_steps
        batches = math.ceil(rows / (self.per_device_train_batch_size * processes))
        return math.ceil(self.num_train_epochs * max(1, math.ceil(batches / self.gradient_accumulation_steps)))

    @model_validator(mode="before")
    @classmethod
    def _warmup_steps_replace_ratio(cls, keys: Any) -> Any:
        if isinstance(keys, dict) and keys.get("warmup_steps") is not None and "warmup_ratio" not in keys:
            return {**keys, "warmup_ratio": 0.0}
        return keys

    @model_validator(mode="after")
    def _check_warmup(self) -> Self:
        if self.warmup_steps is not None and self.warmup_ratio > 0:
            raise invalid("warmup_steps and warmup_ratio cannot be combined", "remove one of them", "warmup_ratio")
        return self


class SFTSettings(TrainerSettings):
    """Supervised fine-tuning by TRL's SFTTrainer."""

    learning_rate: float = Field(2e-5, ge=0)
    packing: bool = False
    completion_only_loss: bool = True


class RewardSettings(TrainerSettings):
    """Reward modelling by TRL's RewardTrainer."""

    learning_rate: float = Field(1e-5, ge=0)
    center_rewards_coefficient: float | None = Field(0.01, ge=0)
    normalize: Literal["none", "sft"] = "sft"
    normalize_samples: int = Field(256, ge=2)


class DPOSettings(TrainerSettings):
    """Direct preference optimization by TRL's DPOTrainer."""

    learning_rate: float = Field(1e-6, ge=0)
    beta: float = Field(0.1, gt=0)
    loss_type: Literal["sigmoid", "ipo", "robust"] = "sigmoid"
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)

    @model_validator(mode="after")
    def _check_label_smoothing(self) -> Self:
        if (self.loss_type == "robust") != (self.label_smoothing > 0):
            text = f"label_smoothing {self.label_smoothing:g} does not go with loss_type: {self.loss_type}"
            raise invalid(text, "set loss_type: robust with a label_smoothing above 0, or neither", "label_smoothing")
        return self


class BestOf(Section):
    """Sampling of the rows of SFT: the reward model's best of n answers to each prompt."""

    n: int = Field(16, ge=2)
    reward: ModelPath
    response_length: int = Field(53, gt=0)
    temperature: float = Field(0.7, gt=0)
    missing_eos_penalty: float | None = Field(1.0, ge=0)
    per_device_batch_size: int = Field(64, gt=0)
    truncate_prompt_words: WordCount | None = None


class SFTConfig(TrainingConfig):
    """sft.yaml: supervised fine-tuning."""

    stage: Literal["sft"] = "sft"
    model: SFTModel
    data: SFTData
    best_of: BestOf | None = None
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
        sources = self.data.sources(self.where)
        if self.best_of and self.best_of.truncate_prompt_words is not None:
            words = self.best_of.truncate_prompt_words
            sources = {key: cut_prompts(source, words) for key, source in sources.items()}
        if self.model.new:
            key, name = "model.new.tokenizer.train", self.model.new.tokenizer.train
            # If it is data.train, use the same rows (subset, max_rows); otherwise a separate source.
            source = sources["data.train"] if name == self.data.train else DataSource(name)
            sources[key] = replace(source, where=self.where(key), columns={}, share=None)
        return sources


class _PairConfig(TrainingConfig):
    model: RewardModel = Field(default_factory=RewardModel)
    data: RewardData

    @model_validator(mode="after")
    def _check_lora_dropout(self) -> Self:
        adapters, trainer = self.model.adapters, getattr(self, "trainer", {})
        if adapters and adapters.lora_dropout and trainer.get("disable_dropout") is not False:
            text = f"model.adapters.lora_dropout has no effect: {self.stage} training turns dropout off"
            hint = "set trainer.disable_dropout: false, or remove lora_dropout"
            raise invalid(text, hint, "model.adapters.lora_dropout")
        return self


class RewardConfig(_PairConfig):
    """reward.yaml: reward modelling."""

    stage: Literal["reward"] = "reward"
    reward: RewardSettings = Field(default_factory=RewardSettings)
    trainer: dict[str, Any] = Field(default_factory=dict)


class DPOConfig(_PairConfig):
    """dpo.yaml: direct preference optimization, an optional stage."""

    stage: Literal["dpo"] = "dpo"
    dpo: DPOSettings = Field(default_factory=DPOSettings)
    trainer: dict[str, Any] = Field(default_factory=dict)

    @property
    def keeps_reference(self) -> bool:
        """Whether the reference model is in memory; adapters are turned off instead, or its log-probs computed once."""
        return self.model.adapters is None and not self.trainer.get("precompute_ref_log_probs")


TRLConfig = SFTConfig | RewardConfig | DPOConfig
CONFIGS: dict[str, type[Config]] = {
    "sft": SFTConfig, "reward": RewardConfig, "dpo": DPOConfig, "ppo": PPOConfig, "eval": EvalConfig,
}  # fmt: skip
