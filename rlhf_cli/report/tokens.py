"""One response token by token: each token shaded by a value."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rlhf_cli.jsonl import is_number
from rlhf_cli.report.formats import number

TOKEN_VALUES = {
    "reward": ("reward", "the token's reward: minus the KL penalty, plus the score at the last token"),
    "kl": ("log-ratio", "log-probability by the policy minus that by SFT, in nats; their sum estimates the KL"),
    "value": ("value", "expected return from here on, by the value model"),
    "advantage": (
        "advantage",
        "return above the expectation: PPO makes tokens above 0 likelier, those below 0 less likely",
    ),
}


class Strip(NamedTuple):
    """A response's tokens with one value each: (text, value, shade from -1 to 1)."""

    name: str
    about: str
    top: str  # value of the full color
    tokens: list[tuple[str, str, float]]


class HeatMap(NamedTuple):
    """A response of PPO's training, token by token."""

    step: int
    prompt: str
    strips: list[Strip]


def last_heat_map(samples: Sequence[Mapping[str, Any]]) -> HeatMap | None:
    """Return the last sample that has token values; None if none has."""
    for row in reversed(samples):
        strips = list(_strips(row.get("tokens")))
        if strips:
            return HeatMap(row["step"], str(row.get("prompt", "")), strips)
    return None


def _strips(tokens: Any) -> Iterator[Strip]:
    """Yield a strip for each kind of value that all tokens have."""
    texts = tokens.get("text") if isinstance(tokens, Mapping) else None
    if not isinstance(texts, list) or not texts:
        return

    for key, (name, about) in TOKEN_VALUES.items():
        values = tokens.get(key)
        if isinstance(values, list) and len(values) == len(texts) and all(map(is_number, values)):
            yield _strip(name, about, texts, values)


def _strip(name: str, about: str, texts: Sequence[Any], values: Sequence[float]) -> Strip:
    """Return the tokens with their values, shaded by the largest."""
    top = max(abs(value) for value in values) or 1.0
    tokens = []
    for text, value in zip(texts, values, strict=True):
        tokens.append((_token_text(str(text)), number(value), round(value / top, 3)))
    return Strip(name, about, number(top), tokens)


def _token_text(text: str) -> str:
    """Return a token's text with visible line breaks and tabs; an incomplete character is a dot."""
    text = text.replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}").replace("\t", "\N{RIGHTWARDS ARROW}")
    return text or "\N{MIDDLE DOT}"
