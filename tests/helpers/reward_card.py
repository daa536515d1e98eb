"""A reward model's report card without flags, for tests that change one value."""

from typing import Any


def card(**changes: Any) -> dict[str, Any]:
    """A card of 500 pairs with an accuracy of 80 %, with these changes."""
    shares = {"empty": 0.05, "repeated_token": 0.1, "politeness": 0.0, "over_long": 0.5, "swapped_prompt": 0.2}
    shares |= changes.pop("beats", {})
    probes = {
        name: {"beats": share, "ci95": [share - 0.05, share + 0.05], "margin": 0.1} for name, share in shares.items()
    }
    return {
        "n": 500,
        "accuracy": 0.8,
        "accuracy_ci95": [0.76, 0.83],
        "ci95": [0.76, 0.83],
        "ece": 0.06,
        "ece_by_chance": 0.05,
        "calibration": [{"from": 0.7, "to": 0.75, "n": 500, "confidence": 0.74, "accuracy": 0.8}],
        "length_correlation": 0.15,
        "length_correlation_ci95": [0.09, 0.21],
        "longer_answer": {"n": 480, "preferred": 0.6, "ci95": [0.55, 0.64], "chosen": 0.58},
        "margin_histogram": {
            "edges": [-4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0],
            "counts": [0, 7, 19, 74, 149, 133, 113, 5],
        },
        "adversarial": {"n": 128, "probes": probes},
        **changes,
    }
