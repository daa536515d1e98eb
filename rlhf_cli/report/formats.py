"""Texts of the report: numbers, shares, counts, and text that is safe to show."""

import re
from collections.abc import Sequence

from rlhf_cli.errors import redact
from rlhf_cli.runs.report import WinRate

# Control characters except newline and tab, direction overrides, zero-width characters, surrogates.
INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def visible(text: str) -> str:
    """Return the text without secrets, each invisible character as its code: `[U+202E]`."""
    return INVISIBLE.sub(lambda match: f"[U+{ord(match[0]):04X}]", redact(text))


def number(value: float) -> str:
    """Return a number in few digits, with a real minus sign."""
    size = abs(value)
    if size >= 999.5:
        text = f"{value:,.0f}"
    elif size >= 1e-3 or size == 0:
        text = f"{value:.3g}"
    else:
        text = f"{value:.2g}"
    return text.replace("-", "\N{MINUS SIGN}")


def percent(share: float) -> str:
    """Return a share in percent, as exact as the three decimals of the tables: `89.5 %`, `50 %`."""
    return f"{_percentage(share)} %"


def interval_text(interval: Sequence[float] | None) -> str:
    """Return an interval of shares in percent: ` [58, 68.3]`; empty without one."""
    return f" [{_percentage(interval[0])}, {_percentage(interval[1])}]" if interval else ""


def _percentage(share: float) -> str:
    return f"{100 * share:.1f}".removesuffix(".0")


def unbroken(text: object) -> str:
    """Return a text whose intervals stay on one line: it may wrap before `[0.58, 0.68]`, not in it."""
    return re.sub(r"\[[^\[\]]*\]", lambda found: found[0].replace(" ", "\N{NO-BREAK SPACE}"), str(text))


def count(n: int, word: str) -> str:
    """Return `1 update`, `40 updates`."""
    return f"{n:,} {word}{'' if n == 1 else 's'}"


def rated(rate: WinRate) -> str:
    """Return a win rate with its interval, if it has one: `52 % [46, 58]`."""
    return percent(rate.value) + interval_text(rate.ci95)
