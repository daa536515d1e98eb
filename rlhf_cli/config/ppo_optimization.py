"""Options of the optimizer, its schedules, memory and precision."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from rlhf_cli.config.base import HF, TRL, Settings

SCHEDULERS = Literal[
    "linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt", "cosine_with_min_lr"
]


def _refuse_fp16(value: object) -> object:
    if value is True:
        text = "PPO cannot train in fp16: log-prob differences underflow, and there is no loss scaler"
        raise PydanticCustomError("C17", text, {"hint": "set bf16: true"})
    return value


class TrainingSettings(Settings):
    """Options of AdamW, which trains policy and value model with separate learning rates."""

    learning_rate: float = Field(
        3e-6,
        ge=0,
        description=(
            "Peak learning rate of the policy. Raise it if scores and KL stay flat; lower it if the KL jumps or "
            "scores fall: no other key breaks a run sooner. With models.adapters the default is 3e-5, and rates of a "
            f"recipe are multiplied by ten. {TRL}"
        ),
    )
    value_learning_rate: float | None = Field(
        None, ge=0, description=f"Peak learning rate of the value model. Default: learning_rate. {TRL}"
    )
    lr_scheduler_type: SCHEDULERS = Field(
        "linear", description=f"Learning-rate schedule over the updates of the run, advanced once per update. {HF}"
    )
    warmup_steps: int | None = Field(
        None,
        ge=0,
        description=(
            "Number of warm-up updates; the first has learning rate 0. Set either this or warmup_ratio. Default: no "
            "warm-up. [transformers 5.23, src/transformers/training_args.py; 0 there, which is the same]"
        ),
    )
    warmup_ratio: float | None = Field(
        None,
        ge=0,
        lt=1,
        description=(
            "Warm-up as a share of all updates. Set either this or warmup_steps. Default: no warm-up. [transformers "
            "5.23, src/transformers/training_args.py; no warm-up there either]"
        ),
    )
    value_warmup_steps: int | None = Field(
        None,
        ge=0,
        description=(
            "Number of warm-up updates of the value model. Default: those of the policy. [TRL 1.12, "
            "trl/experimental/ppo/ppo_config.py; one schedule for both there]"
        ),
    )
    value_only_updates: int = Field(
        0,
        ge=0,
        description=(
            "Number of updates at the start that train only the value model, so that the first advantages of the "
            "policy are meaningful. Higher values delay the policy. [OpenRLHF 021d1b09, openrlhf/cli/train_ppo_ray.py]"
        ),
    )
    weight_decay: float = Field(
        0.0,
        ge=0,
        description=f"Weight decay of AdamW, not applied to biases and norms. Higher values regularise more. {HF}",
    )
    optim: Literal["adamw_torch_fused", "adamw_torch", "adamw_8bit"] = Field(
        "adamw_torch_fused",
        description=(
            "Optimizer: AdamW as one fused kernel, or unfused with the same formula. adamw_8bit stores the moments in "
            "8 bits, those of embeddings and small tensors in 32 (bitsandbytes; Dettmers et al. 2021, arXiv "
            f"2110.02861): 2 instead of 8 bytes per trained parameter. {HF}"
        ),
    )
    adam_beta1: float = Field(0.9, ge=0, lt=1, description=f"Decay rate of AdamW's first moment. {HF}")
    adam_beta2: float = Field(
        0.999,
        ge=0,
        lt=1,
        description=f"Decay rate of AdamW's second moment. Lower values adapt faster to changing gradients. {HF}",
    )
    adam_epsilon: float = Field(
        1e-8, gt=0, description=f"Epsilon of AdamW, added to the denominator for numerical stability. {HF}"
    )
    max_grad_norm: float = Field(
        1.0,
        gt=0,
        description=(
            "Maximum gradient norm, applied separately to policy and value model. Lower values damp outliers and slow "
            f"training. {HF}"
        ),
    )
    num_shared_layers: int | None = Field(
        None,
        ge=1,
        description=(
            "Number of first layers that are frozen, with the embeddings, and shared by policy and reference. Higher "
            "values need less memory and train less of the policy. Default: none are shared. [TRL 0.11, "
            "trl/trainer/ppo_trainer.py]"
        ),
    )
    gradient_checkpointing: bool = Field(
        False,
        description=(
            "Recompute activations in the backward pass: less memory, more time. [TRL 0.11, "
            "trl/trainer/ppo_config.py; TRL 1.12's default is on, and had no effect]"
        ),
    )
    offload: bool = Field(
        False,
        description=(
            "Keep reference and reward models in CPU memory and move them to the GPU only for their forward passes: "
            "less GPU memory, more time. [OpenRLHF 021d1b09, openrlhf/cli/train_ppo_ray.py]"
        ),
    )
    fsdp: bool = Field(
        False,
        description=(
            "Shard weights of policy, value model and reference, gradients and optimizer moments over the processes "
            "(fully_shard of PyTorch). AdamW is not fused then. Less GPU memory, more time. [transformers 5.23, "
            "src/transformers/training_args.py; none there, which is off]"
        ),
    )
    bf16: bool = Field(
        False,
        description=(
            "Run forward and backward passes under bfloat16 autocast; weights stay float32. Faster and less memory on "
            f"a GPU. {HF}"
        ),
    )
    fp16: Annotated[bool, BeforeValidator(_refuse_fp16)] = Field(
        False, description=f"Rejected if true: PPO trains in float32 or bf16. {HF}"
    )

    @model_validator(mode="after")
    def _check_warmup(self) -> Self:
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            text = "warmup_steps and warmup_ratio cannot be combined"
            raise PydanticCustomError("C17", text, {"hint": "remove warmup_ratio"})
        given = [key for key in ("warmup_steps", "warmup_ratio", "value_warmup_steps") if getattr(self, key)]
        if given and self.lr_scheduler_type == "constant":
            text = f"{given[0]} has no effect with lr_scheduler_type constant"
            raise PydanticCustomError("C17", "{text}", {"text": text, "hint": "set constant_with_warmup"})
        return self

    @model_validator(mode="after")
    def _check_fsdp(self) -> Self:
        if self.fsdp and self.num_shared_layers:
            text = "fsdp shards layers and cannot be combined with num_shared_layers, which shares them between models"
            raise PydanticCustomError("C17", text, {"hint": "remove one of them"})
        if self.fsdp and self.optim == "adamw_8bit":
            raise PydanticCustomError(
                "C17", "fsdp cannot be combined with optim: adamw_8bit", {"hint": "remove one of them"}
            )
        return self

    @model_validator(mode="after")
    def _check_offload(self) -> Self:
        if self.offload and self.num_shared_layers:
            text = "offload cannot be combined with num_shared_layers, whose layers the policy uses"
            raise PydanticCustomError("C17", text, {"hint": "remove offload; num_shared_layers saves more"})
        return self
