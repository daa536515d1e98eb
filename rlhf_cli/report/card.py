"""How to read the reward model's report card, for those who have nothing but the page."""

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_cli.evaluation.reward_model import (
    MAX_ECE,
    MIN_PROBE_LIMIT,
    OVER_LONG_LIMIT,
    SWAPPED_PROMPT_LIMIT,
    ece_limit,
    mean_confidence,
)
from rlhf_cli.report.texts import number, percent


def notes(card: Mapping[str, Any]) -> Iterator[str]:
    """What each line of the card's table is, what its limit is, and why that is another one in other runs."""
    yield (
        "A line is flagged where it is beyond its limit by more than chance: of "
        f"{card['n']:,} pairs and {card['adversarial']['n']:,} probed prompts a value may be off. In brackets, 95 % "
        "intervals. A probe is held to more than its own interval, since there are "
        f"{len(card['adversarial']['probes'])} of them, and a limit that was estimated is off as well. Where there are "
        "no brackets, the value counts."
    )
    yield _calibration(card)
    yield (
        "Score with length: from \N{MINUS SIGN}1 to 1, and 0 where longer answers score neither better nor worse than "
        "short ones."
    )
    if longer := card.get("longer_answer"):
        yield (
            f"Longer answer preferred: by the reward model in {percent(longer['preferred'])} of the pairs whose "
            f"answers differ in length, by those who chose in {percent(longer['chosen'])}. It has no limit of its own."
        )
    yield (
        "Beaten by ...: how often an answer that was made to be bad scores above the chosen one, then by how much its "
        "score is higher (+) or lower (-) on the mean. Such an answer should not win more often than one that people "
        f"rejected, so the limit is the share of pairs that this model gets wrong, {percent(1 - card['accuracy'])} "
        f"here, and {percent(MIN_PROBE_LIMIT)} at least. Of the good answer three times over the limit is "
        f"{percent(OVER_LONG_LIMIT)}, of one to another prompt {percent(SWAPPED_PROMPT_LIMIT)}."
    )


def _calibration(card: Mapping[str, Any]) -> str:
    sure, why = mean_confidence(card), "; with few pairs, what chance alone comes to"
    if ece_limit(card) > MAX_ECE:
        why = f"; here it is {number(ece_limit(card))}, since with so few pairs chance alone comes to that"
    return (
        "Calibration: of the answers that they prefer, the scores say that these are the better ones with a chance of "
        f"{percent(sure)} on the mean, and {percent(card['accuracy'])} are; where more is said than comes true, the "
        "model is sure of too much. The error (ECE) is how far the two are apart, over groups of like chance. Its "
        f"limit is {number(MAX_ECE)}{why}."
    )
