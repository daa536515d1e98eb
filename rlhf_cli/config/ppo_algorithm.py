"""Options of the objective, the optimizer and the watchdog."""

from typing import Annotated, Literal, Self, get_args

from pydantic import BeforeValidator, Field, model_validator

from rlhf_cli.config.base import Settings, invalid


class ObjectiveSettings(Settings):
    """Scores, KL penalty, advantages, clipped losses and early stopping."""

    # Scores
    use_score_scaling: bool = False
    """Divide scores by their running standard deviation. Use it if the scale of the reward is unknown or drifts. [TRL
    0.11 PPO]"""
    use_score_norm: bool = False
    """Also subtract the running mean of the scores; requires use_score_scaling. [TRL 0.11 PPO]"""
    score_clip: float | None = Field(None, gt=0)
    """Limit of the score: clipped to -score_clip .. score_clip after scaling. Lower values limit the effect of
    outliers. Default: no clipping. [TRL 0.11 PPO]"""

    # KL penalty
    kl_coef: float = Field(0.05, ge=0)
    """Coefficient of the KL penalty towards the SFT policy, per nat; with adap_kl_ctrl its initial value. Higher values
    keep the policy closer to SFT and gain less reward; lower values allow more of both, and 0 lets the policy exploit
    errors of the reward model. [TRL PPO]"""
    kl_in: Literal["reward", "loss"] = "reward"
    """Place of the KL penalty: the reward of each token, or the loss. [Ziegler et al. 2019, arXiv 1909.08593, section
    2.1]"""
    kl_estimator: Literal["k1", "k2", "k3", "abs", "full"] = "k1"
    """Estimator of the KL per token (Schulman 2020, 'Approximating KL divergence'). In the reward, only k1 has the
    policy gradient of the KL; in the loss, use full, k2 or k3. [TRL PPO]"""
    adap_kl_ctrl: bool = False
    """Adaptive KL controller: after each update kl_coef *= 1 + clip(objective/kl / target - 1, -0.2, 0.2) * episodes /
    horizon (Ziegler et al. 2019, section 2.2). [TRL PPO]"""
    target: float = Field(6.0, gt=0)
    """KL that adap_kl_ctrl steers towards, in nats per response (objective/kl). Higher values let the policy move
    further from SFT. It never stops anything: target_kl ends the epochs of one update, kl_stop ends the run. [TRL 0.11
    PPO]"""
    horizon: int = Field(10000, gt=0)
    """Number of episodes over which adap_kl_ctrl reacts. Lower values change kl_coef faster. [TRL 0.11 PPO]"""
    kl_stop: float | None = Field(None, gt=0)
    """Limit of objective/kl_k1, in nats per response. If an update exceeds it, the run ends with R04 and keeps the best
    policy. It is not target_kl (epochs of one update) or target (aim of a controller). Default: no limit. [TRL PPO; it
    has no such limit]"""

    # Rewards and advantages
    whiten_rewards: bool = False
    """Scale the token rewards of an update to unit variance and keep their mean. [TRL PPO]"""
    advantage_norm: Literal["batch", "none"] = "batch"
    """Normalisation of the advantages. batch: whiten them over the whole update; none: use them unchanged. [Huang et
    al. 2024, arXiv 2403.17031, section 7]"""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount factor per token. Lower values favour early tokens. [TRL PPO]"""
    lam: float = Field(0.95, ge=0, le=1)
    """Lambda of generalised advantage estimation. Higher values have less bias and more variance; 1 uses Monte Carlo
    returns. [TRL PPO]"""

    # Loss
    cliprange: float = Field(0.2, gt=0, lt=1)
    """Clip range of the probability ratio. Lower values give smaller, steadier updates; higher values let the epochs of
    an update move the policy further. [TRL PPO]"""
    cliprange_high: float | None = Field(None, gt=0)
    """Clip range above 1, if it differs from the one below 1 (Yu et al. 2025, arXiv 2503.14476, section 3.1). Higher
    values let unlikely tokens gain probability faster. Default: cliprange. [TRL PPO; one symmetric range there]"""
    dual_clip: float | None = Field(None, gt=1)
    """Second clip for negative advantages A: the objective is at least dual_clip * A (Ye et al. 2020, arXiv 1912.09729,
    equation 5, with 3). Lower values limit such updates more. Default: off. [TRL PPO; it has no second clip]"""
    cliprange_value: float = Field(0.2, gt=0)
    """Clip range of the value prediction around its old value. Lower values slow the value model down. [TRL PPO]"""
    vf_coef: float = Field(0.1, ge=0)
    """Coefficient of the value loss. [TRL PPO]"""
    entropy_coef: float = Field(0.0, ge=0)
    """Coefficient of an entropy bonus, per nat (Schulman et al. 2017, arXiv 1707.06347, equation 9). Higher values keep
    responses more varied. [OpenRLHF]"""
    ptx_coef: float = Field(0.0, ge=0)
    """Coefficient of a language-model loss on rows of data.ptx_data, one row per episode (Ouyang et al. 2022, arXiv
    2203.02155, equation 2, with 27.8). Higher values keep more of the skills in those rows. Default: 0, off. [TRL PPO;
    it has no such loss]"""

    # Early stopping
    early_stopping: bool = False
    """End the epochs of an update if the mean of logp_old - logp over the last minibatch of an epoch exceeds 1.5 *
    target_kl. [TRL 0.11 PPO]"""
    target_kl: float = Field(1.0, gt=0)
    """Limit for early_stopping: KL per token between the policy before and during one update, in nats. Lower values end
    updates sooner. It is not target (aim of a controller) or kl_stop (end of the run). [TRL 0.11 PPO]"""
    ratio_threshold: float | None = Field(10.0, gt=1)
    """Maximum mean probability ratio of a minibatch; above it the optimizer step is skipped (R08). Lower values skip
    more; null never skips. [TRL 0.11 PPO]"""

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


class TrainingSettings(Settings):
    """Options of AdamW, which trains policy and value model with separate learning rates."""

    learning_rate: float = Field(3e-6, ge=0)
    """Peak learning rate of the policy. Raise it if scores and KL stay flat; lower it if the KL jumps or scores fall:
    no other key breaks a run sooner. With models.adapters the default is 3e-5, and rates of a recipe are multiplied by
    ten. [TRL PPO]"""
    value_learning_rate: float | None = Field(None, ge=0)
    """Peak learning rate of the value model. Default: learning_rate. [TRL PPO]"""
    lr_scheduler_type: SCHEDULERS = "linear"
    """Learning-rate schedule over the updates of the run, advanced once per update. [transformers]"""
    warmup_steps: int | None = Field(None, ge=0)
    """Number of warm-up updates; the first has learning rate 0. Set either this or warmup_ratio. Default: no warm-up.
    [transformers; 0 there, which is the same]"""
    warmup_ratio: float | None = Field(None, ge=0, lt=1)
    """Warm-up as a share of all updates. Set either this or warmup_steps. Default: no warm-up. [transformers; no
    warm-up there either]"""
    value_warmup_steps: int | None = Field(None, ge=0)
    """Number of warm-up updates of the value model. Default: those of the policy. [TRL PPO; one schedule for both
    there]"""
    value_only_updates: int = Field(0, ge=0)
    """Number of updates at the start that train only the value model, so that the first advantages of the policy are
    meaningful. Higher values delay the policy. [OpenRLHF]"""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay of AdamW, not applied to biases and norms. Higher values regularise more. [transformers]"""
    optim: Literal["adamw_torch_fused", "adamw_torch", "adamw_8bit"] = "adamw_torch_fused"
    """Optimizer: AdamW as one fused kernel, or unfused with the same formula. adamw_8bit stores the moments in 8 bits,
    those of embeddings and small tensors in 32 (bitsandbytes; Dettmers et al. 2021, arXiv 2110.02861): 2 instead of 8
    bytes per trained parameter. [transformers]"""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """Decay rate of AdamW's first moment. [transformers]"""
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    """Decay rate of AdamW's second moment. Lower values adapt faster to changing gradients. [transformers]"""
    adam_epsilon: float = Field(1e-8, gt=0)
    """Epsilon of AdamW, added to the denominator for numerical stability. [transformers]"""
    max_grad_norm: float = Field(1.0, gt=0)
    """Maximum gradient norm, applied separately to policy and value model. Lower values damp outliers and slow
    training. [transformers]"""
    num_shared_layers: int | None = Field(None, ge=1)
    """Number of first layers that are frozen, with the embeddings, and shared by policy and reference. Higher values
    need less memory and train less of the policy. Default: none are shared. [TRL 0.11, trl/trainer/ppo_trainer.py]"""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time. [TRL 0.11 PPO; TRL 1.12's default is on, and
    had no effect]"""
    offload: bool = False
    """Keep reference and reward models in CPU memory and move them to the GPU only for their forward passes: less GPU
    memory, more time. [OpenRLHF]"""
    fsdp: bool = False
    """Shard weights of policy, value model and reference, gradients and optimizer moments over the processes
    (fully_shard of PyTorch). AdamW is not fused then. Less GPU memory, more time. [transformers; none there, which is
    off]"""
    bf16: bool = False
    """Run forward and backward passes under bfloat16 autocast; weights stay float32. Faster and less memory on a GPU.
    [transformers]"""
    fp16: Annotated[bool, BeforeValidator(_refuse_fp16)] = False
    """Rejected if true: PPO trains in float32 or bf16. [transformers]"""

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


class WatchdogSettings(Settings):
    """Limit of each signal (null: not watched), and the action if it is exceeded.

    A reading is the mean over the responses of the last `window` updates. It is compared with the SFT policy, that is,
    with the responses of the first update.
    """

    action: Action = "warn"
    """Action if a signal exceeds its limit: warn (R13), raise_kl_coef (multiply kl_coef by kl_factor), or stop (end the
    run with R13 and keep the best policy). Each time, a line is added to watchdog.jsonl. [docs/rewards.md]"""
    actions: dict[Signal, Action] = Field(default_factory=dict)
    """Actions of individual signals that differ from action, for example {judge: stop}. [docs/rewards.md]"""
    window: int = Field(3, ge=1)
    """Number of updates that each reading averages. Higher values react later and give fewer false alarms.
    [docs/rewards.md]"""
    kl_factor: float = Field(1.5, gt=1)
    """Factor by which raise_kl_coef multiplies kl_coef. [docs/rewards.md]"""
    judge: float | None = Field(4.0, gt=0)
    """Limit for a held-out judge (a source in rewards with weight 0): standard errors that its mean may fall below its
    best value so far. A reward that rises while the judge falls is over-optimisation (Gao et al. 2023, arXiv
    2210.10760, figure 1). Higher values react later; null turns it off. [docs/rewards.md]"""
    disagreement: float | None = Field(2.0, gt=1)
    """Limit for an ensemble in rewards: standard deviation between its members, as a multiple of that on the SFT
    policy's responses (Coste et al. 2023, arXiv 2310.02743, section 3). Higher values react later; null turns it off.
    [docs/rewards.md]"""
    kl: float | None = Field(0.5, gt=0)
    """Limit of the KL to the SFT policy, in nats per response token; kl_stop counts nats per response in a single
    update. Higher values react later; null turns it off. [docs/rewards.md]"""
    length: float | None = Field(2.0, gt=1)
    """Limit of the mean response length, as a factor above or below that of the SFT policy. Not checked if
    response_length is a range. Higher values react later; null turns it off. [docs/rewards.md]"""
    repetition: float | None = Field(0.1, gt=0, lt=1)
    """Limit of the increase in repeated 3-grams: how far their share within a response may rise above the SFT policy's.
    Higher values react later; null turns it off. [docs/rewards.md]"""
    eos: float | None = Field(0.2, gt=0, lt=1)
    """Limit of the decrease in ended responses: how far the share of responses with a stop token may fall below the SFT
    policy's. Not checked if response_length is a range or stop_token is none. Higher values react later; null turns it
    off. [docs/rewards.md]"""

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
