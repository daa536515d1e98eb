"""Where data comes from: a file, a folder of files, or a dataset of the hub, turned into rows with their places."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from rlhf_cli.errors import Problem, RLHFError, nearest_file, shown
from rlhf_cli.rows import open_data
from rlhf_cli.sources import folders, hub
from rlhf_cli.sources.readers import ENDINGS, Place, ending, lacks_header, read, told

__all__ = [
    "HUB_ID",
    "Place",
    "Share",
    "Source",
    "dataset_of",
    "is_file_name",
    "lacks_header",
    "locate",
    "named",
    "told",
]

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+(/[\w.-]+)*")
NAMED = re.compile(r"(?P<name>.+?)(\[(?P<split>[\w.-]+)\])?")
Row = tuple[Place, dict[str, Any]]


@dataclass(frozen=True)
class Share:
    """One of the two parts that `data.eval_fraction` cuts data into.

    A hash of the prompt decides: all rows of a prompt fall on one side, in all data cut by this fraction and seed.
    """

    fraction: float
    seed: int
    held_out: bool

    def holds(self, prompt: str) -> bool:
        """Whether rows of this prompt belong to the part."""
        drawn = int.from_bytes(blake2b(f"{self.seed}\0{prompt}".encode(), digest_size=8).digest()) / 2**64
        return (drawn < self.fraction) == self.held_out


@dataclass(frozen=True)
class Source:
    """What a data key names, and how it is read."""

    name: str  # a path, or a hub id; maybe with [SPLIT] behind it
    where: str | None = None  # the place of the key, for messages
    subset: str | None = None
    revision: str | None = None
    max_rows: int | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    format: Literal["auto", "plain", "transcripts"] = "auto"
    on_bad: Literal["error", "drop"] = "error"
    share: Share | None = None
    first_words: tuple[int, int] | None = None  # fewest and most words that are kept of a prompt
    splits: tuple[str, ...] = ("train",)  # tried in turn where the name has no [SPLIT]

    @classmethod
    def of(cls, named_by: "Source | Path | str") -> "Source":
        """A source as it is, or one of a bare path."""
        return named_by if isinstance(named_by, Source) else cls(str(named_by))

    def files(self) -> list[Path]:
        """The files that hold the rows, in order. Raises RLHFError D01, also for a split that is not there."""
        name, split = named(self.name)
        if is_hub_id(name):
            return self._of_hub(name, split)
        path = Path(name)
        if os.path.isdir(path):
            return self._of_folder(path, split)
        if not os.path.exists(path):
            near = nearest_file(path)
            hint = f"did you mean {near}?" if near else None
            raise RLHFError("D01", f"no such file {shown(path)}", where=self.where, hint=hint)
        if split:
            raise RLHFError("D01", f"{shown(path)} is one file, it has no split [{split}]", where=self.where)
        open_data(path, self.where).close()  # not found unreadable after minutes, nor a pipe that never ends
        return [path]

    def rows(self) -> Iterator[Row]:
        """Every row with its place, `max_rows` at most, read one at a time. Raises RLHFError D01-D04, D12."""
        return islice((row for path in self.files() for row in read(path, self.where)), self.max_rows)

    def shown(self) -> str:
        """The name as messages tell it."""
        name, split = named(self.name)
        return (name if is_hub_id(name) else shown(name)) + (f"[{split}]" if split else "")

    def is_here(self) -> bool:
        """Whether nothing of it has to be fetched from the hub, so that a look at it costs little."""
        name, split = named(self.name)
        if not is_hub_id(name):
            return True
        dataset, part = _in_two(name)
        first = self._first_rows(dataset, split) if self.max_rows is not None and not part else None
        kept = hub.kept(dataset, self.revision, part) if hub.is_offline() else None
        return bool(kept or hub.cached(dataset, self.revision, part) or (first and first.path.is_file()))

    def _of_hub(self, name: str, split: str | None) -> list[Path]:
        """In the hub's cache or fetched into it; of what is not there yet, `max_rows` are streamed."""
        dataset, part = _in_two(name)
        if self.max_rows is not None and not part:
            first = self._first_rows(dataset, split)
            if first.path.is_file() or not (hub.is_offline() or hub.cached(dataset, self.revision)):
                return [first.fetch(self.where)]
        folder = hub.cached(dataset, self.revision, part) or hub.fetch(dataset, self.revision, part, self.where)
        return self._of_folder(folder / part, split)

    def _first_rows(self, dataset: str, split: str | None) -> hub.FirstRows:
        assert self.max_rows is not None
        return hub.FirstRows(dataset, self.subset, split, self.splits, self.revision, self.max_rows)

    def _of_folder(self, folder: Path, split: str | None) -> list[Path]:
        name = self.shown().removesuffix(f"[{split}]")
        found = folders.splits(folder, name, self.subset, self.where)
        return folders.pick(found, split, self.splits, name, self.where)


def named(text: str, base: str = "") -> tuple[str, str | None]:
    """NAME[SPLIT] in its two parts; a split's absence is None. A path of `base` may itself end in brackets."""
    match = None if os.path.exists(os.path.join(base, text)) else NAMED.fullmatch(text)
    return (match["name"], match["split"]) if match else (text, None)


def is_file_name(text: str) -> bool:
    """Whether a name ends like a data file."""
    return ending(Path(text)) in ENDINGS


def is_hub_id(name: str) -> bool:
    """Whether a resolved name (paths are absolute by then) is a dataset of the hub, or a folder in one."""
    local = os.path.isabs(name) or os.path.exists(name) or is_file_name(name)
    return not local and HUB_ID.fullmatch(name) is not None


def dataset_of(text: str) -> str | None:
    """The dataset OWNER/NAME that a data key of a stage's own config.yaml names, where paths begin with a dot."""
    name, _ = named(text)
    local = name.startswith((".", "/")) or is_file_name(name)
    return _in_two(name)[0] if not local and HUB_ID.fullmatch(name) else None


def _in_two(name: str) -> tuple[str, str]:
    """A hub id as dataset and folder inside it, "" for all of it."""
    owner, repository, *inside = name.split("/")
    return f"{owner}/{repository}", "/".join(inside)


def locate(sources: Mapping[str, Source]) -> dict[str, list[Path]]:
    """The files of every source, by key. Raises RLHFError with what is wrong with all of them."""
    found: dict[str, list[Path]] = {}
    problems: list[Problem] = []
    for key, source in sources.items():
        try:
            found[key] = source.files()
        except RLHFError as error:
            problems += [Problem(p.code, f"{key}: {p.text}", p.where, p.hint) for p in error.problems]
    if problems:
        raise RLHFError.of(problems)
    return found
