"""Which answers are shown: SFT's and PPO's to the same prompt, the best, the worst, the middle, the most changed."""

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_cli.evaluation.render import ResponsePair, Row, response_pairs

EACH = 3  # pairs of a kind: enough to see a habit, few enough to be read


@dataclass(frozen=True)
class Shown:
    """Pairs that are shown for one reason."""

    title: str
    pairs: list[ResponsePair]


def chosen(found: Sequence[ResponsePair]) -> list[Shown]:
    """What is shown of the pairs, a pair once: by gain from both ends and around the middle, then by change."""
    left = sorted(found, key=lambda pair: (-pair.gain, pair.index))
    best = _take(left, left[:EACH])
    worst = sorted(left, key=lambda pair: (pair.gain, pair.index))[:EACH]
    lost = [pair for pair in worst if pair.gain < 0]
    worst = _take(left, lost or worst)
    middle = sorted(pair.gain for pair in found)[len(found) // 2] if found else 0.0
    median = _take(left, sorted(left, key=lambda pair: (abs(pair.gain - middle), pair.index))[:EACH])
    moved = _take(left, sorted(left, key=lambda pair: (*(-each for each in pair.change), pair.index))[:EACH])
    shown = [
        Shown("Where PPO gained most", best),
        Shown("Where PPO lost most" if lost else "Where PPO gained least", worst),
        Shown("In the middle", median),
        Shown("Where PPO changed most", moved),
    ]
    return [each for each in shown if each.pairs]


def _take(left: list[ResponsePair], taken: list[ResponsePair]) -> list[ResponsePair]:
    for pair in taken:
        left.remove(pair)
    return taken


def lengths(answers: Sequence[Row]) -> dict[str, list[int]]:
    """Tokens of each of SFT's and PPO's answers, of the pairs' mode."""
    found = response_pairs(answers)
    return (
        {"SFT": [pair.sft["length"] for pair in found], "PPO": [pair.ppo["length"] for pair in found]} if found else {}
    )
