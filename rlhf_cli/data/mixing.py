"""Rows of a list of sources: each source is read by itself, and its weight says how often its rows are used."""

import random
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any, TypeVar

from rlhf_cli import terminal
from rlhf_cli.config.sources import DataSource
from rlhf_cli.data.datasets import Rows, prompt_form
from rlhf_cli.data.formats import DroppedRows
from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.data.tokens import speaks_in_turns
from rlhf_cli.errors import RLHFError

Row = TypeVar("Row")


def read_parts(source: DataSource, read: Callable[[DataSource], Rows[Row]], tokenizer: Any) -> Rows[Row]:
    """Return the rows of a source, or of all sources of a list as often as their weights say.

    Raises RLHFError D23 for sources of different forms, and the errors of `read`.
    """
    if not source.parts:
        return read(source)
    _require_one_form(source, tokenizer)
    parts = [read(part) for part in source.parts]
    _require_margins(source, parts)

    rows: list[Row] = []
    counts = []
    for number, (part, usable) in enumerate(zip(source.parts, parts, strict=True)):
        drawn = _drawn(usable, part, derive_seed(source.seed, "mix", number))
        rows += drawn
        counts.append(f"{len(drawn)} rows of {part.shown()} ({len(usable)} x {part.weight:g})")
    terminal.log_once(f"data     {source.where}: {', '.join(counts)}")
    return _merged(source, parts, rows)


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


def _require_margins(source: DataSource, parts: list[Rows[Any]]) -> None:
    """Raise RLHFError D23 if only some of the sources have a margin."""
    first = source.parts[0]
    first_has = _has_margin(parts[0])
    for part, rows in zip(source.parts, parts, strict=True):
        has = _has_margin(rows)
        if has == first_has:
            continue
        text = f'{first.shown()} has "margin", {part.shown()} has not'
        if has:
            text = f'{part.shown()} has "margin", {first.shown()} has not'
        raise RLHFError("D23", text, where=part.where, hint="give all sources a margin, or none")


def _has_margin(rows: Rows[Any]) -> bool:
    return isinstance(rows[0], dict) and "margin" in rows[0]


def _drawn(rows: Rows[Row], part: DataSource, seed: int) -> list[Row]:
    """Return the rows `weight` times: whole times in their order, and of the last time a draw of them in order."""
    count = round(part.weight * len(rows))
    if count == 0:
        text = f"weight {part.weight:g} of {part.shown()} leaves none of its {len(rows)} rows"
        raise RLHFError("D23", text, where=part.where, hint=f"raise it to at least {1 / len(rows):.2g}")
    times, rest = divmod(count, len(rows))
    generator = random.Random(seed)
    drawn = generator.sample(range(len(rows)), rest)

    used = [*rows] * times
    for index in sorted(drawn):
        used.append(rows[index])
    return used


def _merged(source: DataSource, parts: list[Rows[Any]], rows: list[Row]) -> Rows[Row]:
    """Return the rows with the counts of all parts."""
    merged: Rows[Any] = copy(parts[0])
    merged[:] = rows
    merged.source = source
    merged.num_read = sum(part.num_read for part in parts)
    merged.num_dropped = sum(part.num_dropped for part in parts)
    merged.num_expected = sum(part.num_expected for part in parts)
    merged.longest = max(part.longest for part in parts)
    merged.longest_read = max(part.longest_read for part in parts)
    merged.prompts = frozenset().union(*(part.prompts for part in parts))
    merged.columns = "; ".join(part.columns for part in parts)
    merged.dropped = _merged_causes(parts)
    return merged


def _merged_causes(parts: list[Rows[Any]]) -> dict[str, DroppedRows]:
    causes: dict[str, DroppedRows] = {}
    for part in parts:
        for code, dropped in part.dropped.items():
            earlier = causes.get(code)
            causes[code] = dropped if earlier is None else _sum(earlier, dropped)
    return dict(sorted(causes.items(), key=lambda item: -item[1].rows))


def _sum(first: DroppedRows, second: DroppedRows) -> DroppedRows:
    """Return the number of rows of two sources that were dropped with one code."""
    same_text = first.same_text and second.same_text and first.text == second.text
    rows = first.rows + second.rows
    return replace(first, rows=rows, same_text=same_text)
