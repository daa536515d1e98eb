"""The numbers of the two trainings that TRL does: `sft:` and `reward:`."""

import math
from typing import Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from rlhf_cli.config.base import Section

SFT = "[TRL 1.16, trl/trainer/sft_config.py]"
BASE = "[TRL 1.16, trl/trainer/base_config.py]"
HF = "[transformers 5.23, src/transformers/training_args.py]"
# The code of Huang et al. 2024, arXiv 2403.17031, whose sft.py and reward.py agree here.
DETAILS = "summarize_from_feedback_details 1d6d8ee, summarize_from_feedback_details/sft.py"

SCHEDULERS = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
    "reduce_lr_on_plateau", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay",
]  # fmt: skip


class TrainerSettings(Section):
    """What SFT and reward training share: TRL's names."""

    num_train_epochs: float = Field(
        1.0, gt=0, description=f"Passes over the training rows. [{DETAILS}; as its reward.py, TRL's own default is 3]"
    )
    max_steps: int | None = Field(
        None,
        gt=0,
        description=(
            "Optimizer steps in all, in place of num_train_epochs; none: that many epochs. "
            "[transformers 5.23, src/transformers/training_args.py; -1 says the same there]"
        ),
    )
    per_device_train_batch_size: int = Field(
        8, gt=0, description=f"Rows (in the reward stage: pairs) a device reads at once in training. {HF}"
    )
    per_device_eval_batch_size: int = Field(8, gt=0, description=f"Rows a device reads at once in evaluation. {HF}")
    gradient_accumulation_steps: int = Field(
        1,
        gt=0,
        description=(
            "Batches added up before each optimizer step, which takes per_device_train_batch_size x this x the number "
            f"of processes rows. {HF}"
        ),
    )
    max_length: int = Field(
        1024,
        gt=1,
        description=f"Most tokens of a row, prompt and answer together; data.on_long says what happens beyond. {SFT}",
    )
    lr_scheduler_type: SCHEDULERS = Field(
        "cosine",
        description=(
            f"How the learning rate falls after warm-up. [{DETAILS}; as its reward.py, TRL's own default is linear]"
        ),
    )
    warmup_steps: int | None = Field(
        None,
        ge=0,
        description=(
            "Optimizer steps of warm-up, in place of warmup_ratio; none: that ratio holds. "
            "[transformers 5.23, src/transformers/training_args.py; 0 there, and there is no ratio beside it]"
        ),
    )
    warmup_ratio: float = Field(
        0.03,
        ge=0,
        lt=1,
        description="Share of all steps in which the learning rate rises from 0. [Stanford Alpaca 7f08532, README.md]",
    )
    weight_decay: float = Field(0.0, ge=0, description=f"AdamW's weight decay. {HF}")
    max_grad_norm: float = Field(1.0, gt=0, description=f"Gradients are scaled down to this norm at most. {HF}")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description=f"AdamW's beta1. {HF}")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description=f"AdamW's beta2. {HF}")
    adam_epsilon: float = Field(1e-8, gt=0, description=f"AdamW's epsilon. {HF}")
    gradient_checkpointing: bool = Field(
        False,
        description=(
            "Recompute activations in the backward pass: less memory, more time. "
            "[transformers 5.23, src/transformers/training_args.py; TRL's own default is true]"
        ),
    )
    bf16: bool | None = Field(
        None,
        description=f"Compute in bfloat16, weights stay float32; none: where a GPU can, off on the CPU. {BASE}",
    )
    logging_steps: int = Field(10, gt=0, description=f"Optimizer steps between two lines of metrics.jsonl. {BASE}")
    eval_steps: int | None = Field(
        None,
        gt=0,
        description=(
            "Optimizer steps between two evaluations on data.eval; none: at the end of each epoch. "
            "[`pytest tests/test_defaults.py::test_each_epoch_ends_with_an_evaluation`]"
        ),
    )
    group_by_length: bool = Field(
        True,
        description=(
            "Batches of rows of similar length: less padding, so less time. No effect with packing. "
            "[`pytest tests/test_stage_sft.py::test_batches_hold_rows_of_like_length_unless_told_otherwise`]"
        ),
    )

    def steps(self, rows: int, processes: int = 1) -> int:
        """Optimizer steps of a training on so many rows, as transformers counts them in so many processes."""
        if self.max_steps is not None:
            return self.max_steps
        batches = math.ceil(rows / (self.per_device_train_batch_size * processes))
        return math.ceil(self.num_train_epochs * max(1, math.ceil(batches / self.gradient_accumulation_steps)))

    @model_validator(mode="before")
    @classmethod
    def _steps_replace_the_ratio(cls, keys: Any) -> Any:
        if isinstance(keys, dict) and keys.get("warmup_steps") is not None and "warmup_ratio" not in keys:
            return {**keys, "warmup_ratio": 0.0}
        return keys

    @model_validator(mode="after")
    def _one_warmup(self) -> Self:
        if self.warmup_steps is not None and self.warmup_ratio > 0:
            raise PydanticCustomError(
                "C17",
                "warmup_steps and warmup_ratio say the same thing twice",
                {"hint": "keep one of the two", "key": "warmup_ratio"},
            )
        return self


class SFTSettings(TrainerSettings):
    """Supervised fine-tuning by TRL's SFTTrainer."""

    learning_rate: float = Field(
        2e-5,
        ge=0,
        description=(
            "Peak learning rate; with model.adapters 2e-4 where none is told. "
            "[TRL 1.16, trl/trainer/sft_config.py; its scripts/sft.py has 2e-4 for LoRA]"
        ),
    )
    packing: bool = Field(
        False, description=f"Several short rows in one sequence of max_length: faster where rows are short. {SFT}"
    )
    completion_only_loss: bool = Field(
        True,
        description=(
            "Train on the answer alone, and not on the prompt too. Rows {text} have no prompt and are trained "
            "whole. [TRL 1.16, trl/trainer/sft_config.py; null there, which means true for rows with a prompt]"
        ),
    )


class RewardSettings(TrainerSettings):
    """Reward modelling by TRL's RewardTrainer."""

    learning_rate: float = Field(
        1e-5,
        ge=0,
        description=(
            "Peak learning rate; with model.adapters 1e-4 where none is told. [TRL 0246f6a, "
            "examples/scripts/reward_modeling.py; for training in full, its 1e-4 is for LoRA]"
        ),
    )
    center_rewards_coefficient: float | None = Field(
        0.01,
        ge=0,
        description=(
            "Pulls each pair's summed reward towards 0, so that scores keep one scale; none: off. "
            "[TRL 1.16, trl/trainer/reward_config.py; the value that it recommends, TRL's own default is null]"
        ),
    )
    normalize: Literal["none", "sft"] = Field(
        "sft",
        description=(
            "sft: the scores' mean and deviation over the SFT model's own answers are stored, and every reader "
            "shifts and scales by them. [Ziegler et al. 2019, arXiv 1909.08593, section 2]"
        ),
    )
    normalize_samples: int = Field(
        256,
        ge=2,
        description=(
            "Answers sampled from the SFT model to measure that mean and deviation on. "
            "[`pytest tests/test_defaults.py::test_256_answers_tell_mean_and_deviation_to_a_tenth`]"
        ),
    )
