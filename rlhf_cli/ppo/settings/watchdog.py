"""Options of the watchdog: limits and actions against reward hacking."""

from typing import Literal, Self, get_args

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from rlhf_cli.ppo.settings.base import Settings

Signal = Literal["judge", "disagreement", "kl", "length", "repetition", "eos"]
Action = Literal["warn", "raise_kl_coef", "stop"]
SIGNALS: tuple[Signal, ...] = get_args(Signal)
# Message of each signal beyond its limit; the fields are those of a line in watchdog.jsonl.
SAYS: dict[Signal, str] = {
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
    def _acts_on_what_it_watches(self) -> Self:
        for signal in self.actions:
            if getattr(self, signal) is None:
                text = f"watchdog.actions.{signal} has no effect: watchdog.{signal} is null"
                raise PydanticCustomError("C17", "{text}", {"text": text, "hint": f"set a limit for {signal}"})
        acting = {self.action_on(signal) for signal in SIGNALS if getattr(self, signal) is not None}
        if self.kl_factor != type(self).model_fields["kl_factor"].default and "raise_kl_coef" not in acting:
            text = "watchdog.kl_factor has no effect: no action is raise_kl_coef"
            raise PydanticCustomError("C17", text, {"hint": "set watchdog.action: raise_kl_coef"})
        return self
