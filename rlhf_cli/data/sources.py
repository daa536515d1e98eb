"""Find the files of a data source (a path, a folder or a hub dataset) and iterate over their rows.

Hub datasets are read from full snapshots in the Hub cache, or their first rows from the cache of rlhf.
"""

import gzip
import io
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, cast

import orjson

from rlhf_cli import terminal
from rlhf_cli.config.sources import DataSource, is_hub_id, split_hub_id, split_name, suffix
from rlhf_cli.data import folders, labels
from rlhf_cli.data.readers import READERS, RowIterator, read
from rlhf_cli.errors import Problem, RLHFError, short_reason, shown
from rlhf_cli.jsonl import open_data

MAX_DOWNLOAD_BYTES = 20e9  # larger datasets are not downloaded automatically


def raw_rows(source: DataSource) -> RowIterator:
    """Yield each row with its location, at most `max_rows` of them. Raises RLHFError D01-D04, D12."""
    if source.parts:
        return chain.from_iterable(map(raw_rows, source.parts))
    folder = Path(source.name)
    if labels.is_labels_folder(folder):
        return islice(labels.preference_pairs_of(folder), source.max_rows)
    files = (read(path, source.where) for path in locate_files(source))
    return islice(chain.from_iterable(files), source.max_rows)


def locate(sources: Mapping[str, DataSource]) -> dict[str, list[Path]]:
    """Return the files of each source by key, those of a list by key.NUMBER.

    Raises RLHFError with the problems of all of them.
    """
    files: dict[str, list[Path]] = {}
    problems: list[Problem] = []
    for key, source in _one_by_one(sources):
        try:
            files[key] = locate_files(source)
        except RLHFError as error:
            problems += [replace(problem, text=f"{key}: {problem.text}") for problem in error.problems]
    if problems:
        raise RLHFError.from_problems(problems)
    return files


def _one_by_one(sources: Mapping[str, DataSource]) -> Iterator[tuple[str, DataSource]]:
    for key, source in sources.items():
        if not source.parts:
            yield key, source
        for number, part in enumerate(source.parts):
            yield f"{key}.{number}", part


def locate_files(source: DataSource) -> list[Path]:
    """Return the files that hold the rows, in order. Raises RLHFError D01, also for a split that does not exist."""
    name, split = split_name(source.name)
    if is_hub_id(name):
        return _hub_files(source, name, split)
    path = Path(name)
    if labels.is_labels_folder(path):
        return [path / labels.LABELS]
    if os.path.isdir(path):
        return _folder_files(source, path, split)
    open_data(path, source.where).close()  # fail now if the file is missing, unreadable or a pipe
    if split:
        raise RLHFError("D01", f"{shown(path)} is a single file without a split [{split}]", where=source.where)
    return [path]


def _folder_files(source: DataSource, folder: Path, split: str | None) -> list[Path]:
    name = source.shown().removesuffix(f"[{split}]")
    files = folders.find_splits(folder, name, source.subset, source.where)
    return folders.select_split(files, split, source.splits, name, source.where)


def is_local(source: DataSource) -> bool:
    """Return True if reading the source fetches nothing from the hub."""
    if source.parts:
        return all(map(is_local, source.parts))
    name, split = split_name(source.name)
    if not is_hub_id(name):
        return True
    dataset, part = split_hub_id(name)
    if source.max_rows is not None and not part and _first_rows_path(source, dataset, split).is_file():
        return True
    snapshot = _local_snapshot(dataset, source.revision, part) if is_offline() else None
    return bool(snapshot or _complete_snapshot(dataset, source.revision, part))


def _hub_files(source: DataSource, name: str, split: str | None) -> list[Path]:
    """Return cached files, or fetch them. With `max_rows`, stream that many rows of data that is not cached."""
    dataset, part = split_hub_id(name)
    if source.max_rows is not None and not part:
        path = _first_rows_path(source, dataset, split)
        if not (path.is_file() or is_offline() or _complete_snapshot(dataset, source.revision)):
            _fetch_first_rows(source, dataset, split, path)
        if path.is_file():
            return [path]
    snapshot = _complete_snapshot(dataset, source.revision, part)
    folder = snapshot or _download(dataset, source.revision, part, source.where)
    return _folder_files(source, folder / part, split)


def _complete_snapshot(name: str, revision: str | None, part: str = "") -> Path | None:
    """Return the folder of a dataset (or of its folder `part`) in the Hub cache; None if it may be incomplete."""
    folder = _local_snapshot(name, revision, part)
    if folder is None:
        return None
    # The Hub client writes this list of the commit's files once no file is missing.
    tree = folder.parent.parent / "trees" / f"{folder.name}.json"
    return folder if tree.is_file() else None


def _local_snapshot(name: str, revision: str | None, part: str) -> Path | None:
    """Return the folder in the Hub cache, possibly incomplete, or None if it has no data files (only a README)."""
    try:
        folder = _snapshot(name, revision, part, local_files_only=True)
    except (OSError, ValueError):  # not cached, incomplete, or not a valid id
        return None
    has_data = any(suffix(path) in READERS for path in (folder / part).rglob("*"))
    return folder if has_data else None


