"""Healthy ranges of PPO's metrics: a table of rules, and the sentence and advice that each gives for a run."""

import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

from rlhf_cli.config.ppo import PPOSettings, WatchdogSettings
from rlhf_cli.jsonl import is_number
from rlhf_cli.report.formats import count, number
from rlhf_cli.runs.read import Stage
from rlhf_cli.runs.settings import value_text
from rlhf_cli.statistics import FEWEST, best_of_n_kl, end_noise, gained, last_quarter
from rlhf_cli.trees import at

# Advice is text such as "raise ppo.kl_coef, or lower ppo.learning_rate; more text"

KEY = r"\b(?:sft|reward|rewards|ppo|models|eval)\.[\w.]*\w"


def key_changes(advice: str) -> dict[str, str]:
    """Return {key: raise, lower or set} of a recommendation."""
    found = {}
    direction = ""
    for word in re.findall(rf"\b(?:raise|lower|set)\b|{KEY}", advice):
        if "." not in word:
            direction = word
        elif direction:
            found[word] = direction

    return found


def with_values(advice: str, config: Mapping[str, Any] | None) -> str:
    """Return the advice with the current value of each key: `lower ppo.learning_rate (here 0.003)`."""

    def describe(key: re.Match[str]) -> str:
        value = at(config, key[0])
        if value is None or isinstance(value, Mapping):
            return key[0]
        return f"{key[0]} (here {value_text(value)})"

    return re.sub(rf"{KEY}(?!: )", describe, advice)


def reconcile(recommendations: Sequence[tuple[str, str]]) -> list[str]:
    """Return the advice for each (finding, advice), the most important first, without contradictions.

    A recommendation that changes a key against an earlier one is replaced by the earlier one.
    """
    decided: dict[str, tuple[str, str]] = {}  # by key: the finding that decided first, and the direction
    reconciled = []
    for name, advice in recommendations:
        wanted = key_changes(advice)
        contradicted = [key for key in wanted if key in decided and decided[key][1] != wanted[key]]
        if contradicted:
            key = contradicted[0]
            first, direction = decided[key]
            quoted = f"\N{LEFT DOUBLE QUOTATION MARK}{first}\N{RIGHT DOUBLE QUOTATION MARK}"
            reconciled.append(f"fix {quoted} first: {direction} {key}")
            continue

        reconciled.append(advice)
        for key, direction in wanted.items():
            decided.setdefault(key, (name, direction))
    return reconciled


# Rules

INF = math.inf


@dataclass(frozen=True)
class BoundInputs:
    """What the bounds of an update depend on."""

    first: float  # the metric's first value
    limit: float  # of the rule
    length: float = 0.0  # response tokens


# The bounds that rules.toml names.
BOUNDS: dict[str, Callable[[BoundInputs], float]] = {
    "first": lambda inputs: inputs.first,
    "tenth_of_first": lambda inputs: 0.1 * inputs.first,
    "first_over_limit": lambda inputs: inputs.first / inputs.limit,
    "first_times_limit": lambda inputs: inputs.first * inputs.limit,
    "first_minus_limit": lambda inputs: inputs.first - inputs.limit,
    "first_plus_limit": lambda inputs: inputs.first + inputs.limit,
    "limit_times_length": lambda inputs: inputs.limit * inputs.length,
    "twice_limit": lambda inputs: 2 * inputs.limit,
}


@dataclass(frozen=True)
class Rule:
    """A metric's healthy range, and the advice below and above it: a table of rules.toml, which explains the fields."""

    key: str
    title: str
    unit: str = ""
    words: str = ""
    low: float | str = -INF
    high: float | str = INF
    watchdog: str | None = None
    alarm_low: float = -INF
    alarm_high: float = INF
    min_updates: int = FEWEST
    exact: bool = False
    if_low: str = ""
    if_high: str = ""

    @property
    def has_range(self) -> bool:
        return (self.low, self.high) != (-INF, INF)

    def bounds(self, inputs: BoundInputs) -> tuple[float, float]:
        """Return the range of an update, infinite if open."""
        return _bound(self.low, inputs), _bound(self.high, inputs)


def _bound(bound: float | str, inputs: BoundInputs) -> float:
    return BOUNDS[bound](inputs) if isinstance(bound, str) else bound


_TABLE = tomllib.loads(Path(__file__).with_name("rules.toml").read_text(encoding="utf-8"))
RULES = tuple(Rule(**fields) for fields in _TABLE["rules"])
CAUSES: list[str] = _TABLE["causes"]  # keys of the rules by the priority of their advice
# Advice if the score does not rise: the policy is still near the SFT policy, or has moved.
IF_NEAR = (
    "raise ppo.learning_rate, or lower ppo.kl_coef; or train for more updates; or check the reward model: its scores "
    "may not distinguish these answers"
)
FROM_TO = "from the first tenth's mean to the last quarter's"  # of statistics.gained
IF_FAR = "raise ppo.gradient_accumulation_steps; more episodes per update reduce the noise"


