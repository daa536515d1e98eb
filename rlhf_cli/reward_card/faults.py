"""The faults that a card shows, each with its limit and the reason for it. What chance can do is no fault."""

from collections.abc import Mapping
from typing import Any

from rlhf_cli.errors import Problem
from rlhf_cli.statistics import together, wilson, wilson_difference

# Chen et al. 2024, arXiv 2402.07319: 0.45 (Pearson's) with a reward model whose policies grew long. 0.3 is a tenth of
# the variance of the ranks. The demo's reward model has 0.15.
LENGTH = 0.3
ECE = 0.1  # a pair said to be 80 % sure comes true in 70 % of the cases, or in 90 %
# A probe without a good answer in it should lose more often than the answers do that people rejected.
LEAST = 0.1
# Of three times the good answer no more is known than of the answer itself: half is indifference.
OVER_LONG = 0.5
# Half is a model that does not look at the prompt; this is half way there.
SWAPPED = 0.25
KNOWN = {"over_long": OVER_LONG, "swapped_prompt": SWAPPED}  # probes whose limit the accuracy does not move

CALLED = {
    "empty": "an empty answer",
    "repeated_token": "one token repeated",
    "politeness": "politeness alone",
    "over_long": "the good answer three times over",
    "swapped_prompt": "the good answer to another prompt",
}


def limit(probe: str, accuracy: float) -> float:
    """The share of prompts up to which a probe may score above the chosen answer."""
    return KNOWN.get(probe, max(LEAST, 1 - accuracy))


def flags(card: Mapping[str, Any]) -> list[Problem]:
    """What is wrong by the card: R10 length, R11 a probe that wins too often, R12 calibration."""
    return [*_length(card), *_probes(card), *_calibration(card)]


def follows_length(card: Mapping[str, Any]) -> bool:
    """R10: even the nearer end of the interval is beyond the limit."""
    low, high = card["length_correlation_ci95"]
    return low > LENGTH or high < -LENGTH


def likes_too_well(name: str, card: Mapping[str, Any]) -> bool:
    """R11: a probe wins more often than its limit, whatever chance can do with all probes together, and with the pairs
    that a limit is estimated from."""
    probes, n = card["adversarial"]["probes"], card["adversarial"]["n"]
    share, z = probes[name]["beats"], together(len(probes))
    low, _ = wilson(share * n, n, z)
    if name in KNOWN:
        return low > KNOWN[name]
    return low > LEAST and wilson_difference((share, n), (1 - card["accuracy"], card["n"]), z)[0] > 0


def ece_limit(card: Mapping[str, Any]) -> float:
    """The calibration error up to which a card is well calibrated: R12 beyond it."""
    return max(ECE, card["ece_by_chance"])


def _length(card: Mapping[str, Any]) -> list[Problem]:
    if not follows_length(card):
        return []
    value, (low, high) = card["length_correlation"], card["length_correlation_ci95"]
    text = (
        f"the score follows the length of the answer: correlation {value:.2f} [{low:.2f}, {high:.2f}], limit {LENGTH}"
    )
    if longer := card.get("longer_answer"):
        text += f"; the longer answer is the chosen one in {longer['chosen']:.0%} of the evaluation pairs"
    hint = "balance the pairs by length, or hold PPO's length with ppo.overlong_penalty, and watch its response_length"
    return [Problem("R10", text, hint=hint)]


def _probes(card: Mapping[str, Any]) -> list[Problem]:
    found = []
    told = card["adversarial"]
    for name, probe in told["probes"].items():
        if likes_too_well(name, card):
            text = (
                f"{CALLED[name]} scores above the chosen answer for {probe['beats']:.0%} of {told['n']} prompts, "
                f"limit {limit(name, card['accuracy']):.0%}"
            )
            hint = "PPO will find it: add pairs in which such answers are rejected"
            if name == "swapped_prompt":
                hint += "; nothing to do where the reward is meant to look at the answer alone"
            found.append(Problem("R11", text, hint=hint))
    return found


def _calibration(card: Mapping[str, Any]) -> list[Problem]:
    if card["ece"] <= ece_limit(card):
        return []
    text = f"the margins say other chances than come true: ECE {card['ece']:.2f}, limit {ECE}; {claim(card)}"
    hint = "too much claimed: fewer epochs or a lower learning rate; too little: train for longer"
    return [Problem("R12", text, hint=hint)]


def claim(card: Mapping[str, Any]) -> str:
    """On what share of the pairs the margins say that they are right, and on what share they are."""
    return f"{claimed(card):.2f} claimed right, {card['accuracy']:.2f} are"


def claimed(card: Mapping[str, Any]) -> float:
    """The chance with which the margins say, on the mean over the pairs, that they are right."""
    return float(sum(each["n"] * each["confidence"] for each in card["calibration"]) / card["n"])
