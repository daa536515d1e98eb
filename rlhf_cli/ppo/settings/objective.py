"""From scores to the loss: what is maximised, and how far a step may go."""

from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from rlhf_cli.ppo.settings.base import TRL, TRL_STEP, Settings


class ObjectiveSettings(Settings):
    """Rewards, advantages, the clipped losses and their brakes."""

    # Scores
    use_score_scaling: bool = Field(
        False, description=f"Divide scores by their running standard deviation over the run so far. {TRL_STEP}"
    )
    use_score_norm: bool = Field(
        False, description=f"Subtract the running mean as well; goes with use_score_scaling. {TRL_STEP}"
    )
    score_clip: float | None = Field(
        None, gt=0, description=f"Scores are clipped to -score_clip .. score_clip, after the scaling. {TRL_STEP}"
    )

    # The KL penalty
    kl_coef: float = Field(
        0.05,
        ge=0,
        description=(
            "Coefficient of the KL penalty to the SFT policy, per nat; its first value with adap_kl_ctrl. Higher ones "
            "hold the policy near SFT, with less reward; lower ones allow more of both, and 0 lets it find what the "
            f"reward model gets wrong. {TRL}"
        ),
    )
    kl_in: Literal["reward", "loss"] = Field(
        "reward",
        description=(
            "Where the KL penalty goes: into each token's reward, or into the loss. "
            "[Ziegler et al. 2019, arXiv 1909.08593, section 2.1]"
        ),
    )
    kl_estimator: Literal["k1", "k2", "k3", "abs", "full"] = Field(
        "k1",
        description=(
            "Estimator of a token's KL (Schulman 2020, 'Approximating KL divergence'). In the reward only k1 has the "
            f"KL's policy gradient. In the loss: full, k2 or k3. {TRL}"
        ),
    )
    adap_kl_ctrl: bool = Field(
        False,
        description=(
            "After each update kl_coef *= 1 + clip(objective/kl / target - 1, -0.2, 0.2) * episodes / horizon "
            f"(Ziegler et al. 2019, section 2.2). {TRL}"
        ),
    )
    target: float = Field(
        6.0,
        gt=0,
        description=(
            "objective/kl, nats a response, that adap_kl_ctrl steers to over the run; it stops nothing. Not target_kl "
            f"(one update's epochs) nor kl_stop (the run's end). {TRL_STEP}"
        ),
    )
    horizon: int = Field(10000, gt=0, description=f"Episodes over which adap_kl_ctrl reacts. {TRL_STEP}")
    kl_stop: float | None = Field(
        None,
        gt=0,
        description=(
            "The run ends with R04, and keeps the best policy, when an update's objective/kl_k1, nats a response, "
            "passes this. Not target_kl (one update's epochs) nor target (a controller's aim). "
            "[`pytest tests/test_stage_ppo_alarms.py -k r04`]"
        ),
    )

    # Rewards and advantages
    whiten_rewards: bool = Field(
        False, description=f"Scale an update's token rewards to unit variance, mean kept. {TRL}"
    )
    advantage_norm: Literal["batch", "none"] = Field(
        "batch",
        description="Whiten advantages over the whole update. [Huang et al. 2024, arXiv 2403.17031, section 7]",
    )
    gamma: float = Field(1.0, gt=0, le=1, description=f"Discount. {TRL}")
    lam: float = Field(0.95, ge=0, le=1, description=f"Lambda of generalised advantage estimation. {TRL}")

    # The loss
    cliprange: float = Field(
        0.2,
        gt=0,
        lt=1,
        description=(
            "Clip range of the probability ratio. Lower ones stop a token's push sooner: smaller, steadier updates; "
            f"higher ones let the passes of an update go farther. {TRL}"
        ),
    )
    cliprange_high: float | None = Field(
        None,
        gt=0,
        description=(
            "Clip range above 1, where it differs from the one below (Yu et al. 2025, arXiv 2503.14476, section 3.1); "
            "none: cliprange. [`pytest tests/test_ppo_options_loss.py -k cliprange_high`]"
        ),
    )
    dual_clip: float | None = Field(
        None,
        gt=1,
        description=(
            "Where the advantage A is negative, the objective is no lower than dual_clip * A "
            "(Ye et al. 2020, arXiv 1912.09729, equation 5; 3 there). "
            "[`pytest tests/test_ppo_options_loss.py -k dual_clip`]"
        ),
    )
    cliprange_value: float = Field(0.2, gt=0, description=f"Clip range of the value around its old prediction. {TRL}")
    vf_coef: float = Field(0.1, ge=0, description=f"Coefficient of the value loss. {TRL}")
    entropy_coef: float = Field(
        0.0,
        ge=0,
        description=(
            "Coefficient of an entropy bonus, per nat (Schulman et al. 2017, arXiv 1707.06347, equation 9). "
            "[OpenRLHF 021d1b09, openrlhf/cli/train_ppo_ray.py]"
        ),
    )
    ptx_coef: float = Field(
        0.0,
        ge=0,
        description=(
            "Coefficient of the language-model loss on rows of data.ptx_data, as many a minibatch as it has episodes "
            "(Ouyang et al. 2022, arXiv 2203.02155, equation 2; 27.8 there). "
            "[`pytest tests/test_ppo_options_loss.py -k ptx`]"
        ),
    )

    # Brakes
    early_stopping: bool = Field(
        False,
        description=(
            "End an update's epochs when the mean of logp_old - logp over the last minibatch of an epoch passes "
            f"1.5 * target_kl. {TRL_STEP}"
        ),
    )
    target_kl: float = Field(
        1.0,
        gt=0,
        description=(
            "KL of a token between the policy before and within one update, in nats, that early_stopping goes by. "
            f"Not target (a controller's aim for the run) nor kl_stop (the run's end). {TRL_STEP}"
        ),
    )
    ratio_threshold: float | None = Field(
        10.0, gt=1, description=f"A minibatch whose mean ratio passes this makes no optimizer step. {TRL_STEP}"
    )

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
    def _controller_has_something_to_multiply(self) -> Self:
        if self.adap_kl_ctrl and self.kl_coef == 0:
            text = "adap_kl_ctrl multiplies kl_coef, and 0 stays 0"
            raise PydanticCustomError("C17", text, {"hint": "set kl_coef: 0.2, where TRL's controller began"})
        return self
