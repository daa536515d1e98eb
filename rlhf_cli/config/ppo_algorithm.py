"""Options of the objective: scores, KL penalty, advantages and losses."""

from typing import Literal, Self, get_args

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from rlhf_cli.config.base import TRL, TRL_STEP, Settings


class ObjectiveSettings(Settings):
    """Scores, KL penalty, advantages, clipped losses and early stopping."""

    # Scores
    use_score_scaling: bool = Field(
        False,
        description=(
            "Divide scores by their running standard deviation. Use it if the scale of the reward is unknown or "
            f"drifts. {TRL_STEP}"
        ),
    )
    use_score_norm: bool = Field(
        False, description=f"Also subtract the running mean of the scores; requires use_score_scaling. {TRL_STEP}"
    )
    score_clip: float | None = Field(
        None,
        gt=0,
        description=(
            "Limit of the score: clipped to -score_clip .. score_clip after scaling. Lower values limit the effect of "
            f"outliers. Default: no clipping. {TRL_STEP}"
        ),
    )

    # KL penalty
    kl_coef: float = Field(
        0.05,
        ge=0,
        description=(
            "Coefficient of the KL penalty towards the SFT policy, per nat; with adap_kl_ctrl its initial value. "
            "Higher values keep the policy closer to SFT and gain less reward; lower values allow more of both, and 0 "
            f"lets the policy exploit errors of the reward model. {TRL}"
        ),
    )
    kl_in: Literal["reward", "loss"] = Field(
        "reward",
        description=(
            "Place of the KL penalty: the reward of each token, or the loss. [Ziegler et al. 2019, arXiv 1909.08593, "
            "section 2.1]"
        ),
    )
    kl_estimator: Literal["k1", "k2", "k3", "abs", "full"] = Field(
        "k1",
        description=(
            "Estimator of the KL per token (Schulman 2020, 'Approximating KL divergence'). In the reward, only k1 has "
            f"the policy gradient of the KL; in the loss, use full, k2 or k3. {TRL}"
        ),
    )
    adap_kl_ctrl: bool = Field(
        False,
        description=(
            "Adaptive KL controller: after each update kl_coef *= 1 + clip(objective/kl / target - 1, -0.2, 0.2) * "
            f"episodes / horizon (Ziegler et al. 2019, section 2.2). {TRL}"
        ),
    )
    target: float = Field(
        6.0,
        gt=0,
        description=(
            "KL that adap_kl_ctrl steers towards, in nats per response (objective/kl). Higher values let the policy "
            "move further from SFT. It never stops anything: target_kl ends the epochs of one update, kl_stop ends "
            f"the run. {TRL_STEP}"
        ),
    )
    horizon: int = Field(
        10000,
        gt=0,
        description=(
            f"Number of episodes over which adap_kl_ctrl reacts. Lower values change kl_coef faster. {TRL_STEP}"
        ),
    )
    kl_stop: float | None = Field(
        None,
        gt=0,
        description=(
            "Limit of objective/kl_k1, in nats per response. If an update exceeds it, the run ends with R04 and keeps "
            "the best policy. It is not target_kl (epochs of one update) or target (aim of a controller). Default: no "
            "limit. [TRL 1.12, trl/experimental/ppo/ppo_config.py; it has no such limit]"
        ),
    )

    # Rewards and advantages
    whiten_rewards: bool = Field(
        False, description=f"Scale the token rewards of an update to unit variance and keep their mean. {TRL}"
    )
    advantage_norm: Literal["batch", "none"] = Field(
        "batch",
        description=(
            "Normalisation of the advantages. batch: whiten them over the whole update; none: use them unchanged. "
            "[Huang et al. 2024, arXiv 2403.17031, section 7]"
        ),
    )
    gamma: float = Field(
        1.0, gt=0, le=1, description=f"Discount factor per token. Lower values favour early tokens. {TRL}"
    )
    lam: float = Field(
        0.95,
        ge=0,
        le=1,
        description=(
            "Lambda of generalised advantage estimation. Higher values have less bias and more variance; 1 uses Monte "
            f"Carlo returns. {TRL}"
        ),
    )

    # Loss
    cliprange: float = Field(
        0.2,
        gt=0,
        lt=1,
        description=(
            "Clip range of the probability ratio. Lower values give smaller, steadier updates; higher values let the "
            f"epochs of an update move the policy further. {TRL}"
        ),
    )
    cliprange_high: float | None = Field(
        None,
        gt=0,
        description=(
            "Clip range above 1, if it differs from the one below 1 (Yu et al. 2025, arXiv 2503.14476, section 3.1). "
            "Higher values let unlikely tokens gain probability faster. Default: cliprange. [TRL 1.12, "
            "trl/experimental/ppo/ppo_config.py; one symmetric range there]"
        ),
    )
    dual_clip: float | None = Field(
        None,
        gt=1,
        description=(
            "Second clip for negative advantages A: the objective is at least dual_clip * A (Ye et al. 2020, arXiv "
            "1912.09729, equation 5, with 3). Lower values limit such updates more. Default: off. [TRL 1.12, "
            "trl/experimental/ppo/ppo_config.py; it has no second clip]"
        ),
    )
    cliprange_value: float = Field(
        0.2,
        gt=0,
        description=(
            f"Clip range of the value prediction around its old value. Lower values slow the value model down. {TRL}"
        ),
    )
    vf_coef: float = Field(0.1, ge=0, description=f"Coefficient of the value loss. {TRL}")
    entropy_coef: float = Field(
        0.0,
        ge=0,
        description=(
            "Coefficient of an entropy bonus, per nat (Schulman et al. 2017, arXiv 1707.06347, equation 9). Higher "
            "values keep responses more varied. [OpenRLHF 021d1b09, openrlhf/cli/train_ppo_ray.py]"
        ),
    )
    ptx_coef: float = Field(
        0.0,
        ge=0,
        description=(
            "Coefficient of a language-model loss on rows of data.ptx_data, one row per episode (Ouyang et al. 2022, "
            "arXiv 2203.02155, equation 2, with 27.8). Higher values keep more of the skills in those rows. Default: "
            "0, off. [TRL 1.12, trl/experimental/ppo/ppo_config.py; it has no such loss]"
        ),
    )

    # Early stopping
    early_stopping: bool = Field(
        False,
        description=(
            "End the epochs of an update if the mean of logp_old - logp over the last minibatch of an epoch exceeds "
            f"1.5 * target_kl. {TRL_STEP}"
        ),
    )
    target_kl: float = Field(
        1.0,
        gt=0,
        description=(
            "Limit for early_stopping: KL per token between the policy before and during one update, in nats. Lower "
            "values end updates sooner. It is not target (aim of a controller) or kl_stop (end of the run). "
            f"{TRL_STEP}"
        ),
    )
    ratio_threshold: float | None = Field(
        10.0,
        gt=1,
        description=(
            "Maximum mean probability ratio of a minibatch; above it the optimizer step is skipped (R08). Lower "
            f"values skip more; null never skips. {TRL_STEP}"
        ),
    )

    @model_validator(mode="after")
    def _check_kl_in_loss(self) -> Self:
        if self.kl_in == "loss" and self.kl_estimator in ("k1", "abs"):
            raise PydanticCustomError(
                "C17",
                "kl_estimator {kind} in the loss does not have the gradient of the KL (that of k1 is zero on average)",
                {"kind": self.kl_estimator, "hint": "set kl_estimator: full, k2 or k3"},
            )
        return self

    @model_validator(mode="after")
    def _check_kl_controller(self) -> Self:
        if self.adap_kl_ctrl and self.kl_coef == 0:
            text = "adap_kl_ctrl multiplies kl_coef, which is 0"
            raise PydanticCustomError("C17", text, {"hint": "set kl_coef: 0.2, the default of TRL's controller"})
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
PAGE = "[docs/rewards.md]"


