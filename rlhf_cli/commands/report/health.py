"""What is seen in a PPO run, metric by metric: a sentence of this run's numbers, held against the healthy range."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Final, Literal

from rlhf_cli.commands.report import rules
from rlhf_cli.commands.report.rules import (
    CAUSES,
    FEWEST,
    NONE,
    RULES,
    Advice,
    Band,
    Rule,
    band,
    last_quarter,
    one_voice,
)
from rlhf_cli.commands.report.runs import Stage
from rlhf_cli.commands.report.tables import count, number
from rlhf_cli.statistics import best_of_n_kl

Verdict = Literal["good", "look", "bad", "none"]  # none: there is nothing to hold it against
# Nats a response. A policy that is no farther from SFT than the best of two of SFT's own answers has hardly moved.
NEAR = best_of_n_kl(2)
GRAVITY = ("none", "good", "look", "bad")
ILL: Final = ("look", "bad")  # what something is to be done about


@dataclass(frozen=True)
class Reading:
    """A metric over a run: its points, its range, what is seen, and what to do: nothing of it where all is well.

    `key` is the metric's, `rule` the one that its rule goes by.
    """

    key: str
    rule: str
    title: str
    unit: str
    points: list[tuple[int, float]]
    band: Band | None
    verdict: Verdict
    sentence: str
    advice: Advice

    @property
    def moves(self) -> bool:
        """Whether there is anything to draw."""
        return len({value for _, value in self.points}) > 1


def readings(ppo: Stage) -> list[Reading]:
    """Those metrics of PPO's log that have a rule. Their advice is reconciled: no key is pulled in two directions."""
    found, lengths = [], dict(ppo.series("objective/response_length"))
    for rule in RULES:
        for key in _keys(rule, ppo):
            points = [(step, value) for step, value in ppo.series(key) if rule.of != "tokens" or step in lengths]
            if points:
                found.append(_read(rule, key, points, [lengths.get(step, 0.0) for step, _ in points], ppo))
    first = by_cause(found)
    heard = one_voice([(reading.title, reading.advice) for reading in first])
    settled = {reading.key: advice for reading, advice in zip(first, heard, strict=True)}
    return [replace(reading, advice=settled[reading.key]) for reading in found]


def by_cause(found: Sequence[Reading]) -> list[Reading]:
    """The gravest first, and of like ones the likelier cause of the others."""
    return sorted(found, key=lambda reading: (-GRAVITY.index(reading.verdict), CAUSES.index(reading.rule)))


def _keys(rule: Rule, ppo: Stage) -> Iterator[str]:
    """The metrics that a rule is of: NAME stands for any source."""
    stem, _, name = rule.key.partition("NAME")
    if not rule.key.endswith("NAME"):
        yield rule.key
    else:
        yield from sorted({key for row in ppo.metrics for key in row if key.startswith(stem)} - {name})


def _read(rule: Rule, key: str, points: list[tuple[int, float]], lengths: list[float], ppo: Stage) -> Reading:
    values = [value for _, value in points]
    title = rule.title + (f", {key.rpartition('/')[2]}" if rule.key.endswith("NAME") else "")
    found = band(rule, values, lengths, ppo.config)
    if rule.rises:
        verdict, said, advice = _risen(rule, values, ppo)
    elif found is None:
        verdict, said, advice = "none", "", NONE
    else:
        shifted = band(rule, [values[0] + 1, *values[1:]], lengths, ppo.config)
        verdict, said, low = _held(rule, points, found, _slopes(found, shifted or found))
        advice = NONE if verdict not in ILL else rule.if_low if low else rule.if_high
    return Reading(key, rule.key, title, rule.unit, points, found, verdict, f"{course(points)} {said}".strip(), advice)


