"""Datasets of the hub: whole in the hub's own cache, or their first rows in ours."""

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

LARGE = 20e9  # bytes; more is not fetched unasked


def cached(name: str, revision: str | None, part: str = "") -> Path | None:
    """The folder of a dataset in the hub's cache; None where it is not there, or not known to be there whole.

    `part` is the folder inside the dataset that is needed, "" for all of it.
    """
    folder = kept(name, revision, part)
    # The hub's list of the commit's files, with which the hub's client has found nothing to be missing.
    return folder if folder and (folder.parent.parent / "trees" / f"{folder.name}.json").is_file() else None


def kept(name: str, revision: str | None, part: str) -> Path | None:
    """The folder in the hub's cache as it stands; None without data (who only asks for the splits leaves a README)."""
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            name, repo_type="dataset", revision=revision, allow_patterns=_patterns(part), local_files_only=True
        )
    except (OSError, ValueError):  # not there, some of it is missing, or not even the form of an id
        return None
    inside = Path(found) / part
    return Path(found) if any(suffix(path) in READERS for path in inside.rglob("*")) else None


def fetch(name: str, revision: str | None, part: str, where: str | None) -> Path:
    """The folder of a dataset of the hub, fetched into the hub's cache, `part` of it or the whole.

    Where the hub cannot be asked it is what the cache holds. Raises RLHFError D01 where that is nothing, for a name
    that the hub does not know, and for more than 20 GB.
    """
    try:
        return _fetched(name, revision, part)
    except RLHFError as error:
        raise RLHFError("D01", error.problems[0].text, where=where, hint=error.problems[0].hint) from error
    except Exception as error:  # of HTTP, of names, of the disk: each library has classes of its own
        folder = kept(name, revision, part)
        if folder is None:
            raise _not_on_the_hub(name, error, where) from error
        terminal.log_once(f"data     {name} from the Hub cache; the Hub could not confirm that it is complete")
        return folder


@cache
def _fetched(name: str, revision: str | None, part: str) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if is_offline():
        raise OSError("offline mode is on (HF_HUB_OFFLINE)")
    info = HfApi().dataset_info(name, revision=revision, files_metadata=True)
    size = sum(file.size or 0 for file in info.siblings or [] if file.rfilename.startswith(part))
    if size > LARGE:
        text = f"{name} has {size / 1e9:.0f} GB on the Hub, more than the automatic limit of {LARGE / 1e9:.0f} GB"
        download = f"hf download --repo-type dataset {name} --include PATTERN --local-dir DIR"
        raise RLHFError("D01", text, hint=f"set data.max_rows, or download a part and set its folder: {download}")
    terminal.say(f"data     downloading {name} from the Hub, {size / 1e6:.0f} MB")
    if not sys.stderr.isatty():
        disable_progress_bars()
    # By the name of the revision, not by its hash: offline, the name will be asked for again.
    return Path(snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=_patterns(part)))


@dataclass(frozen=True)
class FirstRows:
    """The first rows of a dataset: streamed from the hub once, and kept in our cache."""

    name: str
    subset: str | None
    split: str | None
    usual: tuple[str, ...]  # splits to try where none is asked for
    revision: str | None
    count: int

    @property
    def path(self) -> Path:
        """The JSON lines file that holds them, or will."""
        key = sha256(repr(self).encode()).hexdigest()[:16]
        return cache_folder() / "first_rows" / f"{Path(self.name).name}-{self.count}-{key}.jsonl"

    def fetch(self, where: str | None = None) -> Path:
        """The file, made where it is not there. Raises RLHFError D01-D04, D12."""
        if not self.path.is_file():
            urls = self._urls(where)
            terminal.say(f"data     streaming the first {self.count} rows of {self.name} from the Hub")
            try:
                self._write(islice(_streamed(self.name, urls, where), self.count))
            except RLHFError:
                raise
            except Exception as error:
                raise _not_on_the_hub(self.name, error, where) from error
        return self.path

    def _urls(self, where: str | None) -> list[str]:
        from huggingface_hub import HfApi

        try:
            # `datasets` would try for half a minute to reach a hub that is not there; this fails at once.
            commit = HfApi().dataset_info(self.name, revision=self.revision).sha
        except Exception as error:
            raise _not_on_the_hub(self.name, error, where) from error
        try:
            found = folders.builder(self.name, self.subset, commit).config.data_files or {}
        except ValueError as error:
            raise folders.refused(self.name, self.name, self.subset, where, error) from error
        except Exception as error:
            raise _not_on_the_hub(self.name, error, where) from error
        return folders.pick({str(one): urls for one, urls in found.items()}, self.split, self.usual, self.name, where)

    def _write(self, rows: Iterable[dict[str, Any]]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(f".{os.getpid()}.partial")
        with partial.open("wb") as file:
            for row in rows:  # what JSON has no form for, such as a date, is told as Python does
                file.write(orjson.dumps(row, default=repr, option=orjson.OPT_APPEND_NEWLINE))
        partial.replace(self.path)


def _streamed(name: str, urls: Sequence[str], where: str | None) -> Iterator[dict[str, Any]]:
    """The rows of remote files, as our own readers give them: `datasets` would turn the text 001 into the number 1."""
    from fsspec.core import url_to_fs

    for url in urls:
        system, remote = url_to_fs(str(url))
        path = Path(name, remote.partition("@")[2].partition("/")[2])  # of datasets/OWNER/NAME@COMMIT/...
        with system.open(remote, "rb") as raw:
            file = gzip.GzipFile(fileobj=raw) if path.suffix.lower() == ".gz" else io.BufferedReader(raw, 2**20)
            yield from (row for _, row in read(path, where, cast(BinaryIO, file)))


def is_offline() -> bool:
    """Whether the hub may not be asked."""
    from huggingface_hub import constants

    return constants.is_offline_mode()


def cache_folder() -> Path:
    """Where we keep what can be made again: RLHF_CACHE, or `rlhf` in the user's cache folder."""
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