class WatchdogSettings(Settings):
    """Limit of each signal (null: not watched), and the action if it is exceeded.

    A reading is the mean over the responses of the last `window` updates. It is compared with the SFT policy, that is,
    with the responses of the first update.
    """

    action: Action = Field(
        "warn",
        description=(
            "Action if a signal exceeds its limit: warn (R13), raise_kl_coef (multiply kl_coef by kl_factor), or stop "
            f"(end the run with R13 and keep the best policy). Each time, a line is added to watchdog.jsonl. {PAGE}"
        ),
    )
    actions: dict[Signal, Action] = Field(
        default_factory=dict,
        description=f"Actions of individual signals that differ from action, for example {{judge: stop}}. {PAGE}",
    )
    window: int = Field(
        3,
        ge=1,
        description=(
            "Number of updates that each reading averages. Higher values react later and give fewer false alarms. "
            f"{PAGE}"
        ),
    )
    kl_factor: float = Field(1.5, gt=1, description=f"Factor by which raise_kl_coef multiplies kl_coef. {PAGE}")
    judge: float | None = Field(
        4.0,
        gt=0,
        description=(
            "Limit for a held-out judge (a source in rewards with weight 0): standard errors that its mean may fall "
            "below its best value so far. A reward that rises while the judge falls is over-optimisation (Gao et al. "
            f"2023, arXiv 2210.10760, figure 1). Higher values react later; null turns it off. {PAGE}"
        ),
    )
    disagreement: float | None = Field(
        2.0,
        gt=1,
        description=(
            "Limit for an ensemble in rewards: standard deviation between its members, as a multiple of that on the "
            "SFT policy's responses (Coste et al. 2023, arXiv 2310.02743, section 3). Higher values react later; null "
            f"turns it off. {PAGE}"
        ),
    )
    kl: float | None = Field(
        0.5,
        gt=0,
        description=(
            "Limit of the KL to the SFT policy, in nats per response token; kl_stop counts nats per response in a "
            f"single update. Higher values react later; null turns it off. {PAGE}"
        ),
    )
    length: float | None = Field(
        2.0,
        gt=1,
        description=(
            "Limit of the mean response length, as a factor above or below that of the SFT policy. Not checked if "
            f"response_length is a range. Higher values react later; null turns it off. {PAGE}"
        ),
    )
    repetition: float | None = Field(
        0.1,
        gt=0,
        lt=1,
        description=(
            "Limit of the increase in repeated 3-grams: how far their share within a response may rise above the SFT "
            f"policy's. Higher values react later; null turns it off. {PAGE}"
        ),
    )
    eos: float | None = Field(
        0.2,
        gt=0,
        lt=1,
        description=(
            "Limit of the decrease in ended responses: how far the share of responses with a stop token may fall "
            "below the SFT policy's. Not checked if response_length is a range or stop_token is none. Higher values "
            f"react later; null turns it off. {PAGE}"
        ),
    )

    def action_on(self, signal: Signal) -> Action:
        """Return the action for a signal beyond its limit."""
        return self.actions.get(signal, self.action)

    @model_validator(mode="after")
    def _check_actions(self) -> Self:
        for signal in self.actions:
            if getattr(self, signal) is None:
                text = f"watchdog.actions.{signal} has no effect: watchdog.{signal} is null"
                raise PydanticCustomError("C17", "{text}", {"text": text, "hint": f"set a limit for {signal}"})
        acting = {self.action_on(signal) for signal in SIGNALS if getattr(self, signal) is not None}
        if self.kl_factor != type(self).model_fields["kl_factor"].default and "raise_kl_coef" not in acting:
            text = "watchdog.kl_factor has no effect: no action is raise_kl_coef"
            raise PydanticCustomError("C17", text, {"hint": "set watchdog.action: raise_kl_coef"})
        return self
