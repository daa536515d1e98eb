"""Markdown with escaping of untrusted text: names of files and runs, config values, messages of stages."""

import re
from collections.abc import Iterable, Sequence

from rlhf_cli.commands.report.tables import visible

ACTIVE = re.compile(r"([\\`*_{}\[\]<>~$&#])")


def text(value: str) -> str:
    """Return a value on one line, with Markdown and HTML characters escaped."""
    return ACTIVE.sub(r"\\\1", visible(" ".join(value.split())))


def code(value: str) -> str:
    """Return a value on one line as a code span; empty if the value is."""
    plain = visible(" ".join(value.split()))
    fence = "`" * (max((len(run) for run in re.findall("`+", plain)), default=0) + 1)
    return f"{fence} {plain} {fence}" if "`" in plain else f"{fence}{plain}{fence}" if plain else ""


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. Cells must already be Markdown."""
    lines = ([cell.replace("|", "\\|") for cell in line] for line in (columns, ["---"] * len(columns), *rows))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def bullets(lines: Iterable[str]) -> str:
    """Return a list. Lines must already be Markdown."""
    return "\n".join(f"- {line}" for line in lines)
