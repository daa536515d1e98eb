"""The heat map of one response: each of its tokens in a colour for reward, KL, value and advantage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_cli.report.runs import is_number
from rlhf_cli.report.texts import number

TOLD = {
    "reward": "what the token earned: the KL penalty, and at the last token the score",
    "kl": "how much likelier the policy makes the token than the SFT policy does, in nats",
    "value": "what the value model expects from here on",
    "advantage": "how much better than expected: PPO makes tokens above 0 likelier, those below 0 less likely",
}


@dataclass(frozen=True)
class Token:
    """A token of a strip: its value, and its shade from -1 to 1."""

    text: str
    value: str
    shade: float


@dataclass(frozen=True)
class Strip:
    """One quantity over the response; `most` is the value of the full colour."""

    name: str
    about: str
    most: str
    tokens: list[Token]


@dataclass(frozen=True)
class HeatMap:
    """A response by its tokens."""

    step: int
    prompt: str
    strips: list[Strip]


def last_heat_map(samples: Sequence[Mapping[str, Any]]) -> HeatMap | None:
    """Of the last row that tells its tokens; None where none does."""
    for row in reversed(samples):
        told = row.get("tokens")
        if isinstance(told, Mapping) and (strips := _strips(told)):
            return HeatMap(row["step"], str(row.get("prompt", "")), strips)
    return None


def _strips(told: Mapping[str, Any]) -> list[Strip]:
    texts, strips = told.get("text"), []
    for name, about in TOLD.items():
        values = told.get(name)
        if not isinstance(texts, list) or not isinstance(values, list) or len(values) != len(texts) or not values:
            continue
        if not all(is_number(value) for value in values):
            continue
        most = max(abs(value) for value in values) or 1.0
        tokens = [
            Token(_drawn(str(text)), number(value), round(value / most, 3))
            for text, value in zip(texts, values, strict=True)
        ]
        strips.append(Strip(name, about, number(most), tokens))
    return strips


def _drawn(text: str) -> str:
    """A token's text with its line breaks to be seen; a part of a letter that stands with a later token is a dot."""
    return (
        text.replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}").replace("\t", "\N{RIGHTWARDS ARROW}")
        or "\N{MIDDLE DOT}"
    )
