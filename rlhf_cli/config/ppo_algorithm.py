"""Options of the objective, the optimizer and the watchdog."""

from typing import Annotated, Literal, Self, get_args

from pydantic import BeforeValidator, Field, model_validator

from rlhf_cli.config.base import Section, invalid


class RolloutCorrection(Section):
    """Importance weights of the policy loss, for engines whose draws differ slightly from the policy's."""

    mode: Literal["token_truncate", "sequence_mask"]
    cap: float = Field(3.0, gt=1)


class ObjectiveSettings(Section):
    """Scores, KL penalty, advantages, clipped losses and early stopping."""

    # Scores
    use_score_scaling: bool = False
    use_score_norm: bool = False
    score_clip: float | None = Field(None, gt=0)

    # KL penalty
    kl_coef: float = Field(0.05, ge=0)
    kl_in: Literal["reward", "loss"] = "reward"
    kl_estimator: Literal["k1", "k2", "k3", "abs", "full"] = "k1"
    adap_kl_ctrl: bool = False
    target: float = Field(6.0, gt=0)
    horizon: int = Field(10000, gt=0)
    kl_stop: float | None = Field(None, gt=0)
    max_logprob_gap: float = Field(0.1, gt=0)
    rollout_correction: RolloutCorrection | None = None

    # Rewards and advantages
    whiten_rewards: bool = False
    advantage: Literal["gae", "rloo", "grpo"] = "gae"
    advantage_norm: Literal["batch", "none"] = "batch"
    gamma: float = Field(1.0, gt=0, le=1)
    lam: float = Field(0.95, ge=0, le=1)

    # Loss
    cliprange: float = Field(0.2, gt=0, lt=1)
    cliprange_high: float | None = Field(None, gt=0)
    dual_clip: float | None = Field(None, gt=1)
    cliprange_value: float = Field(0.2, gt=0)
    vf_coef: float = Field(0.1, ge=0)
    entropy_coef: float = Field(0.0, ge=0)
    ptx_coef: float = Field(0.0, ge=0)

    # Early stopping
    early_stopping: bool = False
    target_kl: float = Field(1.0, gt=0)
    ratio_threshold: float | None = Field(10.0, gt=1)

    @property
    def needs_value_model(self) -> bool:
        """True if the advantages are those of a value model, not of the other responses to a prompt."""
        return self.advantage == "gae"

    @model_validator(mode="after")
    def _check_kl(self) -> Self:
        if self.kl_in == "loss" and self.kl_estimator in ("k1", "abs"):
            text = f"kl_estimator {self.kl_estimator} in the loss does not have the gradient of the KL"
            raise invalid(f"{text} (that of k1 is zero on average)", "set kl_estimator: full, k2 or k3")
        if self.adap_kl_ctrl and self.kl_coef == 0:
            text = "adap_kl_ctrl multiplies kl_coef, which is 0"
            raise invalid(text, "set kl_coef: 0.2, the default of TRL's controller")
        return self


SCHEDULERS = Literal[
    "linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt", "cosine_with_min_lr"
]


def _refuse_fp16(value: object) -> object:
    if value is True:
        text = "PPO cannot train in fp16: log-prob differences underflow, and there is no loss scaler"
        raise invalid(text, "set bf16: true")
    return value


