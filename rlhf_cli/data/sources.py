"""Read data sources: find the files of a path, a folder or a hub dataset, and iterate over their rows."""

import os
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from rlhf_cli.config.sources import DataSource, is_hub_id, split_hub_id, split_name
from rlhf_cli.data import folders, hub
from rlhf_cli.data.readers import RowLocation, read
from rlhf_cli.errors import Problem, RLHFError, closest_path, shown
from rlhf_cli.jsonl import open_data

Row = tuple[RowLocation, dict[str, Any]]


def locate_files(source: DataSource) -> list[Path]:
    """Return the files that hold the rows, in order. Raises RLHFError D01, also for a split that does not exist."""
    name, split = split_name(source.name)
    if is_hub_id(name):
        return _hub_files(source, name, split)
    path = Path(name)
    if os.path.isdir(path):
        return _folder_files(source, path, split)
    if not os.path.exists(path):
        near = closest_path(path)
        hint = f"did you mean {near}?" if near else None
        raise RLHFError("D01", f"no such file {shown(path)}", where=source.where, hint=hint)
    if split:
        raise RLHFError("D01", f"{shown(path)} is a single file without a split [{split}]", where=source.where)
    open_data(path, source.where).close()  # fail now if the file is unreadable or a pipe
    return [path]


def read_rows(source: DataSource) -> Iterator[Row]:
    """Yield each row with its location, at most `max_rows` of them. Raises RLHFError D01-D04, D12."""
    return islice((row for path in locate_files(source) for row in read(path, source.where)), source.max_rows)


def is_local(source: DataSource) -> bool:
    """Return True if reading the source fetches nothing from the hub."""
    name, split = split_name(source.name)
    if not is_hub_id(name):
        return True
    dataset, part = split_hub_id(name)
    first = _first_rows(source, dataset, split) if source.max_rows is not None and not part else None
    snapshot = hub.local_snapshot(dataset, source.revision, part) if hub.is_offline() else None
    return bool(snapshot or hub.complete_snapshot(dataset, source.revision, part) or (first and first.path.is_file()))


def _hub_files(source: DataSource, name: str, split: str | None) -> list[Path]:
    """Return cached files, or fetch them. With `max_rows`, stream that many rows of data that is not cached."""
    dataset, part = split_hub_id(name)
    if source.max_rows is not None and not part:
        first = _first_rows(source, dataset, split)
        if first.path.is_file() or not (hub.is_offline() or hub.complete_snapshot(dataset, source.revision)):
            return [first.download(source.where)]
    snapshot = hub.complete_snapshot(dataset, source.revision, part)
    folder = snapshot or hub.download(dataset, source.revision, part, source.where)
    return _folder_files(source, folder / part, split)


def _first_rows(source: DataSource, dataset: str, split: str | None) -> hub.FirstRows:
    assert source.max_rows is not None
    return hub.FirstRows(dataset, source.subset, split, source.splits, source.revision, source.max_rows)


def _folder_files(source: DataSource, folder: Path, split: str | None) -> list[Path]:
    name = source.shown().removesuffix(f"[{split}]")
    files = folders.find_splits(folder, name, source.subset, source.where)
    return folders.select_split(files, split, source.splits, name, source.where)


def locate(sources: Mapping[str, DataSource]) -> dict[str, list[Path]]:
    """Return the files of each source by key. Raises RLHFError with the problems of all of them."""
    files: dict[str, list[Path]] = {}
    problems: list[Problem] = []
    for key, source in sources.items():
        try:
            files[key] = locate_files(source)
        except RLHFError as error:
            problems += [Problem(p.code, f"{key}: {p.text}", p.where, p.hint) for p in error.problems]
    if problems:
        raise RLHFError.from_problems(problems)
    return files
