"""Hub datasets: full snapshots in the Hub cache, or their first rows in the cache of rlhf."""

import gzip
import io
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, cast

import orjson

from rlhf_cli import terminal
from rlhf_cli.config.sources import suffix
from rlhf_cli.data import folders
from rlhf_cli.data.readers import READERS, read
from rlhf_cli.errors import RLHFError

MAX_DOWNLOAD_BYTES = 20e9  # larger datasets are not downloaded automatically


def complete_snapshot(name: str, revision: str | None, part: str = "") -> Path | None:
    """Return the folder of a dataset in the Hub cache, or None if it is missing or may be incomplete.

    `part` is the required folder inside the dataset, "" for all of it.
    """
    folder = local_snapshot(name, revision, part)
    # The Hub client writes this list of the commit's files once no file is missing.
    return folder if folder and (folder.parent.parent / "trees" / f"{folder.name}.json").is_file() else None


def local_snapshot(name: str, revision: str | None, part: str) -> Path | None:
    """Return the folder in the Hub cache, possibly incomplete, or None if it has no data files.

    A request for the splits only caches the README.
    """
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            name, repo_type="dataset", revision=revision, allow_patterns=_patterns(part), local_files_only=True
        )
    except (OSError, ValueError):  # not cached, incomplete, or not a valid id
        return None
    files = (Path(folder) / part).rglob("*")
    return Path(folder) if any(suffix(path) in READERS for path in files) else None


def download(name: str, revision: str | None, part: str, where: str | None) -> Path:
    """Download a dataset, or a `part` of it, to the Hub cache; return its folder.

    If the Hub cannot be reached, the cached files are used. Raises RLHFError D01 if there are none, for an unknown
    name, and for more than 20 GB.
    """
    try:
        return _download(name, revision, part)
    except RLHFError as error:
        raise RLHFError("D01", error.problems[0].text, where=where, hint=error.problems[0].hint) from error
    except Exception as error:  # HTTP, id and disk errors have many types
        folder = local_snapshot(name, revision, part)
        if folder is None:
            raise _not_on_the_hub(name, error, where) from error
        terminal.log_once(f"data     {name} from the Hub cache; the Hub could not confirm that it is complete")
        return folder


@cache
def _download(name: str, revision: str | None, part: str) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if is_offline():
        raise OSError("offline mode is on (HF_HUB_OFFLINE)")
    info = HfApi().dataset_info(name, revision=revision, files_metadata=True)
    size = sum(file.size or 0 for file in info.siblings or [] if file.rfilename.startswith(part))
    if size > MAX_DOWNLOAD_BYTES:
        limit = f"the automatic limit of {MAX_DOWNLOAD_BYTES / 1e9:.0f} GB"
        text = f"{name} has {size / 1e9:.0f} GB on the Hub, more than {limit}"
        command = f"hf download --repo-type dataset {name} --include PATTERN --local-dir DIR"
        raise RLHFError("D01", text, hint=f"set data.max_rows, or download a part and set its folder: {command}")
    terminal.say(f"data     downloading {name} from the Hub, {size / 1e6:.0f} MB")
    if not sys.stderr.isatty():
        disable_progress_bars()
    # By the revision's name, not its hash, so that the name can be resolved offline.
    return Path(snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=_patterns(part)))


@dataclass(frozen=True)
class FirstRows:
    """First rows of a dataset, streamed from the Hub once and cached by rlhf."""

    name: str
    subset: str | None
    split: str | None
    usual: tuple[str, ...]  # splits to try if `split` is None; field names are part of the cache key
    revision: str | None
    count: int

    @property
    def path(self) -> Path:
        """Return the path of the JSON lines file, which may not exist yet."""
        key = sha256(repr(self).encode()).hexdigest()[:16]
        return cache_folder() / "first_rows" / f"{Path(self.name).name}-{self.count}-{key}.jsonl"

    def download(self, where: str | None = None) -> Path:
        """Return the file, and create it if it is missing. Raises RLHFError D01-D04, D12."""
        if not self.path.is_file():
            urls = self._urls(where)
            terminal.say(f"data     streaming the first {self.count} rows of {self.name} from the Hub")
            try:
                self._write(islice(_stream_rows(self.name, urls, where), self.count))
            except RLHFError:
                raise
            except Exception as error:
                raise _not_on_the_hub(self.name, error, where) from error
        return self.path

    def _urls(self, where: str | None) -> list[str]:
        from huggingface_hub import HfApi

        try:
            # Fails immediately without a connection; `datasets` would retry for half a minute.
            commit = HfApi().dataset_info(self.name, revision=self.revision).sha
        except Exception as error:
            raise _not_on_the_hub(self.name, error, where) from error
        try:
            data_files = folders.dataset_builder(self.name, self.subset, commit).config.data_files or {}
        except ValueError as error:
            raise folders.load_error(self.name, self.name, self.subset, where, error) from error
        except Exception as error:
            raise _not_on_the_hub(self.name, error, where) from error
        files_by_split = {str(name): urls for name, urls in data_files.items()}
        return folders.select_split(files_by_split, self.split, self.usual, self.name, where)

    def _write(self, rows: Iterable[dict[str, Any]]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(f".{os.getpid()}.partial")
        with partial.open("wb") as file:
            for row in rows:  # values without a JSON form, such as dates, are written as their repr
                file.write(orjson.dumps(row, default=repr, option=orjson.OPT_APPEND_NEWLINE))
        partial.replace(self.path)


def _stream_rows(name: str, urls: Sequence[str], where: str | None) -> Iterator[dict[str, Any]]:
    """Yield the rows of remote files with rlhf's readers; `datasets` would convert the text 001 to the number 1."""
    from fsspec.core import url_to_fs

    for url in urls:
        system, remote = url_to_fs(str(url))
        path = Path(name, remote.partition("@")[2].partition("/")[2])  # from datasets/OWNER/NAME@COMMIT/...
        with system.open(remote, "rb") as raw:
            file = gzip.GzipFile(fileobj=raw) if path.suffix.lower() == ".gz" else io.BufferedReader(raw, 2**20)
            yield from (row for _, row in read(path, where, cast(BinaryIO, file)))


def is_offline() -> bool:
    """Return True if the Hub client is in offline mode."""
    from huggingface_hub import constants

    return constants.is_offline_mode()


def cache_folder() -> Path:
    """Return the cache folder of rlhf: RLHF_CACHE, or `rlhf` in the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlhf"
    return Path(os.environ.get("RLHF_CACHE") or default)


def _patterns(part: str) -> list[str] | None:
    return [f"{part}/*"] if part else None


def _not_on_the_hub(name: str, error: Exception, where: str | None) -> RLHFError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return RLHFError(
        "D01",
        f"`{name}` is not a local file or folder, and the Hub did not provide it: {reason}",
        where=where,
        hint=f"download it with network access: hf download --repo-type dataset {name}; for a path, start with ./ or /",
    )
