"""Run-time checks of a PPO run: non-finite numbers, degenerate rewards and responses, reward hacking.

Everything here only reads; the caller acts on what it returns or raises.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from rlhf_cli.config.ppo_algorithm import SIGNAL_MESSAGES, SIGNALS, Action, Signal, WatchdogSettings
from rlhf_cli.config.ppo_batches import LengthRange
from rlhf_cli.config.ppo_options import PPOSettings
from rlhf_cli.errors import Problem, RLHFError
from rlhf_cli.models.batch import MicroBatch
from rlhf_cli.ppo.experience import Experience
from rlhf_cli.ppo.metrics import Stats
from rlhf_cli.ppo.scores import RunningMeanStd

MAX_EQUAL_REWARD_UPDATES = 10  # consecutive ones that end a run
MIN_EOS_FRACTION = 0.05  # below it, the stop token gets no training signal
NOISE_SE = 4.0  # standard errors of a change that may be noise: an update in CI has eight responses


class NonFiniteError(RLHFError):
    """R01. `row` is the row of the rollout with the value, None if it belongs to no row."""

    def __init__(self, step: int, name: str, row: int | None, hint: str) -> None:
        position = "" if row is None else f" in row {row}"
        super().__init__("R01", f"step {step}: {name} is not finite{position}; training stops here", hint=hint)
        self.row = row


def check_finite(tensors: Mapping[str, Tensor], step: int) -> None:
    """Raise NonFiniteError for the first tensor, (B, ...) or scalar, that contains nan or inf."""
    for name, tensor in tensors.items():
        bad = ~torch.isfinite(tensor)
        if bad.any():
            row = int(bad.nonzero()[0, 0]) if tensor.ndim else None
            hint = "look at the reward of that row" if "score" in name else "lower ppo.learning_rate"
            raise NonFiniteError(step, name, row, hint)


def check_finite_loss(loss: Tensor, micro_batch: MicroBatch, step: int) -> None:
    """Raise NonFiniteError if the loss (N,) of a micro-batch is not finite at a token."""
    bad = ~torch.isfinite(loss)
    if bad.any():
        row = int(micro_batch.rows[micro_batch.row_index[bad.nonzero()[0, 0]]])
        raise NonFiniteError(step, "loss", row, "lower ppo.learning_rate")


def check_finite_weights(norms: Mapping[str, Tensor], step: int) -> None:
    """Raise NonFiniteError for a model whose weights have a non-finite norm, so that it is never saved."""
    for name, norm in norms.items():
        if not torch.isfinite(norm):
            raise NonFiniteError(step, f"a weight of the {name} model", None, "lower ppo.learning_rate")


class StopTraining(RLHFError):
    """Ends a run that keeps its best policy. `key` is the setting that set the limit."""

    def __init__(self, code: str, text: str, *, key: str, hint: str) -> None:
        super().__init__(code, text, hint=hint)
        self.key = key


@dataclass
class TrainingMonitor:
    """Checks each update for equal rewards (R02), responses without EOS (R03), KL out of bounds (R04), skips (R08)."""

    equal_reward_updates: int = 0  # consecutive updates whose rewards were all equal
    reported: list[str] = field(default_factory=list)  # checks that have warned; each warns once per run

    def check(self, step: int, experience: Experience, stats: Stats, settings: PPOSettings) -> list[Problem]:
        """Return new warnings about update `step`.

        Raises RLHFError R02 after ten consecutive updates of equal rewards, StopTraining R04 above kl_stop.
        """
        kl = stats["objective/kl_k1"]
        if settings.kl_stop is not None and kl > settings.kl_stop:
            text = (
                f"step {step}: KL to the SFT policy is {kl:.4g} nats a response, over ppo.kl_stop {settings.kl_stop:g}"
            )
            raise StopTraining("R04", text, key="ppo.kl_stop", hint="raise ppo.kl_coef, or lower ppo.learning_rate")
        problems = {
            "equal": self._equal_rewards(step, experience),
            "endless": self._missing_eos(step, experience, settings),
            "empty": self._empty_responses(step, experience),
            "negative": self._negative_kl(step, experience),
            "skipped": self._skipped_minibatches(step, stats, settings),
        }
        new = {name: problem for name, problem in problems.items() if problem and name not in self.reported}
        self.reported += new
        return list(new.values())

    def _equal_rewards(self, step: int, experience: Experience) -> Problem | None:
        scores = experience.score_result.weighted_sum
        if len(scores) < 2 or not bool((scores == scores[0]).all()):
            self.equal_reward_updates = 0
            return None
        self.equal_reward_updates += 1
        text = f"step {step}: all {len(scores)} rewards are {float(scores[0]):.6g}"
        hint = "the reward does not tell responses apart: look at them in samples.jsonl, and at the reward model"
        if self.equal_reward_updates >= MAX_EQUAL_REWARD_UPDATES:
            raise RLHFError("R02", f"{text}, for {self.equal_reward_updates} updates in a row", hint=hint)
        return Problem("R02", text, hint=f"{hint}; {MAX_EQUAL_REWARD_UPDATES} such updates in a row end the run")

    def _missing_eos(self, step: int, experience: Experience, settings: PPOSettings) -> Problem | None:
        ended, count = int(experience.rollout.ended.sum()), len(experience.rollout)
        if settings.stop_token == "none" or ended >= MIN_EOS_FRACTION * count:
            return None
        text = f"step {step}: {ended} of {count} responses end with the stop token ({ended / count:.0%})"
        hint = "raise ppo.response_length; check ppo.stop_token, and that SFT's rows end with it (rlhf explain T06)"
        return Problem("R03", text, hint=hint)

    def _empty_responses(self, step: int, experience: Experience) -> Problem | None:
        rollout = experience.rollout
        empty, count = int((rollout.ended & (rollout.response_lengths == 1)).sum()), len(rollout)
        if empty < (1 - MIN_EOS_FRACTION) * count:
            return None
        text = f"step {step}: {empty} of {count} responses are empty, the stop token alone ({empty / count:.0%})"
        return Problem("R03", text, hint="check that prompts end as those of SFT's rows do, and its chat template")

    def _negative_kl(self, step: int, experience: Experience) -> Problem | None:
        rows = torch.where(experience.mask, experience.logprobs - experience.ref_logprobs, 0).double().sum(1)
        kl = float(rows.mean())
        error = float(rows.std() / len(rows) ** 0.5) if len(rows) > 1 else float("inf")
        if kl >= -NOISE_SE * error:
            return None
        text = (
            f"step {step}: KL to the SFT policy is {kl:.4g} nats a response, below 0 by more than noise ({error:.2g})"
        )
        return Problem("R04", text, hint="responses are not drawn from the distribution that log-probs are read from")

    def _skipped_minibatches(self, step: int, stats: Stats, settings: PPOSettings) -> Problem | None:
        if not stats["policy/skipped_minibatches"]:
            return None
        text = f"step {step}: the mean ratio of a minibatch passed ppo.ratio_threshold {settings.ratio_threshold:g}"
        hint = "it made no optimizer step; policy/skipped_minibatches counts them; lower ppo.learning_rate"
        return Problem("R08", text, hint=hint)

    def state_dict(self) -> dict[str, Any]:
        """Return what the next check depends on; the keys are those of checkpoints."""
        return {"equal": self.equal_reward_updates, "told": self.reported}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict()`."""
        self.equal_reward_updates, self.reported = state["equal"], state["told"]


