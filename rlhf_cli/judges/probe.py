"""16 pairs with known results, which are asked before a judge's answers are paid for and believed."""

import random
from collections.abc import Mapping
from dataclasses import dataclass

from rlhf_cli.judges.question import Question, Winner

MAX_WRONG = 4  # of the 16; one that always names the same answer, or a tie, has 12 and more
SEED = 0
TEXTS = (
    (
        "Why is the sky blue?",
        "Sunlight is scattered by the air, and blue light is scattered far more than red light, so blue reaches us "
        "from every part of the sky.",
    ),
    (
        "How do I boil an egg so that the yolk stays soft?",
        "Put the egg into boiling water, wait six minutes, and cool it under cold water before you peel it.",
    ),
    (
        "What is the difference between a lake and a river?",
        "A river flows along a bed towards lower ground, while a lake is standing water that fills a hollow.",
    ),
    (
        "Write one sentence that thanks a neighbour for watering the plants.",
        "Thank you so much for watering my plants while I was away; they look better than when I left them.",
    ),
    (
        "Why should I save a backup of my files?",
        "A disk can fail and a laptop can be stolen, and with a second copy in another place you lose nothing.",
    ),
    (
        "How does a bicycle stay upright when it moves?",
        "When a moving bicycle leans to one side, it is steered to that side, and so the wheels come back under the "
        "rider before the bicycle falls.",
    ),
)
NUM_EQUAL = 4


@dataclass(frozen=True)
class ProbePair:
    """Two answers to a prompt, and which of them any judge must prefer; None if they are equal."""

    prompt: str
    good: str
    bad: str | None


def probe_pairs() -> list[ProbePair]:
    """Return six answers against their own words shuffled, six against another prompt's answer, four against itself."""
    draw = random.Random(SEED)
    next_texts = TEXTS[1:] + TEXTS[:1]

    shuffled = []
    swapped = []
    for (prompt, answer), (_, other) in zip(TEXTS, next_texts, strict=True):
        shuffled.append(ProbePair(prompt, answer, _shuffled(answer, draw)))
        swapped.append(ProbePair(prompt, answer, other))
    equal = [ProbePair(prompt, answer, None) for prompt, answer in TEXTS[:NUM_EQUAL]]
    return shuffled + swapped + equal


def _shuffled(text: str, draw: random.Random) -> str:
    words = text.split()
    draw.shuffle(words)
    return " ".join(words)


def questions_of(pair: ProbePair) -> list[tuple[Question, Winner]]:
    """Return what is asked about a pair, with the right answers: both orders, or one question about equal answers."""
    if pair.bad is None:
        return [(Question(pair.prompt, pair.good, pair.good), "tie")]
    return [(Question(pair.prompt, pair.good, pair.bad), "1"), (Question(pair.prompt, pair.bad, pair.good), "2")]


NUM_PAIRS = 2 * len(TEXTS) + NUM_EQUAL
NUM_CALLS = 4 * len(TEXTS) + NUM_EQUAL


def num_wrong(answers: Mapping[Question, Winner]) -> int:
    """Return on how many pairs one of the answers is wrong."""
    return sum(any(answers[question] != right for question, right in questions_of(pair)) for pair in probe_pairs())