def _risen(rule: Rule, values: list[float], ppo: Stage) -> tuple[Verdict, str, Advice]:
    """(verdict, what is seen, what to do) of a metric that should rise."""
    verdict, said = trend(values)
    if verdict != "look":
        return verdict, said, rule.if_low if verdict == "bad" else NONE
    kl = [value for _, value in ppo.series("objective/kl_k1")]
    if len(kl) < FEWEST:
        return verdict, said, rule.if_near
    now, chance = fmean(last_quarter(kl)), rules.at_the_end(kl)
    if now - chance > NEAR:
        return verdict, f"{said} The policy has moved, {number(now)} nats from SFT.", rule.if_far
    if now + chance < NEAR:
        return verdict, f"{said} The policy has hardly moved, {number(now)} nats from SFT.", rule.if_near
    return verdict, f"{said} The policy is {number(now)} nats from SFT, give or take {number(chance)}.", rule.if_near


def _slopes(found: Band, shifted: Band) -> tuple[float, float]:
    """By how much the lower and the upper bound follow the first value, whose noise they have; 0 for a fixed bound."""

    def slope(one: list[float] | None, other: list[float] | None) -> float:
        return other[-1] - one[-1] if one and other else 0.0

    return slope(found.low, shifted.low), slope(found.high, shifted.high)


def course(points: list[tuple[int, float]]) -> str:
    """Where a metric begins, where it ends, and its extremes."""
    values = [value for _, value in points]
    if len(points) == 1:
        return f"One update so far: {number(values[0])}."
    if len(set(values)) == 1:
        return f"{number(values[0])} in all {count(len(points), 'update')}."
    end = last_quarter(values)
    ends = (
        f"ends at {number(fmean(end))} (mean of the last {len(end)})" if len(end) > 1 else f"ends at {number(end[0])}"
    )
    (most_at, most), (least_at, least) = (extreme(points, key=lambda point: point[1]) for extreme in (max, min))
    extremes = f"highest {number(most)} at update {most_at}, lowest {number(least)} at update {least_at}"
    return f"Begins at {number(values[0])}, {ends}; {extremes}."


def trend(values: list[float]) -> tuple[Verdict, str]:
    """Whether a metric rises from its first tenth to its last quarter by more than its noise from update to update."""
    if len(values) < FEWEST:
        return "none", "Too few updates to tell a trend."
    gain, chance = rules.gained(values)
    if gain > chance:
        return "good", f"It rises by {number(gain)}: the policy earns more of what it is trained on."
    if gain < -chance:
        return "bad", f"It falls by {number(-gain)}: the policy earns less than it began with."
    return "look", "It does not rise by more than its noise."


def _held(
    rule: Rule, points: list[tuple[int, float]], found: Band, slopes: tuple[float, float]
) -> tuple[Verdict, str, bool]:
    """(verdict, what is seen, whether it is too low rather than too high) of a metric held against its range.

    Outside at the end is what is outside by more than its noise and that of the first value, as far as the bounds
    follow that: by `slopes`.
    """
    values = [value for _, value in points]
    lows, highs = found.low or [-math.inf] * len(values), found.high or [math.inf] * len(values)
    outside = sum(not low <= value <= high for value, low, high in zip(values, lows, highs, strict=True))
    alarms = [
        step
        for step, value in points
        if value < (-math.inf if rule.alarm_low is None else rule.alarm_low)
        or value > (math.inf if rule.alarm_high is None else rule.alarm_high)
    ]
    n = len(values)
    if not outside and not alarms:
        return (
            "good",
            f"Inside the healthy range ({found.words}) in {'all ' if n > 1 else ''}{count(n, 'update')}.",
            False,
        )
    said = f"Outside the healthy range ({found.words}) in {outside} of {count(n, 'update')}"
    if alarms:
        said += f", and at update {alarms[0]} so far outside that the run may be broken"
        return "bad", f"{said}.", (rule.alarm_low is not None and min(values) < rule.alarm_low)
    if n < rule.early:
        return "none", f"{said}. Too early to judge: that is for {rule.early} updates and more.", False
    end, low, high = (fmean(last_quarter(each)) for each in (values, lows, highs))
    if low <= end <= high:
        return "good", f"{said}, inside of it at the end.", False
    if not rule.exact and low - rules.at_the_end(values, slopes[0]) <= end <= high + rules.at_the_end(
        values, slopes[1]
    ):
        return "good", f"{said}, at the end by no more than its noise.", False
    return "look", f"{said}, at the end too.", end < low