# (reading, reference, limit, standard error of their difference) -> True if the reading is beyond its limit.
EXCEEDS: dict[Signal, Callable[[float, float, float, float], bool]] = {
    "judge": lambda now, best, limit, error: best - now > limit * error,
    "disagreement": lambda now, first, limit, error: now > limit * first and now - first > NOISE_SE * error,
    "kl": lambda now, first, limit, error: now > limit,
    "length": lambda now, first, limit, error: (
        not first / limit <= now <= first * limit and abs(now - first) > NOISE_SE * error
    ),
    "repetition": lambda now, first, limit, error: now - first > max(limit, NOISE_SE * error),
    "eos": lambda now, first, limit, error: first - now > max(limit, NOISE_SE * error),
}


@dataclass(frozen=True)
class Alert:
    """A signal beyond its limit after update `step`, with the action that the settings ask for."""

    step: int
    signal: Signal
    source: str | None  # name of the held-out judge or the ensemble
    reading: float
    reference: float  # the first update's value, of a judge its best; kl is compared with its limit only
    limit: float
    action: Action
    times: int  # alerts of this signal and source so far

    @property
    def text(self) -> str:
        """Warning text."""
        return f"step {self.step}: {SIGNAL_MESSAGES[self.signal].format(**asdict(self))}"