def limit_of(rule: Rule, config: Mapping[str, Any] | None) -> float:
    """Return the limit of the rule's watchdog signal in this config, or max_grad_norm; else the default."""
    path = "ppo.max_grad_norm"
    default = PPOSettings.model_fields["max_grad_norm"].default
    if rule.watchdog:
        path = f"ppo.watchdog.{rule.watchdog}"
        default = WatchdogSettings.model_fields[rule.watchdog].default
    value = at(config, path)

    return float(value if is_number(value) else default)


# Readings: the rules applied to a run

Verdict = Literal["good", "look", "bad", "none"]  # none: not judged
SEVERITY = ("none", "good", "early", "stale", "look", "bad")  # of verdicts, and of the grades of the diagnosis
ILL = ("look", "bad")  # those that need attention
Series = list[tuple[int, float]]  # step and value
NEAR = best_of_n_kl(2)  # nats per response: a policy that is no farther from SFT than its best of two has hardly moved


class Band(NamedTuple):
    """Healthy range: the bounds of each update, infinite if open."""

    low: list[float]
    high: list[float]


class Judgement(NamedTuple):
    """A verdict on a metric, its reason as a sentence, and the advice, empty if it is healthy."""

    verdict: Verdict
    sentence: str
    advice: str = ""


@dataclass(frozen=True)
class Reading:
    """A metric over a run: its points, healthy range, and a judgement of them."""

    key: str
    title: str
    rule: Rule
    points: Series
    band: Band | None
    verdict: Verdict
    judged: str  # a sentence, or two
    advice: str  # empty if healthy

    @property
    def sentence(self) -> str:
        """Return the course of the metric and the judgement."""
        return f"{course(self.points)} {self.judged}".strip()


def readings(ppo: Stage) -> list[Reading]:
    """Return a reading for each metric of PPO's log that has a rule; their advice has no contradictions."""
    lengths = dict(ppo.series("objective/response_length"))
    found = []
    for rule in RULES:
        for key, title in metrics_of(rule, ppo):
            points = ppo.series(key)
            if rule.watchdog == "kl":  # its limit is per token
                points = [(step, value) for step, value in points if step in lengths]
            if points:
                found.append(_reading(rule, key, title, points=points, lengths=lengths, ppo=ppo))

    ordered = by_cause(found)
    advice_of = reconcile([(reading.title, reading.advice) for reading in ordered])
    settled = {reading.key: advice for reading, advice in zip(ordered, advice_of, strict=True)}
    return [replace(reading, advice=settled[reading.key]) for reading in found]


def _reading(rule: Rule, key: str, title: str, *, points: Series, lengths: Mapping[int, float], ppo: Stage) -> Reading:
    """Judge a metric by its range, or by its trend if it has none."""
    band = None
    if not rule.has_range:
        judgement = _judge_trend(rule, points, ppo)
    elif rule.watchdog in ("length", "eos") and isinstance(ppo.setting("ppo.response_length"), Mapping):
        judgement = Judgement("none", "")  # lengths are sampled
    else:
        band = _band(rule, points, lengths, ppo)
        judgement = _judge_range(rule, points, band, ppo)
    verdict, judged, advice = judgement

    return Reading(key, title, rule, points=points, band=band, verdict=verdict, judged=judged, advice=advice)


def by_cause(found: Sequence[Reading]) -> list[Reading]:
    """Return the readings, the most severe first, then the likelier causes of the others."""
    return sorted(found, key=lambda reading: (-SEVERITY.index(reading.verdict), CAUSES.index(reading.rule.key)))


def metrics_of(rule: Rule, ppo: Stage) -> Iterator[tuple[str, str]]:
    """Yield (key, title) of the metrics of a rule: NAME stands for any reward source."""
    if not rule.key.endswith("NAME"):
        yield rule.key, rule.title
        return
    stem = rule.key.removesuffix("NAME")
    logged: set[str] = set().union(*ppo.metrics)

    for key in sorted(logged):
        name = key.removeprefix(stem)
        if name and name != key:
            yield key, f"{rule.title}, {name}"


def _band(rule: Rule, points: Series, lengths: Mapping[int, float], ppo: Stage) -> Band:
    """Return the range of a metric at each of its points."""
    _, first = points[0]
    limit = limit_of(rule, ppo.config)
    band = Band([], [])
    for step, _ in points:
        low, high = rule.bounds(BoundInputs(first, limit, lengths.get(step, 0.0)))
        band.low.append(low)
        band.high.append(high)

    return band


