"""The optimizer, its schedules, and what is trained."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from rlhf_cli.ppo.settings.base import HF, TRL, TRL_STEP, Settings

SCHEDULERS = Literal[
    "linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt", "cosine_with_min_lr"
]


def _refuse_fp16(value: object) -> object:
    if value is True:
        text = "fp16 cannot train PPO: log-prob differences underflow and there is no loss scaler"
        raise PydanticCustomError("C17", text, {"hint": "set bf16: true"})
    return value


class TrainingSettings(Settings):
    """One AdamW over policy and value, with a learning rate for each."""

    learning_rate: float = Field(
        3e-6,
        ge=0,
        description=(
            "Peak learning rate of the policy; with models.adapters 3e-5 where none is told, and ten times the rates "
            "of a recipe. Raise it where scores and KL stay flat; lower it where KL jumps or scores fall: it breaks a "
            f"run sooner than any other key. {TRL}"
        ),
    )
    value_learning_rate: float | None = Field(
        None, ge=0, description=f"Peak learning rate of the value model; none: learning_rate. {TRL}"
    )
    lr_scheduler_type: SCHEDULERS = Field(
        "linear", description=f"Schedule over the run's updates, stepped once an update. {HF}"
    )
    warmup_steps: int | None = Field(
        None,
        ge=0,
        description=(
            "Updates of warm-up, the first of them with learning rate 0. Give this or warmup_ratio. "
            f"{HF[:-1]}; 0 there, which is the same]"
        ),
    )
    warmup_ratio: float | None = Field(
        None,
        ge=0,
        lt=1,
        description=(
            "Warm-up as a share of all updates. Give this or warmup_steps. "
            "[`pytest tests/test_ppo_options.py -k warmup`]"
        ),
    )
    value_warmup_steps: int | None = Field(
        None,
        ge=0,
        description=(
            "Updates of warm-up of the value model; none: the policy's. "
            "[`pytest tests/test_ppo_options_training.py -k warmup`]"
        ),
    )
    value_only_updates: int = Field(
        0,
        ge=0,
        description=(
            "First updates that train the value model alone, so that the policy's first advantages mean something. "
            "[OpenRLHF 021d1b09, openrlhf/cli/train_ppo_ray.py]"
        ),
    )
    weight_decay: float = Field(0.0, ge=0, description=f"AdamW's weight decay; none on biases and norms. {HF}")
    optim: Literal["adamw_torch_fused", "adamw_torch", "adamw_8bit"] = Field(
        "adamw_torch_fused",
        description=(
            "AdamW as one kernel, or step by step: the same formula. adamw_8bit keeps its averages in 8 bits a number, "
            "embeddings' and small weights' in 32 (bitsandbytes; Dettmers et al. 2021, arXiv 2110.02861): 2 in place "
            f"of 8 bytes for each number that is trained. {HF}"
        ),
    )
    adam_beta1: float = Field(0.9, ge=0, lt=1, description=f"AdamW's beta1. {HF}")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description=f"AdamW's beta2. {HF}")
    adam_epsilon: float = Field(1e-8, gt=0, description=f"AdamW's epsilon. {HF}")
    max_grad_norm: float = Field(1.0, gt=0, description=f"Gradient norm limit, for policy and value apart. {HF}")
    num_shared_layers: int | None = Field(
        None,
        ge=1,
        description=(
            "The embeddings and first n layers are frozen, and one copy of them serves policy and reference. "
            f"{TRL_STEP.replace('ppo_config.py', 'ppo_trainer.py')}"
        ),
    )
    gradient_checkpointing: bool = Field(
        False,
        description=(
            "Recompute activations in the backward pass: less memory, more time. "
            f"{TRL_STEP[:-1]}; TRL 1.12's default is on, and had no effect]"
        ),
    )
    offload: bool = Field(
        False,
        description=(
            "Reference and reward models wait in the CPU's memory, and come onto the GPU while they are read: less GPU "
            "memory, more time. [OpenRLHF 021d1b09, openrlhf/cli/train_ppo_ray.py]"
        ),
    )
    fsdp: bool = Field(
        False,
        description=(
            "In several processes: each keeps a part of the weights of policy, value model and reference, of gradients "
            "and of averages (torch's fully_shard); AdamW's steps are not fused. Less GPU memory, more time. "
            f"{HF[:-1]}; none there, which is off]"
        ),
    )
    bf16: bool = Field(
        False, description=f"Forward and backward passes under bfloat16 autocast; weights stay float32. {HF}"
    )
    fp16: Annotated[bool, BeforeValidator(_refuse_fp16)] = Field(
        False, description=f"Refused: PPO trains in float32 or bf16. {HF}"
    )

    @model_validator(mode="after")
    def _one_warmup(self) -> Self:
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            text = "warmup_steps and warmup_ratio say the same thing twice"
            raise PydanticCustomError("C17", text, {"hint": "keep warmup_steps"})
        given = [key for key in ("warmup_steps", "warmup_ratio", "value_warmup_steps") if getattr(self, key)]
        if given and self.lr_scheduler_type == "constant":
            text = f"{given[0]} has no effect with lr_scheduler_type constant"
            raise PydanticCustomError("C17", "{text}", {"text": text, "hint": "set constant_with_warmup"})
        return self

    @model_validator(mode="after")
    def _what_is_cut_up_stands_alone(self) -> Self:
        if self.fsdp and self.num_shared_layers:
            text = "fsdp cuts up layers, which num_shared_layers lets two models use"
            raise PydanticCustomError("C17", text, {"hint": "keep one of them"})
        if self.fsdp and self.optim == "adamw_8bit":
            raise PydanticCustomError("C17", "fsdp does not go with averages in 8 bits", {"hint": "keep one of them"})
        return self

    @model_validator(mode="after")
    def _nothing_shared_leaves(self) -> Self:
        if self.offload and self.num_shared_layers:
            text = "offload cannot send away layers that num_shared_layers lets the policy use"
            raise PydanticCustomError("C17", text, {"hint": "keep one of them; num_shared_layers saves more"})
        return self