class TrainingSettings(Section):
    """Options of AdamW, which trains policy and value model with separate learning rates."""

    learning_rate: float = Field(3e-6, ge=0)
    value_learning_rate: float | None = Field(None, ge=0)
    lr_scheduler_type: SCHEDULERS = "linear"
    warmup_steps: int | None = Field(None, ge=0)
    warmup_ratio: float | None = Field(None, ge=0, lt=1)
    value_warmup_steps: int | None = Field(None, ge=0)
    value_only_updates: int = Field(0, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    optim: Literal["adamw_torch_fused", "adamw_torch", "adamw_8bit"] = "adamw_torch_fused"
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    adam_epsilon: float = Field(1e-8, gt=0)
    max_grad_norm: float = Field(1.0, gt=0)
    average: float | None = Field(None, gt=0, lt=1)
    num_shared_layers: int | None = Field(None, ge=1)
    gradient_checkpointing: bool = False
    offload: bool = False
    fsdp: bool | Literal["hybrid"] = False
    bf16: bool | None = None
    fp16: Annotated[bool, BeforeValidator(_refuse_fp16)] = False

    @model_validator(mode="after")
    def _check_training(self) -> Self:
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise invalid("warmup_steps and warmup_ratio cannot be combined", "remove warmup_ratio")
        warmup_keys = [key for key in ("warmup_steps", "warmup_ratio", "value_warmup_steps") if getattr(self, key)]
        if warmup_keys and self.lr_scheduler_type == "constant":
            raise invalid(f"{warmup_keys[0]} has no effect with lr_scheduler_type constant", "set constant_with_warmup")
        if self.fsdp and self.num_shared_layers:
            text = "fsdp shards layers and cannot be combined with num_shared_layers, which shares them between models"
            raise invalid(text, "remove one of them")
        if self.fsdp and self.optim == "adamw_8bit":
            raise invalid("fsdp cannot be combined with optim: adamw_8bit", "remove one of them")
        if self.fsdp and self.average:
            raise invalid("fsdp cannot be combined with average, which is of whole weights", "remove one of them")
        if self.offload and self.num_shared_layers:
            text = "offload cannot be combined with num_shared_layers, whose layers the policy uses"
            raise invalid(text, "remove offload; num_shared_layers saves more")
        return self


Signal = Literal["judge", "disagreement", "kl", "length", "repetition", "eos"]
Action = Literal["warn", "raise_kl_coef", "stop"]
SIGNALS: tuple[Signal, ...] = get_args(Signal)
# Message of each signal beyond its limit; the fields are those of a line in watchdog.jsonl.
SIGNAL_MESSAGES: dict[Signal, str] = {
    "judge": "the mean of the held-out judge `{source}` is {reading:.4g}, its best was {reference:.4g}; "
    "limit: {limit:g} standard errors",
    "disagreement": "the standard deviation between the members of `{source}` is {reading:.4g}, on the SFT policy's "
    "responses {reference:.4g}; limit: {limit:g} times that",
    "kl": "KL to the SFT policy is {reading:.4g} nats per token; limit: {limit:g}",
    "length": "the mean response length is {reading:.4g} tokens, the SFT policy's {reference:.4g}; limit: a factor of "
    "{limit:g}",
    "repetition": "{reading:.1%} of the 3-grams are repeated, the SFT policy's {reference:.1%}; limit: +{limit:.1%}",
    "eos": "{reading:.1%} of the responses have a stop token, of the SFT policy's {reference:.1%}; limit: {limit:.1%} "
    "less",
}


class WatchdogSettings(Section):
    """Limit of each signal (null: not watched), and the action if it is exceeded.

    A reading is the mean over the responses of the last `window` updates. It is compared with the SFT policy, that is,
    with the responses of the first update.
    """

    action: Action = "warn"
    actions: dict[Signal, Action] = Field(default_factory=dict)
    window: int = Field(3, ge=1)
    kl_factor: float = Field(1.5, gt=1)
    judge: float | None = Field(4.0, gt=0)
    disagreement: float | None = Field(2.0, gt=1)
    kl: float | None = Field(0.5, gt=0)
    length: float | None = Field(2.0, gt=1)
    repetition: float | None = Field(0.1, gt=0, lt=1)
    eos: float | None = Field(0.2, gt=0, lt=1)

    def action_on(self, signal: Signal) -> Action:
        """Return the action for a signal beyond its limit."""
        return self.actions.get(signal, self.action)

    @model_validator(mode="after")
    def _check_actions(self) -> Self:
        for signal in self.actions:
            if getattr(self, signal) is None:
                text = f"watchdog.actions.{signal} has no effect: watchdog.{signal} is null"
                raise invalid(text, f"set a limit for {signal}")
        acting = {self.action_on(signal) for signal in SIGNALS if getattr(self, signal) is not None}
        if self.kl_factor != type(self).model_fields["kl_factor"].default and "raise_kl_coef" not in acting:
            text = "watchdog.kl_factor has no effect: no action is raise_kl_coef"
            raise invalid(text, "set watchdog.action: raise_kl_coef")
        return self