def _judge_trend(rule: Rule, points: Series, ppo: Stage) -> Judgement:
    """Judge a metric that should rise from its first tenth to its last quarter by more than its noise."""
    values = [value for _, value in points]
    if len(values) < FEWEST:
        return Judgement("none", "Too few updates for a trend.")
    gain, chance = gained(values)
    if gain > chance:
        return Judgement("good", f"It rises by {number(gain)} {FROM_TO}, more than noise.")
    if gain < -chance:
        return Judgement("bad", f"It falls by {number(-gain)} {FROM_TO}, more than noise.", rule.if_low)

    return _judge_flat([value for _, value in ppo.series("objective/kl_k1")])


def _judge_flat(kl: Sequence[float]) -> Judgement:
    """Judge a metric that does not rise, by how far the policy is from SFT."""
    flat = "It does not rise by more than noise."
    if len(kl) < FEWEST:
        return Judgement("look", flat, IF_NEAR)

    now = fmean(last_quarter(kl))
    chance = end_noise(kl)
    if now - chance > NEAR:
        return Judgement("look", f"{flat} The policy has moved: KL {number(now)} nats from SFT.", IF_FAR)
    if now + chance < NEAR:
        return Judgement("look", f"{flat} The policy has hardly moved: KL {number(now)} nats from SFT.", IF_NEAR)
    return Judgement("look", f"{flat} KL from SFT: {number(now)} nats, plus or minus {number(chance)}.", IF_NEAR)


def _judge_range(rule: Rule, points: Series, band: Band, ppo: Stage) -> Judgement:
    """Judge a metric by its range.

    It is outside at the end if the mean of the last quarter is outside by more than its noise, and that of the first
    value if the bound depends on it.
    """
    n = len(points)
    values = [value for _, value in points]
    limit = limit_of(rule, ppo.config)
    words = rule.words.format(limit=limit)
    if rule.high == "limit_times_length":
        words += f", at the end up to {number(fmean(last_quarter(band.high)))} {rule.unit}"
    num_outside = sum(not low <= value <= high for value, low, high in zip(values, *band, strict=True))
    alarms = [step for step, value in points if not rule.alarm_low <= value <= rule.alarm_high]
    if not num_outside and not alarms:
        updates = f"all {count(n, 'update')}" if n > 1 else "1 update"
        return Judgement("good", f"Inside the healthy range ({words}) in {updates}.")

    text = f"Outside the healthy range ({words}) in {num_outside} of {count(n, 'update')}"
    if alarms:
        advice = rule.if_low if min(values) < rule.alarm_low else rule.if_high
        return Judgement("bad", f"{text}, and beyond the alarm limit at update {alarms[0]}.", advice)
    if n < rule.min_updates:
        return Judgement("none", f"{text}. Too early to judge: {rule.min_updates} updates are needed.")

    end = fmean(last_quarter(values))
    low = fmean(last_quarter(band.low))
    high = fmean(last_quarter(band.high))
    if low <= end <= high:
        return Judgement("good", f"{text}, inside it at the end.")
    if not rule.exact:
        low_slope, high_slope = _slopes(rule, values[0], limit)
        if low - end_noise(values, low_slope) <= end <= high + end_noise(values, high_slope):
            return Judgement("good", f"{text}, within noise at the end.")
    advice = rule.if_low if end < low else rule.if_high
    return Judgement("look", f"{text}, and still outside at the end.", advice)


def _slopes(rule: Rule, first: float, limit: float) -> list[float]:
    """Return by how much each bound follows the first value."""
    before = rule.bounds(BoundInputs(first, limit))
    after = rule.bounds(BoundInputs(first + 1, limit))
    return [later - now if math.isfinite(now) else 0.0 for now, later in zip(before, after, strict=True)]


def end_mean(points: Series) -> float:
    """Return the mean of the last quarter of a metric: its end."""
    return fmean(last_quarter([value for _, value in points]))


def course(points: Series) -> str:
    """Describe the start, end and extremes of a metric."""
    values = [value for _, value in points]
    first = number(values[0])
    if len(points) == 1:
        return f"One update so far: {first}."
    if len(set(values)) == 1:
        return f"{first} in all {count(len(points), 'update')}."

    end = last_quarter(values)
    mean = f" (mean of the last {len(end)})" if len(end) > 1 else ""
    highest_step, highest = max(points, key=itemgetter(1))
    lowest_step, lowest = min(points, key=itemgetter(1))
    extremes = f"maximum {number(highest)} at update {highest_step}, minimum {number(lowest)} at update {lowest_step}"
    return f"Starts at {first}, ends at {number(fmean(end))}{mean}; {extremes}."
