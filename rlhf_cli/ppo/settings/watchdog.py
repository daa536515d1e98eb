"""What a PPO run is watched for, and what is done about it."""

from typing import Literal, Self, get_args

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from rlhf_cli.ppo.settings.base import Settings

Signal = Literal["judge", "disagreement", "kl", "length", "repetition", "eos"]
Action = Literal["warn", "raise_kl_coef", "stop"]
SIGNALS: tuple[Signal, ...] = get_args(Signal)
# What a signal beyond its limit says; the fields are those of a line of watchdog.jsonl.
SAYS: dict[Signal, str] = {
    "judge": "the held-out judge `{source}` gives {reading:.4g}, at its best it gave {reference:.4g}; "
    "{limit:g} standard errors are allowed",
    "disagreement": "the members of `{source}` are {reading:.4g} apart, of the SFT policy's responses {reference:.4g}; "
    "{limit:g} times that is allowed",
    "kl": "KL to the SFT policy is {reading:.4g} nats a token; {limit:g} is allowed",
    "length": "responses have {reading:.4g} tokens, the SFT policy's {reference:.4g}; {limit:g} times as many or few "
    "are allowed",
    "repetition": "{reading:.1%} of the runs of three tokens are repeated, of the SFT policy's {reference:.1%}; "
    "{limit:.1%} more is allowed",
    "eos": "{reading:.1%} of the responses end by themselves, of the SFT policy's {reference:.1%}; {limit:.1%} less is "
    "allowed",
}
MEASURED = "[`pytest tests/test_watchdog_demo.py -m slow`]"
TABLES = "[`pytest tests/test_watchdog.py`]"


class WatchdogSettings(Settings):
    """A limit for each signal (null: it is not watched), and what happens once it is passed.

    Every reading is a mean over the responses of the last `window` updates, and is held against the SFT policy's own,
    which are those of the first update.
    """

    action: Action = Field(
        "warn",
        description=(
            "What a signal beyond its limit does: warn (R13), raise_kl_coef (times kl_factor), or stop: the run ends "
            f"with R13 and keeps the best policy. Each time is a line of watchdog.jsonl. {TABLES}"
        ),
    )
    actions: dict[Signal, Action] = Field(
        default_factory=dict,
        description=f"Other actions for some signals, e.g. {{judge: stop}}. {TABLES}",
    )
    window: int = Field(3, ge=1, description=f"Updates that a reading is the mean of. {MEASURED}")
    kl_factor: float = Field(1.5, gt=1, description=f"What raise_kl_coef multiplies kl_coef by, each time. {TABLES}")
    judge: float | None = Field(
        4.0,
        gt=0,
        description=(
            "A held-out judge, which is a source in rewards with weight 0: how many standard errors its mean may fall "
            "below its best so far. Over-optimisation is a reward that rises while the judge falls (Gao et al. 2023, "
            f"arXiv 2210.10760, figure 1). {MEASURED}"
        ),
    )
    disagreement: float | None = Field(
        2.0,
        gt=1,
        description=(
            "An ensemble in rewards: how many times the SFT policy's the deviation between its members may be "
            f"(Coste et al. 2023, arXiv 2310.02743, section 3). {TABLES}"
        ),
    )
    kl: float | None = Field(
        0.5,
        gt=0,
        description=(
            "Largest KL to the SFT policy in nats a response token. Not kl_stop: that one is of a whole response, in "
            f"a single update. {MEASURED}"
        ),
    )
    length: float | None = Field(
        2.0,
        gt=1,
        description=(
            "How many times as long, or as short, as the SFT policy's the responses may become; not watched where "
            f"response_length is a range. {MEASURED}"
        ),
    )
    repetition: float | None = Field(
        0.1,
        gt=0,
        lt=1,
        description=(
            "How far the share of runs of three tokens that a response has had before may rise above the SFT "
            f"policy's. {MEASURED}"
        ),
    )
    eos: float | None = Field(
        0.2,
        gt=0,
        lt=1,
        description=(
            "How far the share of responses that end by themselves may fall below the SFT policy's; not watched where "
            f"response_length is a range or stop_token is none. {MEASURED}"
        ),
    )

    def action_on(self, signal: Signal) -> Action:
        """What is done about a signal beyond its limit."""
        return self.actions.get(signal, self.action)

    @model_validator(mode="after")
    def _acts_on_what_it_watches(self) -> Self:
        for signal in self.actions:
            if getattr(self, signal) is None:
                text = f"watchdog.actions.{signal} has no effect: watchdog.{signal} is null"
                raise PydanticCustomError("C17", "{text}", {"text": text, "hint": f"give {signal} a limit"})
        acting = {self.action_on(signal) for signal in SIGNALS if getattr(self, signal) is not None}
        if self.kl_factor != type(self).model_fields["kl_factor"].default and "raise_kl_coef" not in acting:
            text = "watchdog.kl_factor has no effect: no action is raise_kl_coef"
            raise PydanticCustomError("C17", text, {"hint": "set watchdog.action: raise_kl_coef"})
        return self
