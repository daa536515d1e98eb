"""Run-time checks of a PPO run: non-finite numbers, degenerate rewards and responses, reward hacking.

Everything here only reads; the caller acts on what it returns or raises.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from operator import add
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from rlhf_cli.config.ppo import SIGNAL_MESSAGES, Action, LengthRange, PPOSettings, Signal, WatchdogSettings
from rlhf_cli.errors import Problem, RLHFError
from rlhf_cli.models.batch import EnsembleScores, MicroBatch
from rlhf_cli.ppo.experience import Experience, Stats
from rlhf_cli.ppo.scores import RunningMeanStd
from rlhf_cli.rewards.function import may_skip_rows

MAX_EQUAL_REWARD_UPDATES = 10  # consecutive ones that end a run
MIN_EOS_FRACTION = 0.05  # below it, the stop token gets no training signal
EQUAL_REWARDS_HINT = "the reward cannot distinguish the responses: inspect them in samples.jsonl, and the reward model"
NOISE_SE = 4.0  # standard errors of a change that may be noise: an update in CI has eight responses


class NonFiniteError(RLHFError):
    """R01. `row` is the row of the rollout with the value, None if it belongs to no row."""

    def __init__(self, step: int, name: str, row: int | None) -> None:
        position = "" if row is None else f" in row {row}"
        text = f"step {step}: {name} is not finite{position}; training stops here"
        hint = "look at the reward of that row" if "score" in name else "lower ppo.learning_rate"
        super().__init__("R01", text, hint=hint)
        self.row = row
        self.args = (step, name, row)  # by which the processes of a group exchange it


def check_finite(name: str, tensor: Tensor, step: int) -> None:
    """Raise NonFiniteError if a tensor, (B, ...) or scalar, contains nan or inf."""
    bad = ~torch.isfinite(tensor)
    if bad.any():
        row = int(bad.nonzero()[0, 0]) if tensor.ndim else None
        raise NonFiniteError(step, name, row)


def check_scores(
    raw: Mapping[str, Tensor],
    ensembles: Mapping[str, EnsembleScores],
    sources: Mapping[str, Any],
    step: int,
) -> None:
    """Raise NonFiniteError for a score, (B,) by source, that is not finite; NaN is no score of `may_skip_rows`."""
    for name, ensemble in ensembles.items():
        for member, scores in ensemble.members.items():
            check_finite(f"score `{name}/{member}`", scores, step)

    for name, scores in raw.items():
        if may_skip_rows(sources.get(name)):
            scores = torch.where(scores.isnan(), 0, scores)
        check_finite(f"score `{name}`", scores, step)


def non_finite_loss(loss: Tensor, micro_batch: MicroBatch, step: int) -> NonFiniteError | None:
    """Return an error if the loss (N,) of a micro-batch is not finite at a token."""
    bad = ~torch.isfinite(loss)
    if not bad.any():
        return None

    token = bad.nonzero()[0, 0]
    row_index = micro_batch.row_index[token]
    row = int(micro_batch.rows[row_index])
    return NonFiniteError(step, "loss", row)


class StopTraining(RLHFError):
    """Ends a run that keeps its best policy. `key` is the setting that set the limit."""

    def __init__(self, code: str, text: str, *, key: str, hint: str) -> None:
        super().__init__(code, text, hint=hint)
        self.key = key


def _length_changed(now: float, first: float, limit: float, error: float) -> bool:
    if first / limit <= now <= first * limit:
        return False
    return abs(now - first) > NOISE_SE * error


# (reading, reference, limit, standard error of their difference) -> True if the reading is beyond its limit.
EXCEEDS: dict[Signal, Callable[[float, float, float, float], bool]] = {
    "judge": lambda now, best, limit, error: best - now > limit * error,
    "disagreement": lambda now, first, limit, error: now > limit * first and now - first > NOISE_SE * error,
    "kl": lambda now, first, limit, error: now > limit,
    "length": _length_changed,
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
    """Checks each update of a run: for failures (`check_update`), and for reward hacking (`check`).

    Reward hacking shows in signals that worsen while the reward looks fine, by the limits of `settings.watchdog`. A
    reading is the mean over the responses of the last `window` updates. Its reference is the first update, whose
    responses are the initial policy's; for a held-out judge (a reward source of weight 0, in `judges`) its best
    reading.
    """

    def __init__(self, settings: PPOSettings, judges: Sequence[str]) -> None:
        self.settings = settings
        self.limits = settings.watchdog
        self.judges = judges
        self.equal_reward_updates = 0  # consecutive updates whose rewards were all equal
        self.warned: list[str] = []  # failures that were reported; each is reported once per run
        self.signals: dict[str, SignalState] = {}

        self.unavailable: set[Signal] = set()
        if isinstance(settings.response_length, LengthRange):
            self.unavailable = {"length", "eos"}
        elif settings.stop_token == "none":
            self.unavailable = {"eos"}

    def check_update(self, step: int, experience: Experience, stats: Stats) -> list[Problem]:
        """Return new warnings about update `step`: equal rewards, responses without EOS, negative KL, skipped steps.

        Raises RLHFError R02 after ten consecutive updates of equal rewards, StopTraining R04 above kl_stop.
        """
        kl = stats["objective/kl_k1"]
        limit = self.settings.kl_stop
        if limit is not None and kl > limit:
            text = f"step {step}: KL to the SFT policy is {kl:.4g} nats per response, over ppo.kl_stop {limit:g}"
            hint = "raise ppo.kl_coef, or lower ppo.learning_rate"
            raise StopTraining("R04", text, key="ppo.kl_stop", hint=hint)

        new: list[Problem] = []
        for name, code, text, hint in self._failures(step, experience, stats):
            if name not in self.warned:
                self.warned.append(name)
                new.append(Problem(code, f"step {step}: {text}", hint=hint))
        return new

    def _failures(self, step: int, experience: Experience, stats: Stats) -> Iterator[tuple[str, str, str, str]]:
        """Yield the failures that update `step` shows: name in checkpoints, code, text and hint."""
        rollout = experience.rollout
        count = len(rollout)

        equal = self._equal_rewards(step, experience.score_result.weighted_sum)
        if equal:
            hint = f"{EQUAL_REWARDS_HINT}; {MAX_EQUAL_REWARD_UPDATES} such updates in a row end the run"
            yield "equal", "R02", equal, hint

        ended = int(rollout.ended.sum())
        fewest = MIN_EOS_FRACTION * count
        if self.settings.stop_token != "none" and ended < fewest:
            text = f"{ended} of {count} responses end with the stop token ({ended / count:.0%})"
            hint = "raise ppo.response_length; check ppo.stop_token, and that SFT's rows end with it (rlhf explain T06)"
            yield "endless", "R03", text, hint

        is_empty = rollout.ended & (rollout.response_lengths == 1)
        empty = int(is_empty.sum())
        if empty >= (1 - MIN_EOS_FRACTION) * count:
            text = f"{empty} of {count} responses are empty, only the stop token ({empty / count:.0%})"
            hint = "check that prompts end as those of SFT's rows do, and its chat template"
            yield "empty", "R03", text, hint

        kl_of_rows = experience.log_ratio.double().sum(1)
        kl = RunningMeanStd.of(kl_of_rows)
        noise = kl.standard_error
        if kl.mean < -NOISE_SE * noise:
            text = f"KL to the SFT policy is {kl.mean:.4g} nats per response, below 0 by more than noise ({noise:.2g})"
            hint = "responses are not sampled from the distribution that gives the log-probs"
            yield "negative", "R04", text, hint

        if stats["policy/skipped_minibatches"]:
            text = f"the mean ratio of a minibatch exceeds ppo.ratio_threshold {self.settings.ratio_threshold:g}"
            hint = "it made no optimizer step; policy/skipped_minibatches counts them; lower ppo.learning_rate"
            yield "skipped", "R08", text, hint

    def _equal_rewards(self, step: int, scores: Tensor) -> str | None:
        """Return a text if all rewards (B,) of the update are equal; count such updates. Raises RLHFError R02."""
        count = len(scores)
        first = float(scores[0])
        is_equal = count > 1 and bool((scores == first).all())
        if not is_equal:
            self.equal_reward_updates = 0
            return None

        self.equal_reward_updates += 1
        text = f"all {count} rewards are {first:.6g}"
        if self.equal_reward_updates >= MAX_EQUAL_REWARD_UPDATES:
            text = f"step {step}: {text}, for {self.equal_reward_updates} updates in a row"
            raise RLHFError("R02", text, hint=EQUAL_REWARDS_HINT)
        return text

    def check(self, step: int, experience: Experience) -> list[Alert]:
        """Return the alerts after update `step`. The next alert of a signal needs another full window."""
        limits = self.limits
        if limits is None:
            return []

        alerts = []
        for signal, source, values in self._readings(experience):
            if signal in self.unavailable or getattr(limits, signal) is None:
                continue
            alert = self._check_signal(limits, step, signal, source, values)
            if alert:
                alerts.append(alert)
        return alerts

    def _readings(self, experience: Experience) -> Iterator[tuple[Signal, str | None, Tensor]]:
        """Yield signal, source and a value for each response, (B,); of a judge for those that it scores."""
        rollout = experience.rollout
        yield "kl", None, experience.log_ratio.sum(1) / experience.mask.sum(1)
        yield "length", None, rollout.response_lengths
        yield "repetition", None, rollout.repetition
        yield "eos", None, rollout.ended

        for name, scores in experience.score_result.scored.items():
            if name in self.judges and len(scores):
                yield "judge", name, scores
        for name, ensemble in experience.score_result.ensembles.items():
            yield "disagreement", name, ensemble.disagreement

    def _check_signal(
        self,
        limits: WatchdogSettings,
        step: int,
        signal: Signal,
        source: str | None,
        values: Tensor,
    ) -> Alert | None:
        """Add the update's values to the signal's window; return an alert if a full window is beyond the limit."""
        update = RunningMeanStd.of(values)
        name = f"{signal} {source}" if source else signal
        state = self.signals.setdefault(name, SignalState(update, update, []))

        recent = [*state.recent, update]
        state.recent = recent[-limits.window :]
        if len(state.recent) < limits.window:
            return None

        reading = reduce(add, state.recent)
        reference = state.best if signal == "judge" else state.first
        limit = getattr(limits, signal)
        error = math.hypot(reading.standard_error, reference.standard_error)

        exceeds = EXCEEDS[signal](reading.mean, reference.mean, limit, error)
        state.best = max(state.best, reading, key=lambda stats: (stats.count > 1, stats.mean))  # one value has no error
        if not exceeds:
            return None

        state.recent = []
        state.fired += 1
        return Alert(
            step,
            signal,
            source,
            reading=reading.mean,
            reference=reference.mean,
            limit=limit,
            action=limits.action_on(signal),
            times=state.fired,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what the next check depends on, without the settings; the keys are those of checkpoints."""
        return {
            "alarms": {"equal": self.equal_reward_updates, "told": self.warned},
            "watchdog": {name: asdict(signal) for name, signal in self.signals.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict()`."""
        self.equal_reward_updates = state["alarms"]["equal"]
        self.warned = state["alarms"]["told"]
        self.signals = TypeAdapter(dict[str, SignalState]).validate_python(state["watchdog"])