def _snapshot(name: str, revision: str | None, part: str, **options: Any) -> Path:
    from huggingface_hub import snapshot_download

    patterns = [f"{part}/*"] if part else None
    return Path(snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=patterns, **options))


def _download(name: str, revision: str | None, part: str, where: str | None) -> Path:
    """Download a dataset, or a `part` of it, to the Hub cache; return its folder.

    If the Hub cannot be reached, the cached files are used. Raises RLHFError D01 if there are none, for an unknown
    name, and for more than 20 GB.
    """
    try:
        return _download_once(name, revision, part)
    except RLHFError as error:
        raise RLHFError.from_problems([replace(problem, where=where) for problem in error.problems]) from error
    except Exception as error:  # HTTP, id and disk errors have many types
        folder = _local_snapshot(name, revision, part)
        if folder is None:
            raise _not_on_the_hub(name, error, where) from error
        terminal.log_once(f"data     {name} from the Hub cache; the Hub could not confirm that it is complete")
        return folder


@cache
def _download_once(name: str, revision: str | None, part: str) -> Path:
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    if is_offline():
        raise OSError("offline mode is on (HF_HUB_OFFLINE)")
    info = HfApi().dataset_info(name, revision=revision, files_metadata=True)
    files = [file for file in info.siblings or [] if file.rfilename.startswith(part)]
    size = sum(file.size or 0 for file in files)
    if size > MAX_DOWNLOAD_BYTES:
        limit = f"the automatic limit of {MAX_DOWNLOAD_BYTES / 1e9:.0f} GB"
        text = f"{name} has {size / 1e9:.0f} GB on the Hub, more than {limit}"
        command = f"hf download --repo-type dataset {name} --include PATTERN --local-dir DIR"
        raise RLHFError("D01", text, hint=f"set data.max_rows, or download a part and set its folder: {command}")

    terminal.say(f"data     downloading {name} from the Hub, {size / 1e6:.0f} MB")
    if not sys.stderr.isatty():
        disable_progress_bars()
    return _snapshot(name, revision, part)  # by the revision's name, so that the name can be resolved offline


def _first_rows_path(source: DataSource, dataset: str, split: str | None) -> Path:
    """Return the file of rlhf's cache for the first `max_rows` rows of a dataset, which may not exist yet."""
    key = (
        f"FirstRows(name={dataset!r}, subset={source.subset!r}, split={split!r}, usual={source.splits!r}, "
        f"revision={source.revision!r}, count={source.max_rows!r})"
    )
    name = f"{Path(dataset).name}-{source.max_rows}-{sha256(key.encode()).hexdigest()[:16]}.jsonl"
    return cache_folder() / "first_rows" / name


def _fetch_first_rows(source: DataSource, dataset: str, split: str | None, path: Path) -> None:
    """Stream the first `max_rows` rows from the Hub to a file. Raises RLHFError D01-D04, D12."""
    from huggingface_hub import HfApi

    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        # Fails immediately without a connection; `datasets` would retry for half a minute.
        commit = HfApi().dataset_info(dataset, revision=source.revision).sha
        try:
            files_by_split = folders.data_files(dataset, source.subset, commit)
        except ValueError as error:
            raise folders.load_error(dataset, dataset, source.subset, source.where, error) from error
        urls = folders.select_split(files_by_split, split, source.splits, dataset, source.where)
        terminal.say(f"data     streaming the first {source.max_rows} rows of {dataset} from the Hub")
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            for row in islice(_stream_rows(dataset, urls, source.where), source.max_rows):
                # Values without a JSON form, such as dates, are written as their repr.
                file.write(orjson.dumps(row, default=repr, option=orjson.OPT_APPEND_NEWLINE))
        partial.replace(path)
    except RLHFError:
        raise
    except Exception as error:  # a network has many ways to fail
        raise _not_on_the_hub(dataset, error, source.where) from error


def _stream_rows(name: str, urls: Sequence[str], where: str | None) -> Iterator[dict[str, Any]]:
    """Yield the rows of remote files with rlhf's readers; `datasets` would convert the text 001 to the number 1."""
    from fsspec.core import url_to_fs

    for url in urls:
        system, remote = url_to_fs(url)
        path = Path(name, remote.partition("@")[2].partition("/")[2])  # from datasets/OWNER/NAME@COMMIT/...
        is_gzip = path.suffix.lower() == ".gz"
        with system.open(remote, "rb") as raw:
            file = gzip.GzipFile(fileobj=raw) if is_gzip else io.BufferedReader(raw, 2**20)
            for _, row in read(path, where, cast(BinaryIO, file)):
                yield row


def is_offline() -> bool:
    """Return True if the Hub client is in offline mode."""
    from huggingface_hub import constants

    return constants.is_offline_mode()


def cache_folder() -> Path:
    """Return the cache folder of rlhf: RLHF_CACHE, or `rlhf` in the user's cache folder."""
    chosen = os.environ.get("RLHF_CACHE")
    if chosen:
        return Path(chosen)
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "rlhf"


def _not_on_the_hub(name: str, error: Exception, where: str | None) -> RLHFError:
    text = f"`{name}` is not a local file or folder, and the Hub did not provide it: {short_reason(error)}"
    hint = f"download it with network access: hf download --repo-type dataset {name}; for a path, start with ./ or /"
    return RLHFError("D01", text, where=where, hint=hint)
