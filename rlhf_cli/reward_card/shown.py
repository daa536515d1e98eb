"""The card on the terminal."""

from collections.abc import Mapping
from typing import Any

from rlhf_cli import terminal
from rlhf_cli.reward_card.faults import CALLED, ECE, LENGTH, leaning, limit
from rlhf_cli.statistics import with_interval


def print_card(card: Mapping[str, Any]) -> None:
    """What the reward model is worth, on pairs that it never saw; `ci95` is the accuracy's interval.

    A card from before there were more numbers than the accuracy is told by that one.
    """
    text = f"reward model: right on {with_interval(card['accuracy'], card['ci95'])} of the held-out pairs"
    guess = card["ci95"][0] <= 0.5
    terminal.out(text + (", which may be guessing: so may all that builds on it" if guess else ""))
    if "adversarial" not in card:
        return
    rows = [
        ["calibration (ECE)", f"{card['ece']:.3f}, {leaning(card)}", f"{max(ECE, card['ece_by_chance']):.2f}"],
        [
            "score with length",
            with_interval(card["length_correlation"], card["length_correlation_ci95"]),
            f"+-{LENGTH:.2f}",
        ],
    ]
    if longer := card.get("longer_answer"):
        said = f"{with_interval(longer['preferred'], longer['ci95'])}; chosen in {longer['chosen']:.3f}"
        rows.append(["longer answer preferred", said, ""])
    for name, probe in card["adversarial"]["probes"].items():
        said = f"{with_interval(probe['beats'], probe['ci95'])}; score {probe['margin']:+.2f}"
        rows.append([f"beaten by {CALLED[name]}", said, f"{limit(name, card['accuracy']):.2f}"])
    terminal.table(["report card", f"{card['n']} pairs, {card['adversarial']['n']} probed", "flagged beyond"], rows)
    terminal.out(f"margins: {_margins(card['margin_histogram'])}")


def _margins(told: Mapping[str, Any]) -> str:
    """`below -4: 3, to -2: 9, ...`, a count for each bin."""
    edges, counts = told["edges"], told["counts"]
    names = [f"below {edges[0]:g}", *(f"to {edge:g}" for edge in edges[1:]), "above"]
    return ", ".join(f"{name}: {count}" for name, count in zip(names, counts, strict=True))
