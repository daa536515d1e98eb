"""Rows of a list of sources: each source is read by itself, and its weight says how often its rows are used."""

import random
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, TypeVar

from rlhf_cli import terminal
from rlhf_cli.config.sources import DataSource
from rlhf_cli.data.datasets import Rows, prompt_form
from rlhf_cli.data.formats import DroppedRows, by_frequency
from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.data.tokens import speaks_in_turns
from rlhf_cli.errors import RLHFError

Row = TypeVar("Row")
MARGIN_HINT = "give all sources a margin, or none; for grades or ratings margin_per_point of a source sets it, 0 none"


def read_parts(source: DataSource, read: Callable[[DataSource], Rows[Row]], tokenizer: Any) -> Rows[Row]:
    """Return the rows of a source, or of all sources of a list as often as their weights say.

    Raises RLHFError D23 for sources of different forms, and the errors of `read`.
    """
    if not source.parts:
        return read(source)
    _require_one_form(source, tokenizer)
    parts = [read(part) for part in source.parts]
    _require_margins(parts)

    merged = _merged(source, parts)
    counts = []
    for number, rows in enumerate(parts):
        used = drawn(rows, rows.source, seed_of(source, number))
        merged += used

        name = rows.source.shown()
        weight = rows.source.weight
        counts.append(f"{len(used)} rows of {name} ({len(rows)} x {weight:g})")
        use = {
            "source": name,
            "form": rows.form,
            "rows": len(rows),
            "weight": weight,
            "used": len(used),
        }
        merged.sources.append(use)
    terminal.log_once(f"data     {source.where}: {', '.join(counts)}")
    return merged


def _require_one_form(source: DataSource, tokenizer: Any) -> None:
    """Raise RLHFError D23 if the prompts of a source have another form than those of the first one."""
    in_turns = speaks_in_turns(tokenizer)
    first, *others = source.parts
    form = prompt_form(first, in_turns=in_turns)
    for part in others:
        other = prompt_form(part, in_turns=in_turns)
        if other != form:
            text = f"the prompts of {part.shown()} are {other}s, those of {first.shown()} {form}s"
            raise RLHFError("D23", text, where=part.where, hint="set format: turns of the source of texts")


def _require_margins(parts: list[Rows[Any]]) -> None:
    """Raise RLHFError D23 if only some of the sources have a margin."""
    first = parts[0]
    for rows in parts:
        if _has_margin(rows) == _has_margin(first):
            continue
        having = first
        lacking = rows
        if _has_margin(rows):
            having = rows
            lacking = first
        text = f'{having.source.shown()} has "margin", {lacking.source.shown()} has not'
        raise RLHFError("D23", text, where=rows.source.where, hint=MARGIN_HINT)


def _has_margin(rows: Rows[Any]) -> bool:
    return isinstance(rows[0], dict) and "margin" in rows[0]


def seed_of(source: DataSource, number: int) -> int:
    """Return the seed of the rows that a weight draws of a list's source."""
    return derive_seed(source.seed, "mix", number)


def drawn(rows: Sequence[Row], source: DataSource, seed: int) -> list[Row]:
    """Return a source's rows `weight` times: whole times in their order, and of the last time a draw in order.

    Raises RLHFError D23 if none is left.
    """
    usable = len(rows)
    count = round(source.weight * usable)
    if count == 0:
        text = f"weight {source.weight:g} of {source.shown()} leaves none of its {usable} rows"
        hint = f"raise it to at least {1 / usable:.2g}"
        raise RLHFError("D23", text, where=source.where, hint=hint)

    times, rest = divmod(count, usable)
    generator = random.Random(seed)
    indices = generator.sample(range(usable), rest)
    indices.sort()
    used = [*rows] * times
    used += [rows[index] for index in indices]
    return used


def _merged(source: DataSource, parts: list[Rows[Row]]) -> Rows[Row]:
    """Return an empty copy with the counts of all parts."""
    merged = copy(parts[0])
    merged.clear()
    merged.source = source
    merged.sources = []

    merged.num_read = sum(part.num_read for part in parts)
    merged.num_dropped = sum(part.num_dropped for part in parts)
    merged.num_expected = sum(part.num_expected for part in parts)
    merged.longest = max(part.longest for part in parts)
    merged.longest_read = max(part.longest_read for part in parts)
    merged.columns = "; ".join(part.columns for part in parts)
    for part in parts:
        merged.prompts |= part.prompts
    merged.dropped = _merged_causes(parts)
    return merged


def _merged_causes(parts: list[Rows[Row]]) -> dict[str, DroppedRows]:
    """Return the dropped rows of all parts by code, the most frequent one first."""
    causes: dict[str, DroppedRows] = {}
    for part in parts:
        for code, dropped in part.dropped.items():
            if code in causes:
                dropped = _sum(causes[code], dropped)
            causes[code] = dropped
    return by_frequency(causes)


def _sum(first: DroppedRows, second: DroppedRows) -> DroppedRows:
    """Return the number of rows of two sources that were dropped with one code."""
    same_text = first.same_text and second.same_text and first.text == second.text
    rows = first.rows + second.rows
    return replace(first, rows=rows, same_text=same_text)
