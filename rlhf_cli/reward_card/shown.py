"""The card as people read it, on the terminal and on a page."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_cli import terminal
from rlhf_cli.reward_card.faults import CALLED, LENGTH, ece_limit, follows_length, leaning, likes_too_well, limit
from rlhf_cli.statistics import with_interval


@dataclass(frozen=True)
class Line:
    """One thing that a card tells, with the limit beyond which it is flagged."""

    name: str
    said: str
    limit: str
    flagged: bool


def print_card(card: Mapping[str, Any]) -> None:
    """What the reward model is worth, on pairs that it never saw; `ci95` is the accuracy's interval.

    A card from before there were more numbers than the accuracy is told by that one.
    """
    text = f"reward model: right on {with_interval(card['accuracy'], card['ci95'])} of the held-out pairs"
    guess = card["ci95"][0] <= 0.5
    terminal.out(text + (", which may be guessing: so may all that builds on it" if guess else ""))
    if "adversarial" not in card:
        return
    rows = [[line.name, line.said, line.limit] for line in lines(card)]
    terminal.table(["report card", f"{card['n']} pairs, {card['adversarial']['n']} probed", "flagged beyond"], rows)
    told = ", ".join(f"{name}: {count}" for name, count in margins(card).items())
    terminal.out(f"margins: {told}")


def lines(card: Mapping[str, Any]) -> list[Line]:
    """The lines of a card that tells more than the accuracy."""
    rows = [
        Line(
            "calibration (ECE)",
            f"{card['ece']:.3f}, {leaning(card)}",
            f"{ece_limit(card):.2f}",
            card["ece"] > ece_limit(card),
        ),
        Line(
            "score with length",
            with_interval(card["length_correlation"], card["length_correlation_ci95"]),
            f"+-{LENGTH:.2f}",
            follows_length(card),
        ),
    ]
    if longer := card.get("longer_answer"):
        said = f"{with_interval(longer['preferred'], longer['ci95'])}; chosen in {longer['chosen']:.3f}"
        rows.append(Line("longer answer preferred", said, "", False))
    for name, probe in card["adversarial"]["probes"].items():
        said = f"{with_interval(probe['beats'], probe['ci95'])}; score {probe['margin']:+.2f}"
        most = f"{limit(name, card['accuracy']):.2f}"
        rows.append(Line(f"beaten by {CALLED[name]}", said, most, likes_too_well(name, card)))
    return rows


def margins(card: Mapping[str, Any]) -> dict[str, int]:
    """`below -4`, `to -2`, ...: how many margins each bin holds."""
    edges, counts = card["margin_histogram"]["edges"], card["margin_histogram"]["counts"]
    names = [f"below {edges[0]:g}", *(f"to {edge:g}" for edge in edges[1:]), "above"]
    return dict(zip(names, counts, strict=True))
