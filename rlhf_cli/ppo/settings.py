"""Every key of `ppo:`, defined once: type, bounds, default, meaning. Torch-free, so that a config loads in a blink.

Names are those of TRL's PPOConfig. A default's source stands in brackets at the end of its description.
A validator that refuses a combination raises `PydanticCustomError(CODE, text, {"hint": fix})`; the config floor turns
it into `error[CODE]`.
"""

import math
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

TRL = "[TRL 1.12 PPOConfig]"
HF = "[transformers TrainingArguments]"

SCHEDULERS = Literal[
    "linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt", "cosine_with_min_lr"
]


class Settings(BaseModel):
    """Strict and frozen: an unknown key, a string for a number, `true` for a number, nan and inf are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True)


class LengthRange(Settings):
    """A response length drawn anew for each update, uniform over min..max, both included."""

    min: int = Field(ge=1, description="Shortest length in tokens.")
    max: int = Field(ge=1, description="Longest length in tokens.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise PydanticCustomError("C06", "min is above max", {"hint": "swap the two"})
        return self


def _refuse_fp16(value: object) -> object:
    if value is True:
        raise PydanticCustomError(
            "C17",
            "fp16 cannot train PPO: log-prob differences underflow and there is no loss scaler",
            {"hint": "set bf16: true"},
        )
    return value


class PPOSettings(Settings):
    """The numbers of PPO (Schulman et al.

    2017, arXiv 1707.06347; for language models Ziegler et al. 2019, arXiv 1909.08593).
    """

    # How much
    total_episodes: int | None = Field(
        None, ge=1, description="Episodes (= responses) in all. Give this or num_train_epochs."
    )
    num_train_epochs: float | None = Field(
        None, gt=0, description="Passes over the prompts. Give this or total_episodes."
    )
    per_device_train_batch_size: int = Field(
        16,
        ge=1,
        description=(
            "Rows of a micro-batch at most; times gradient_accumulation_steps = episodes of an update. "
            "[16 x 4 = 64 episodes, TRL 1.12 example]"
        ),
    )
    gradient_accumulation_steps: int = Field(
        4,
        ge=1,
        description="Micro-batches of full size that make up an update's episodes. [see per_device_train_batch_size]",
    )
    num_mini_batches: int = Field(1, ge=1, description=f"Minibatches of an epoch; each makes one optimizer step. {TRL}")
    num_ppo_epochs: int = Field(4, ge=1, description=f"Passes over an update's episodes. {TRL}")
    num_samples_per_prompt: int = Field(1, ge=1, description="Responses to each prompt of an update. [TRL 1.12: one]")
    micro_batch_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description=(
            "Most tokens, padding included, that one forward pass of judge or update holds, with at most "
            "per_device_train_batch_size rows; auto: only the rows bound it. [ours]"
        ),
    )
    local_rollout_forward_batch_size: int | None = Field(
        None,
        ge=1,
        description=(
            "Rows generated, and scored by reward models, at a time; none: all rows are generated together, and "
            "per_device_train_batch_size rows scored. [ours]"
        ),
    )
    num_sample_generations: int = Field(
        10, ge=0, description=f"Tables of prompts, responses and scores shown during training. {TRL}"
    )

    # Rollouts
    response_length: Annotated[int, Field(ge=1)] | LengthRange = Field(
        53, description=f"Most tokens of a response, or {{min, max}} to draw the limit anew for each update. {TRL}"
    )
    temperature: float = Field(0.7, gt=0, description=f"Sampling temperature; log-probs use the same one. {TRL}")
    stop_token: Literal["eos", "none"] = Field(
        "eos",
        description=(
            "eos: a response ends with the stop token of the SFT checkpoint; none: it never ends early. "
            "[eos: N+ details, arXiv 2403.17031]"
        ),
    )
    stop_token_id: int | None = Field(
        None, ge=0, description="A stop token by its id, in place of stop_token. [none: the SFT checkpoint's]"
    )
    missing_eos_penalty: float | None = Field(
        1.0,
        ge=0,
        description=(
            "Subtracted from the score of a response that reached its length limit without the stop "
            "token. [1.0: TRL 1.12's example scripts; its PPOConfig has none]"
        ),
    )

    # Rewards
    kl_coef: float = Field(0.05, ge=0, description=f"Coefficient of the KL penalty to the SFT policy, per nat. {TRL}")
    kl_in: Literal["reward", "loss"] = Field(
        "reward", description=f"Where the KL penalty goes: into each token's reward, or into the loss. {TRL}"
    )
    kl_estimator: Literal["k1", "k2", "k3", "abs", "full"] = Field(
        "k1",
        description=(
            "Estimator of a token's KL (Schulman 2020, 'Approximating KL divergence'). In the loss: "
            f"full, k2 or k3. {TRL}"
        ),
    )
    whiten_rewards: bool = Field(
        False, description=f"Scale an update's token rewards to unit variance, mean kept. {TRL}"
    )
    advantage_norm: Literal["batch", "none"] = Field(
        "batch", description=f"Whiten advantages over the whole update. {TRL}"
    )

    # The objective
    cliprange: float = Field(0.2, gt=0, lt=1, description=f"Clip range of the probability ratio. {TRL}")
    cliprange_value: float = Field(0.2, gt=0, description=f"Clip range of the value around its old prediction. {TRL}")
    vf_coef: float = Field(0.1, ge=0, description=f"Coefficient of the value loss. {TRL}")
    gamma: float = Field(1.0, gt=0, le=1, description=f"Discount. {TRL}")
    lam: float = Field(0.95, ge=0, le=1, description=f"Lambda of generalised advantage estimation. {TRL}")

    # The optimizer
    learning_rate: float = Field(3e-6, ge=0, description=f"Peak learning rate of policy and value. {TRL}")
    lr_scheduler_type: SCHEDULERS = Field(
        "linear", description=f"Schedule over the run's updates, stepped once an update. {HF}"
    )
    warmup_steps: int | None = Field(None, ge=0, description=f"Updates of warm-up. Give this or warmup_ratio. {HF}")
    warmup_ratio: float | None = Field(None, ge=0, lt=1, description=f"Warm-up as a share of all updates. {HF}")
    weight_decay: float = Field(0.0, ge=0, description=f"AdamW's weight decay; none on biases and norms. {HF}")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description=f"AdamW's beta1. {HF}")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description=f"AdamW's beta2. {HF}")
    adam_epsilon: float = Field(1e-8, gt=0, description=f"AdamW's epsilon. {HF}")
    max_grad_norm: float = Field(1.0, gt=0, description=f"Gradient norm limit, for policy and value apart. {HF}")
    gradient_checkpointing: bool = Field(
        False, description=f"Recompute activations in the backward pass: less memory, more time. {HF}"
    )
    bf16: bool = Field(
        False, description=f"Forward and backward passes under bfloat16 autocast; weights stay float32. {HF}"
    )
    fp16: Annotated[bool, BeforeValidator(_refuse_fp16)] = Field(
        False, description=f"Refused: PPO trains in float32 or bf16. {HF}"
    )

    @model_validator(mode="after")
    def _one_of_each_pair(self) -> Self:
        if (self.total_episodes is None) == (self.num_train_epochs is None):
            raise PydanticCustomError(
                "C17", "give one of total_episodes and num_train_epochs", {"hint": "e.g. total_episodes: 10000"}
            )
        if self.stop_token == "none" and self.stop_token_id is not None:
            text = "stop_token none and a stop_token_id contradict each other"
            raise PydanticCustomError("C17", text, {"hint": "take one of them out"})
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            text = "warmup_steps and warmup_ratio say the same thing twice"
            raise PydanticCustomError("C17", text, {"hint": "keep warmup_steps"})
        return self

    @model_validator(mode="after")
    def _kl_in_the_loss(self) -> Self:
        if self.kl_in == "loss" and self.kl_estimator in ("k1", "abs"):
            raise PydanticCustomError(
                "C17",
                "kl_estimator {kind} in the loss does not have the KL's gradient (k1's is zero on average)",
                {"kind": self.kl_estimator, "hint": "set kl_estimator: full, k2 or k3"},
            )
        return self

    @model_validator(mode="after")
    def _divides(self) -> Self:
        batch = self.episodes_per_update
        for key in ("num_mini_batches", "num_samples_per_prompt"):
            parts = getattr(self, key)
            if batch % parts:
                near = sorted(
                    {divisor for divisor in range(1, batch + 1) if batch % divisor == 0}, key=lambda d: abs(d - parts)
                )[:2]
                sizes = f"{self.per_device_train_batch_size} x {self.gradient_accumulation_steps}"
                arithmetic = f"{sizes} = {batch} episodes an update"
                raise PydanticCustomError(
                    "C12",
                    "{arithmetic} cannot be divided by {key} {parts}",
                    {
                        "arithmetic": arithmetic,
                        "key": key,
                        "parts": parts,
                        "hint": f"nearest that fit: {' or '.join(map(str, sorted(near)))}",
                    },
                )
        return self

    @property
    def episodes_per_update(self) -> int:
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def prompts_per_update(self) -> int:
        return self.episodes_per_update // self.num_samples_per_prompt

    @property
    def max_response_length(self) -> int:
        return self.response_length.max if isinstance(self.response_length, LengthRange) else self.response_length

    def num_updates(self, prompt_count: int | None = None) -> int:
        """Updates of the whole run; the last one is whole too. `prompt_count` is needed with num_train_epochs."""
        if self.total_episodes is not None:
            return math.ceil(self.total_episodes / self.episodes_per_update)
        if prompt_count is None or self.num_train_epochs is None:
            raise ValueError("num_train_epochs needs the number of prompts")
        return math.ceil(self.num_train_epochs * prompt_count / self.prompts_per_update)

    def num_warmup(self, updates: int) -> int:
        """Updates of warm-up out of `updates`."""
        return self.warmup_steps if self.warmup_steps is not None else math.ceil((self.warmup_ratio or 0.0) * updates)