@dataclass
class SignalState:
    """Statistics of one signal of one source."""

    first: RunningMeanStd  # of the first update
    best: RunningMeanStd  # of the first update or the full window with the highest mean
    recent: list[RunningMeanStd]  # of the updates in the window, cleared by an alert
    fired: int = 0  # number of alerts


class Watchdog:
    """Detects reward hacking: signals that worsen while the reward looks fine, by the limits of `settings.watchdog`.

    A reading is the mean over the responses of the last `window` updates. Its reference is the first update, whose
    responses are the SFT policy's; for a held-out judge (a reward source of weight 0, in `judges`) its best reading.
    """

    def __init__(self, settings: PPOSettings, judges: Sequence[str]) -> None:
        self.settings, self.judges = settings.watchdog, judges
        sampled_length = isinstance(settings.response_length, LengthRange)
        no_eos = settings.stop_token == "none"
        self.unavailable: set[Signal] = {"length", "eos"} if sampled_length else {"eos"} if no_eos else set()
        self.signals: dict[str, SignalState] = {}

    def check(self, step: int, experience: Experience) -> list[Alert]:
        """Return the alerts after update `step`. The next alert of a signal needs another full window."""
        if (settings := self.settings) is None:
            return []
        readings = self._readings(settings, experience)
        alerts = [self._check(settings, step, signal, source, now) for (signal, source), now in readings.items()]
        return [alert for alert in alerts if alert]

    def _readings(self, settings: WatchdogSettings, experience: Experience) -> dict[tuple[Signal, str | None], Tensor]:
        """Return a value for each response, (B,), by enabled signal and source."""
        rollout, scores, mask = experience.rollout, experience.score_result, experience.mask
        kl = torch.where(mask, experience.logprobs - experience.ref_logprobs, 0)
        readings: dict[tuple[Signal, str | None], Tensor] = {
            ("kl", None): kl.sum(1) / mask.sum(1),
            ("length", None): rollout.response_lengths,
            ("repetition", None): rollout.repetition,
            ("eos", None): rollout.ended,
            **{("judge", name): scores.raw[name] for name in self.judges},
            **{("disagreement", name): ensemble.disagreement for name, ensemble in scores.ensembles.items()},
        }
        enabled = {signal for signal in SIGNALS if getattr(settings, signal) is not None} - self.unavailable
        return {key: now for key, now in readings.items() if key[0] in enabled}

    def _check(
        self, settings: WatchdogSettings, step: int, signal: Signal, source: str | None, now: Tensor
    ) -> Alert | None:
        update, limit = RunningMeanStd.of(now), getattr(settings, signal)
        state = self.signals.setdefault(f"{signal} {source or ''}".strip(), SignalState(update, update, []))
        state.recent = [*state.recent, update][-settings.window :]
        if len(state.recent) < settings.window:
            return None
        reading = reduce(add, state.recent)
        reference = state.best if signal == "judge" else state.first
        error = math.hypot(reading.standard_error, reference.standard_error)
        exceeds = EXCEEDS[signal](reading.mean, reference.mean, limit, error)
        state.best = max(state.best, reading, key=lambda stats: stats.mean)
        if not exceeds:
            return None
        state.recent, state.fired = [], state.fired + 1
        action = settings.action_on(signal)
        return Alert(step, signal, source, reading.mean, reference.mean, limit, action, state.fired)

    def state_dict(self) -> dict[str, Any]:
        """Return what the next check depends on, without the settings."""
        return {name: asdict(signal) for name, signal in self.signals.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict()`."""
        self.signals = {
            name: SignalState(
                RunningMeanStd(**saved["first"]),
                RunningMeanStd(**saved["best"]),
                [RunningMeanStd(**stats) for stats in saved["recent"]],
                saved["fired"],
            )
            for name, saved in state.items()
        }
