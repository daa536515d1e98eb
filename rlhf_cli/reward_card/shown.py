"""The card as people read it, on the terminal and on a page."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rlhf_cli import terminal, told
from rlhf_cli.reward_card.faults import CALLED, LENGTH, claim, ece_limit, follows_length, likes_too_well, limit
from rlhf_cli.statistics import with_interval

# For who never read docs/evaluation.md.
LEGEND = (
    "beaten by X: on which share of the prompts X scores above the good answer.",
    "mean gap: the score of X less that of the good answer, on the mean over the prompts.",
    "flagged: past its limit by more than chance, of all probes together; PPO would make more of it.",
    "Some limits follow from the accuracy or the number of pairs: see docs/evaluation.md.",
)


@dataclass(frozen=True)
class Line:
    """One thing that a card tells, with the limit beyond which it is flagged."""

    name: str
    said: str
    limit: str
    flagged: bool


def print_card(card: Mapping[str, Any]) -> None:
    """What the reward model is worth, on pairs that it never saw; `ci95` is the accuracy's interval.

    The table of a card is told once in a command, by whoever comes first. A card from before there were more numbers
    than the accuracy is told by that one.
    """
    text = f"reward model: right on {with_interval(card['accuracy'], card['ci95'])} of the held-out pairs"
    guess = card["ci95"][0] <= 0.5
    text += ", which may be guessing: so may all that builds on it" if guess else ""
    if "adversarial" not in card:
        terminal.out(text)
        return
    rows = [[line.name, line.said, line.limit, "flagged" if line.flagged else ""] for line in lines(card)]
    if not told.is_new(f"{text}\n{rows}"):
        terminal.out(f"{text}; its report card stands above")
        return
    terminal.out(text)
    title = f"report card: {card['n']} pairs, {card['adversarial']['n']} probed"
    terminal.table([title, "found [95 % interval]", "limit", ""], rows)
    counts = margins(card)
    terminal.table(["margin, chosen less rejected", *counts], [["pairs", *map(str, counts.values())]])
    for line in LEGEND:
        terminal.out(line)


def lines(card: Mapping[str, Any]) -> list[Line]:
    """The lines of a card that tells more than the accuracy."""
    rows = [
        Line(
            "calibration error (ECE)",
            f"{card['ece']:.3f}; {claim(card)}",
            f"{ece_limit(card):.2f}",
            card["ece"] > ece_limit(card),
        ),
        Line(
            "score with length, rank correlation",
            with_interval(card["length_correlation"], card["length_correlation_ci95"]),
            f"+-{LENGTH:.2f}",
            follows_length(card),
        ),
    ]
    if longer := card.get("longer_answer"):
        said = f"{with_interval(longer['preferred'], longer['ci95'])}; people: {longer['chosen']:.3f}"
        rows.append(Line("longer answer preferred", said, "", False))
    for name, probe in card["adversarial"]["probes"].items():
        said = f"{with_interval(probe['beats'], probe['ci95'])}; mean gap {probe['margin']:+z.2f}"
        most = f"{limit(name, card['accuracy']):.2f}"
        rows.append(Line(f"beaten by {CALLED[name]}", said, most, likes_too_well(name, card)))
    return rows


def margins(card: Mapping[str, Any]) -> dict[str, int]:
    """`below -4`, `-4 to -2`, ...: how many margins each bin holds."""
    edges, counts = card["margin_histogram"]["edges"], card["margin_histogram"]["counts"]
    between = [f"{low:g} to {high:g}" for low, high in pairwise(edges)]
    return dict(zip([f"below {edges[0]:g}", *between, f"from {edges[-1]:g}"], counts, strict=True))
