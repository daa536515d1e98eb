"""Texts of others on a page: nothing in them may act, and what cannot be seen is made visible."""

import re
from collections.abc import Mapping
from typing import Any

from rlhf_cli.redaction import redacted

GENERATOR = "rlhf report"  # how we know our own pages: no other file is ever replaced
# Control characters but newline and tab; what turns the direction of a text; what has no width; halves of characters.
UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def visible(text: str) -> str:
    """The text without secrets, each character that one could not see as its number: `[U+202E]`."""
    return UNSEEN.sub(lambda found: f"[U+{ord(found[0]):04X}]", redacted(text))


def finalize(value: Any) -> Any:
    """For Jinja: what a template prints. Markup is ours and stays; all else is escaped behind this."""
    if value is None or hasattr(value, "__html__"):
        return value
    return visible(str(value))


def number(value: float) -> str:
    """A number in few digits, a real minus sign in front where it is below 0."""
    text = f"{value:.3g}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.2g}" if abs(value) < 1e-3 else ""
    return (text or f"{value:,.0f}").replace("-", "\N{MINUS SIGN}")


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def bounds(interval: Any) -> str:
    """An interval of shares as percents: ` [58, 68]`; nothing where there is none."""
    return f" [{100 * interval[0]:.0f}, {100 * interval[1]:.0f}]" if interval else ""


def count(number_of: int, word: str) -> str:
    """`1 update`, `40 updates`."""
    return f"{number_of:,} {word}{'' if number_of == 1 else 's'}"


def rated(rate: Mapping[str, Any]) -> str:
    """A win rate with its interval, if it has one: `52 % [46, 58]`."""
    return percent(rate["value"]) + bounds(rate.get("ci95"))
