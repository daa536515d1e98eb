"""How far annotators agree, and whether one of them chooses by slot or by length."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

from rlhf_cli import terminal
from rlhf_cli.data.labels import PREFERENCES, Label
from rlhf_cli.evaluation.people import comparing_labels, labelled_responses, people_win_rate
from rlhf_cli.runs.report import WinRate
from rlhf_cli.statistics import Z95, share_interval

PEOPLE = "people"
FEWEST_PAIRS = 5  # of which the interval of kappa is estimated
Interval = tuple[float, float]


@dataclass(frozen=True)
class Share:
    """A share of labels with its 95 % interval."""

    value: float
    interval: Interval
    n: int

    def __str__(self) -> str:
        return f"{self.value:.2f} {_interval_text(self.interval)}"


@dataclass(frozen=True)
class Agreement:
    """Agreement of two annotators on the pairs that both labelled and neither skipped."""

    annotators: tuple[str, str]
    raw: Share  # of the pairs with the same choice
    kappa: float | None  # None: both always chose the same, so that nothing is expected by chance
    kappa_interval: Interval | None  # None: too few pairs, or the same choice in all


@dataclass(frozen=True)
class AnnotatorHabits:
    """What one annotator chose."""

    labels: int
    ties: int
    first_slot: Share | None  # of the pairs with a better answer; None without one
    longer: Share | None  # likewise, of answers of different lengths


def agreements(labels: Sequence[Label]) -> list[Agreement]:
    """Return the agreement of each two annotators with a pair in common."""
    choices: dict[str, dict[str, str]] = {}
    for label in labels:
        if label.choice != "skip":
            choices.setdefault(label.annotator, {})[label.pair] = label.choice

    found = []
    for first, second in combinations(choices, 2):
        common = [pair for pair in choices[first] if pair in choices[second]]
        if common:
            mine = [choices[first][pair] for pair in common]
            theirs = [choices[second][pair] for pair in common]
            found.append(_agreement((first, second), mine, theirs))
    return found


def _agreement(annotators: tuple[str, str], mine: Sequence[str], theirs: Sequence[str]) -> Agreement:
    same = [ours == other for ours, other in zip(mine, theirs, strict=True)]
    return Agreement(annotators, _share(same), cohens_kappa(mine, theirs), kappa_interval(mine, theirs))


def cohens_kappa(first: Sequence[str], second: Sequence[str]) -> float | None:
    """Return (p - e) / (1 - e): p is the share of equal choices, e that expected by chance.

    Cohen 1960 (Educational and Psychological Measurement 20(1), 37-46). None if e is 1.
    """
    n = len(first)
    observed = sum(a == b for a, b in zip(first, second, strict=True)) / n
    ours, theirs = Counter(first), Counter(second)
    expected = sum(ours[choice] * theirs[choice] for choice in ours) / n**2
    if expected == 1:
        return None
    return (observed - expected) / (1 - expected)


def kappa_interval(first: Sequence[str], second: Sequence[str]) -> Interval | None:
    """Return the 95 % interval of kappa by the delete-one jackknife; None of too few pairs.

    Of equal choices in all pairs the jackknife knows no error: None, too.
    """
    kappa = cohens_kappa(first, second)
    n = len(first)
    if kappa is None or n < FEWEST_PAIRS or list(first) == list(second):
        return None
    without = []
    for row in range(n):
        left = cohens_kappa([*first[:row], *first[row + 1 :]], [*second[:row], *second[row + 1 :]])
        if left is None:
            return None
        without.append(left)
    mean = fmean(without)
    error = math.sqrt((n - 1) / n * sum((each - mean) ** 2 for each in without))
    return max(-1.0, kappa - Z95 * error), min(1.0, kappa + Z95 * error)


def habits(labels: Sequence[Label]) -> dict[str, AnnotatorHabits]:
    """Return what each annotator chose."""
    by_annotator: dict[str, list[Label]] = {}
    for label in labels:
        by_annotator.setdefault(label.annotator, []).append(label)
    return {name: _habits_of(mine) for name, mine in by_annotator.items()}


def _habits_of(labels: Sequence[Label]) -> AnnotatorHabits:
    decided = [label for label in labels if label.choice in PREFERENCES]
    unequal = [label for label in decided if len(label.answers[0]) != len(label.answers[1])]
    return AnnotatorHabits(
        labels=len(labels),
        ties=sum(label.choice == "tie" for label in labels),
        first_slot=_share([label.prefers_shown_first for label in decided]) if decided else None,
        longer=_share([_is_longer(label) for label in unequal]) if unequal else None,
    )


def _is_longer(label: Label) -> bool:
    """Return True if the better answer is the longer one."""
    chosen = PREFERENCES.index(label.choice)
    return len(label.answers[chosen]) > len(label.answers[1 - chosen])


def _share(points: Sequence[bool]) -> Share:
    """Return the share of points, at least one, that are true, with its interval."""
    values = [float(point) for point in points]
    return Share(fmean(values), share_interval(values), len(values))


def _interval_text(interval: Sequence[float]) -> str:
    return f"[{interval[0]:.2f}, {interval[1]:.2f}]"


def compare(labels: Sequence[Label], policy: str, baseline: str) -> WinRate | None:
    """Return the win rate of one model over another by all labels; None without a pair with an answer of each."""
    compared = comparing_labels(labels, [policy, baseline])
    if not compared:
        return None
    ours, theirs = (labelled_responses(compared, model, PEOPLE) for model in (policy, baseline))
    return people_win_rate(PEOPLE, compared, ours, theirs)


# Output


def agreement_text(labels: Sequence[Label]) -> str:
    """Return the agreement so far as a line for the page, empty without a pair that two annotators labelled."""
    found = agreements(labels)
    if not found:
        return ""
    count = sum(each.raw.n for each in found)
    agreed = sum(each.raw.value * each.raw.n for each in found)
    return f"agreement {agreed / count:.2f} of {count}"


def habits_text(labels: Sequence[Label], annotator: str) -> list[tuple[str, str]]:
    """Return what an annotator chose, as names and values for the page."""
    mine = habits(labels).get(annotator)
    if mine is None:
        return []
    rows = [("Labels", str(mine.labels)), ("Ties", str(mine.ties))]
    if mine.first_slot is not None:
        rows.append(("First answer chosen", str(mine.first_slot)))
    if mine.longer is not None:
        rows.append(("Longer answer chosen", str(mine.longer)))
    return rows


def print_summary(labels: Sequence[Label], policies: Sequence[str]) -> None:
    """Print what each annotator chose, how far they agree, and each policy's comparison with the ones before it.

    Says who chooses a slot more often than by chance.
    """
    by_annotator = habits(labels)
    if not by_annotator:
        return
    rows = []
    for name, mine in by_annotator.items():
        counts = [str(mine.labels), str(mine.ties)]
        rows.append([name, *counts, str(mine.first_slot or "-"), str(mine.longer or "-")])
    terminal.table(["annotator", "labels", "ties", "first slot", "longer answer"], rows)

    found = agreements(labels)
    if found:
        terminal.table(["annotators", "pairs", "agreement", "Cohen's kappa"], [_agreement_row(each) for each in found])
    for baseline, policy in combinations(policies, 2):
        rate = compare(labels, policy, baseline)
        if rate is not None:
            terminal.out(comparison_text(policy, baseline, rate))
    _warn_of_slots(by_annotator)


def comparison_text(policy: str, baseline: str, rate: WinRate) -> str:
    """Return how often the answers of one model were preferred to those of another as a line."""
    assert rate.ci95 is not None
    value = f"{rate.value:.2f} {_interval_text(rate.ci95)}"
    text = f"{policy} is preferred to {baseline} in {value} of {rate.n} labels, a tie counts half"
    if rate.length_controlled is None or rate.length_controlled_ci95 is None:
        return text
    return f"{text}; at equal lengths {rate.length_controlled:.2f} {_interval_text(rate.length_controlled_ci95)}"


def _agreement_row(agreement: Agreement) -> list[str]:
    kappa = "-" if agreement.kappa is None else f"{agreement.kappa:.2f}"
    if agreement.kappa_interval is not None:
        kappa += f" {_interval_text(agreement.kappa_interval)}"
    return [", ".join(agreement.annotators), str(agreement.raw.n), str(agreement.raw), kappa]


def _warn_of_slots(by_annotator: Mapping[str, AnnotatorHabits]) -> None:
    for name, mine in by_annotator.items():
        if mine.first_slot is None:
            continue
        low, high = mine.first_slot.interval
        if low > 0.5 or high < 0.5:
            slot = "first" if low > 0.5 else "second"
            terminal.say(f"label    {name} chooses the {slot} slot more often than by chance: look at these labels")
