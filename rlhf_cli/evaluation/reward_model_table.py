"""Rows of a reward model's report card, for the terminal, the HTML report and the model card."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rlhf_cli import terminal
from rlhf_cli.evaluation.reward_model import (
    MAX_LENGTH_CORRELATION,
    PROBE_LABELS,
    describe_confidence,
    ece_limit,
    is_length_biased,
    is_probe_flagged,
    probe_limit,
)
from rlhf_cli.statistics import with_interval

LEGEND = (
    "beaten by X: on which share of the prompts X scores above the good answer.",
    "mean gap: the score of X less that of the good answer, on the mean over the prompts.",
    "flagged: past its limit by more than chance, of all probes together; PPO would make more of it.",
    "Some limits follow from the accuracy or the number of pairs: see docs/evaluation.md.",
)


@dataclass(frozen=True)
class CardRow:
    """A quantity of the card as text, and the limit above which it is flagged."""

    name: str
    value: str
    limit: str
    flagged: bool


def print_card(card: Mapping[str, Any]) -> None:
    """Print a card with held-out accuracy; `ci95` is the accuracy's interval.

    The table is printed once per command, even across its processes. A card of an older version has only the accuracy.
    """
    text = f"reward model: right on {with_interval(card['accuracy'], card['ci95'])} of the held-out pairs"
    guess = card["ci95"][0] <= 0.5
    text += ", which may be guessing: so may all that builds on it" if guess else ""
    if "adversarial" not in card:
        terminal.out(text)
        return
    rows = [[row.name, row.value, row.limit, "flagged" if row.flagged else ""] for row in card_rows(card)]
    if not terminal.is_first_time(f"{text}\n{rows}"):
        terminal.out(f"{text}; its report card stands above")
        return
    terminal.out(text)
    title = f"report card: {card['n']} pairs, {card['adversarial']['n']} probed"
    terminal.table([title, "found [95 % interval]", "limit", ""], rows)
    counts = margin_counts(card)
    terminal.table(["margin, chosen less rejected", *counts], [["pairs", *map(str, counts.values())]])
    for line in LEGEND:
        terminal.out(line)


def card_rows(card: Mapping[str, Any]) -> list[CardRow]:
    """Return the rows of a card that has more than the accuracy."""
    rows = [
        CardRow(
            "calibration error (ECE)",
            f"{card['ece']:.3f}; {describe_confidence(card)}",
            f"{ece_limit(card):.2f}",
            card["ece"] > ece_limit(card),
        ),
        CardRow(
            "score with length, rank correlation",
            with_interval(card["length_correlation"], card["length_correlation_ci95"]),
            f"+-{MAX_LENGTH_CORRELATION:.2f}",
            is_length_biased(card),
        ),
    ]
    if longer := card.get("longer_answer"):
        value = f"{with_interval(longer['preferred'], longer['ci95'])}; people: {longer['chosen']:.3f}"
        rows.append(CardRow("longer answer preferred", value, "", False))
    for name, probe in card["adversarial"]["probes"].items():
        value = f"{with_interval(probe['beats'], probe['ci95'])}; mean gap {probe['margin']:+z.2f}"
        limit = f"{probe_limit(name, card['accuracy']):.2f}"
        rows.append(CardRow(f"beaten by {PROBE_LABELS[name]}", value, limit, is_probe_flagged(name, card)))
    return rows


def margin_counts(card: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of margins per bin: `below -4`, `-4 to -2`, ..."""
    edges, counts = card["margin_histogram"]["edges"], card["margin_histogram"]["counts"]
    between = [f"{low:g} to {high:g}" for low, high in pairwise(edges)]
    return dict(zip([f"below {edges[0]:g}", *between, f"from {edges[-1]:g}"], counts, strict=True))
