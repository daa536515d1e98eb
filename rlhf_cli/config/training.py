"""Configs of sft.yaml and reward.yaml, and the table of all four configs."""

import math
from dataclasses import replace
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rlhf_cli.config.base import Config, Section, invalid
from rlhf_cli.config.common import STAGE, RewardData, RewardModel, SFTData, SFTModel, TrainingConfig
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.sources import DataSource

SCHEDULERS = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
    "reduce_lr_on_plateau", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay",
]  # fmt: skip


class TrainerSettings(Section):
    """Options shared by SFT and reward training, under TRL's names."""

    num_train_epochs: float = Field(1.0, gt=0)
    """Number of passes over the training rows. More passes lower the training loss and may overfit; watch eval_loss.
    [Huang; as its reward.py, TRL's own default is 3]"""
    max_steps: int | None = Field(None, gt=0)
    """Number of optimizer steps of the run; replaces num_train_epochs. Default: num_train_epochs sets the length.
    [transformers; -1 means the same there]"""
    per_device_train_batch_size: int = Field(8, gt=0)
    """Rows (in the reward stage: pairs) per device and forward pass in training. Higher values are faster and need more
    memory. [transformers]"""
    per_device_eval_batch_size: int = Field(8, gt=0)
    """Rows per device and forward pass in evaluation. Higher values are faster and need more memory. [transformers]"""
    gradient_accumulation_steps: int = Field(1, gt=0)
    """Number of batches accumulated per optimizer step. Effective batch size = per_device_train_batch_size x this x
    number of processes. Higher values give larger batches without more memory. [transformers]"""
    max_length: int = Field(1024, gt=1)
    """Maximum length of a row in tokens, prompt and answer together; data.on_long decides about longer rows. Higher
    values keep more rows and need more memory. [TRL SFT]"""
    lr_scheduler_type: SCHEDULERS = "cosine"
    """Learning-rate schedule after warm-up. [Huang; as its reward.py, TRL's own default is linear]"""
    warmup_steps: int | None = Field(None, ge=0)
    """Number of warm-up steps, in which the learning rate rises from 0; replaces warmup_ratio. Default: warmup_ratio
    applies. [transformers; 0 there, which has no warmup_ratio]"""
    warmup_ratio: float = Field(0.03, ge=0, lt=1)
    """Share of all optimizer steps used for warm-up, in which the learning rate rises from 0. Higher values make a high
    learning rate safer. [Stanford Alpaca 7f08532, README.md]"""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay of AdamW. Higher values regularise more. [transformers]"""
    max_grad_norm: float = Field(1.0, gt=0)
    """Maximum gradient norm; larger gradients are scaled down to it. Lower values damp outliers and slow training.
    [transformers]"""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """Decay rate of AdamW's first moment. [transformers]"""
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    """Decay rate of AdamW's second moment. Lower values adapt faster to changing gradients. [transformers]"""
    adam_epsilon: float = Field(1e-8, gt=0)
    """Epsilon of AdamW, added to the denominator for numerical stability. [transformers]"""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time. [transformers; TRL's own default is true]"""
    bf16: bool | None = None
    """Compute in bfloat16 with float32 weights: faster and less memory on a GPU. Default: on if the GPU supports it,
    off on a CPU. [TRL base]"""
    logging_steps: int = Field(10, gt=0)
    """Optimizer steps between two lines of metrics.jsonl. [TRL base]"""
    eval_steps: int | None = Field(None, gt=0)
    """Optimizer steps between two evaluations on data.eval. Lower values show overfitting earlier and take more time.
    Default: once per epoch. [project]"""
    group_by_length: bool = True
    """Group rows of similar length into batches: less padding, so less time. No effect with packing. [project]"""

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
    """Peak learning rate. Higher values learn faster and may diverge; lower values need more steps. With model.adapters
    the default is 2e-4. [TRL SFT; its scripts/sft.py has 2e-4 for LoRA]"""
    packing: bool = False
    """Pack several rows into one sequence of max_length: faster if rows are short. [TRL SFT]"""
    completion_only_loss: bool = True
    """Train on the answer only; false trains on the prompt too. Rows {text} have no prompt and are trained on in full.
    [TRL SFT; null there, which means true for rows with a prompt]"""


class RewardSettings(TrainerSettings):
    """Reward modelling by TRL's RewardTrainer."""

    learning_rate: float = Field(1e-5, ge=0)
    """Peak learning rate. Higher values learn faster and overfit sooner; lower values need more steps. With
    model.adapters the default is 1e-4. [TRL 0246f6a, examples/scripts/reward_modeling.py; for full training, its 1e-4
    is for LoRA]"""
    center_rewards_coefficient: float | None = Field(0.01, ge=0)
    """Coefficient of a loss that pulls the sum of a pair's two scores towards 0, so that scores keep a stable scale.
    Higher values centre them more strongly; null turns it off. [TRL reward; the value that it recommends, TRL's own
    default is null]"""
    normalize: Literal["none", "sft"] = "sft"
    """Normalisation of the scores. sft: subtract the mean and divide by the standard deviation of the scores of the SFT
    model's own answers, so that ppo.kl_coef keeps its meaning across reward models. none: raw scores. [Ziegler et al.
    2019, arXiv 1909.08593, section 2]"""
    normalize_samples: int = Field(256, ge=2)
    """Number of SFT answers sampled to measure that mean and standard deviation. Higher values measure them more
    precisely and take more time. [docs/rewards.md]"""


TRAINER = (
    "Any other field of TRL's {}, by its TRL name, except those that rlhf sets itself. `rlhf explain trainer.NAME` "
    "describes a field. [TRL 1.16, trl/trainer/{}_config.py; its defaults apply]"
)


class SFTConfig(TrainingConfig):
    """sft.yaml: supervised fine-tuning."""

    stage: Literal["sft"] = Field("sft", description=STAGE)
    model: SFTModel
    """Model to start from."""
    data: SFTData
    """Rows to train on."""
    sft: SFTSettings = Field(default_factory=SFTSettings)
    """Options of the training."""
    trainer: dict[str, Any] = Field(default_factory=dict, description=TRAINER.format("SFTConfig", "sft"))

    def sources(self) -> dict[str, DataSource]:
        """Return the data sources that the stage reads, by key path."""
        sources = self.data.sources(self.where)
        if self.model.new:
            key, name = "model.new.tokenizer.train", self.model.new.tokenizer.train
            # If it is data.train, use the same rows (subset, max_rows); otherwise a separate source.
            source = sources["data.train"] if name == self.data.train else DataSource(name)
            sources[key] = replace(source, where=self.where(key), columns={}, share=None)
        return sources


class RewardConfig(TrainingConfig):
    """reward.yaml: reward modelling."""

    stage: Literal["reward"] = Field("reward", description=STAGE)
    model: RewardModel = Field(default_factory=RewardModel)
    """Model to start from."""
    data: RewardData
    """Pairs to train on."""
    reward: RewardSettings = Field(default_factory=RewardSettings)
    """Options of the training."""
    trainer: dict[str, Any] = Field(default_factory=dict, description=TRAINER.format("RewardConfig", "reward"))

    @model_validator(mode="after")
    def _check_lora_dropout(self) -> Self:
        adapters = self.model.adapters
        if adapters and adapters.lora_dropout and self.trainer.get("disable_dropout") is not False:
            text = "model.adapters.lora_dropout has no effect: reward training turns dropout off"
            hint = "set trainer.disable_dropout: false, or remove lora_dropout"
            raise invalid(text, hint, "model.adapters.lora_dropout")
        return self

    def sources(self) -> dict[str, DataSource]:
        """Return the data sources that the stage reads, by key path."""
        return self.data.sources(self.where)


CONFIGS: dict[str, type[Config]] = {"sft": SFTConfig, "reward": RewardConfig, "ppo": PPOConfig, "eval": EvalConfig}
