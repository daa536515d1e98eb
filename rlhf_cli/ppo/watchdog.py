"""Signs that the policy games its reward, where its reward alone looks fine. Reads only; who asks it acts.

A reading is the mean over the responses of the last `window` updates. It is held against the first update's responses,
which are the SFT policy's own, or, of a held-out judge, against the judge's best reading so far.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from rlhf_cli.ppo.moments import Moments
from rlhf_cli.ppo.records import Experience
from rlhf_cli.ppo.settings import LengthRange, PPOSettings, WatchdogSettings
from rlhf_cli.ppo.settings.watchdog import SAYS, SIGNALS, Action, Signal

NOISE = 4.0  # standard errors that a reading must have moved besides: an update of a run in CI has eight responses

# Whether a reading `now` is beyond a limit, given what it is held against and the standard error of the difference.
BEYOND: dict[Signal, Callable[[float, float, float, float], bool]] = {
    "judge": lambda now, best, limit, error: best - now > limit * error,
    "disagreement": lambda now, first, limit, error: now > limit * first and now - first > NOISE * error,
    "kl": lambda now, first, limit, error: now > limit,
    "length": lambda now, first, limit, error: (
        not first / limit <= now <= first * limit and abs(now - first) > NOISE * error
    ),
    "repetition": lambda now, first, limit, error: now - first > max(limit, NOISE * error),
    "eos": lambda now, first, limit, error: first - now > max(limit, NOISE * error),
}


@dataclass(frozen=True)
class Firing:
    """A signal beyond its limit after update `step`, and what the settings say is to be done."""

    step: int
    signal: Signal
    source: str | None  # the name of the judge or of the ensemble
    reading: float
    reference: float  # what it is held against; with kl, which is held against its limit alone, the first update's
    limit: float
    action: Action
    times: int  # that this signal of this source has fired by now

    @property
    def text(self) -> str:
        """In a sentence."""
        return f"step {self.step}: {SAYS[self.signal].format(**asdict(self))}"


@dataclass
class Watch:
    """One signal of one source."""

    first: Moments  # of the first update
    best: Moments  # with the highest mean, of the first update and all whole windows
    recent: list[Moments]  # of the updates of the window, and of none before a firing
    fired: int = 0


class Watchdog:
    """Watches a run by `settings.watchdog`, None: not at all. `judges` are the held-out sources, of weight 0."""

    def __init__(self, settings: PPOSettings, judges: Sequence[str]) -> None:
        self.settings, self.judges = settings.watchdog, judges
        drawn = isinstance(settings.response_length, LengthRange)
        self.blind: set[Signal] = {"length", "eos"} if drawn else {"eos"} if settings.stop_token == "none" else set()
        self.watches: dict[str, Watch] = {}

    def look(self, step: int, experience: Experience) -> list[Firing]:
        """What fires after update `step`. A signal that did fires again only after another whole window."""
        if (settings := self.settings) is None:
            return []
        readings = self._readings(settings, experience)
        found = [self._look(settings, step, signal, source, now) for (signal, source), now in readings.items()]
        return [firing for firing in found if firing]

    def _readings(self, settings: WatchdogSettings, experience: Experience) -> dict[tuple[Signal, str | None], Tensor]:
        """Of each signal that is watched, by its source where it has one: a number for each response, (B,)."""
        rollout, scored, mask = experience.rollout, experience.scored, experience.mask
        kl = torch.where(mask, experience.logprobs - experience.ref_logprobs, 0)
        found: dict[tuple[Signal, str | None], Tensor] = {
            ("kl", None): kl.sum(1) / mask.sum(1),
            ("length", None): rollout.response_lengths,
            ("repetition", None): rollout.repetition,
            ("eos", None): rollout.ended,
            **{("judge", name): scored.sources[name] for name in self.judges},
            **{("disagreement", name): said.disagreement for name, said in scored.opinions.items()},
        }
        watched = {signal for signal in SIGNALS if getattr(settings, signal) is not None} - self.blind
        return {key: now for key, now in found.items() if key[0] in watched}

    def _look(
        self, settings: WatchdogSettings, step: int, signal: Signal, source: str | None, now: Tensor
    ) -> Firing | None:
        update, limit = Moments.of(now), getattr(settings, signal)
        watch = self.watches.setdefault(f"{signal} {source or ''}".strip(), Watch(update, update, []))
        watch.recent = [*watch.recent, update][-settings.window :]
        if len(watch.recent) < settings.window:
            return None
        reading = reduce(add, watch.recent)
        against = watch.best if signal == "judge" else watch.first
        beyond = BEYOND[signal](reading.mean, against.mean, limit, math.hypot(reading.error, against.error))
        watch.best = max(watch.best, reading, key=lambda moments: moments.mean)
        if not beyond:
            return None
        watch.recent, watch.fired = [], watch.fired + 1
        action = settings.action_on(signal)
        return Firing(step, signal, source, reading.mean, against.mean, limit, action, watch.fired)

    def state_dict(self) -> dict[str, Any]:
        """All that the next look depends on, but the settings."""
        return {name: asdict(watch) for name, watch in self.watches.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`."""
        self.watches = {
            name: Watch(
                Moments(**told["first"]), Moments(**told["best"]), [Moments(**one) for one in told["recent"]],
                told["fired"],
            )
            for name, told in state.items()
        }  # fmt: skip
