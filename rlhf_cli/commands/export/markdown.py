"""Markdown in which texts of others stay texts: names of files and runs, values of configs, what a stage noted."""

import re
from collections.abc import Iterable, Sequence

from rlhf_cli.commands.report.tables import visible

ACTIVE = re.compile(r"([\\`*_{}\[\]<>~$&#])")


def text(value: str) -> str:
    """On one line, with nothing in it that Markdown or HTML would act on."""
    return ACTIVE.sub(r"\\\1", visible(" ".join(value.split())))


def code(value: str) -> str:
    """On one line, as it is, in a span of code; nothing of nothing."""
    plain = visible(" ".join(value.split()))
    fence = "`" * (max((len(run) for run in re.findall("`+", plain)), default=0) + 1)
    return f"{fence} {plain} {fence}" if "`" in plain else f"{fence}{plain}{fence}" if plain else ""


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are Markdown already."""
    lines = ([cell.replace("|", "\\|") for cell in line] for line in (columns, ["---"] * len(columns), *rows))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def bullets(lines: Iterable[str]) -> str:
    """A list of lines that are Markdown already."""
    return "\n".join(f"- {line}" for line in lines)
