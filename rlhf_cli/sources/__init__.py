"""Where data comes from: a file, a folder of files, or a dataset of the hub, turned into rows with their places."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from rlhf_cli.errors import Problem, RLHFError, nearest, nearest_file, shown
from rlhf_cli.rows import open_data
from rlhf_cli.sources import folders
from rlhf_cli.sources.readers import ENDINGS, Place, ending, read

__all__ = ["HUB_ID", "Place", "Share", "Source", "is_file_name", "locate", "named"]

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
        """The files that hold the rows, in order. Raises RLHFError D01, D02 for a split that is not there."""
        name, split = named(self.name)
        if is_hub_id(name):
            return self._of_hub(name, split)
        path = Path(name)
        if path.is_dir():
            return self._of_folder(path, split)
        if not path.exists():
            near = nearest_file(path)
            hint = f"did you mean {near}?" if near else None
            raise RLHFError("D01", f"no such file {shown(path)}", where=self.where, hint=hint)
        if split:
            raise RLHFError("D01", f"{shown(path)} is one file, it has no split [{split}]", where=self.where)
        open_data(path, self.where).close()  # not found unreadable after minutes, nor a pipe that never ends
        return [path]

    def rows(self) -> Iterator[Row]:
        """Every row with its place, `max_rows` at most, read one at a time. Raises RLHFError D01-D04, D12."""
        left = self.max_rows
        for path in self.files():
            for row in read(path, self.where):
                if left is not None and left <= 0:
                    return
                left = None if left is None else left - 1
                yield row

    def shown(self) -> str:
        """The name as messages tell it."""
        name, split = named(self.name)
        return (name if is_hub_id(name) else shown(name)) + (f"[{split}]" if split else "")

    def _of_hub(self, name: str, split: str | None) -> list[Path]:
        """In the hub's cache or fetched into it; of what is not there yet, `max_rows` are streamed."""
        owner, repository, *inside = name.split("/")
        dataset = f"{owner}/{repository}"
        found = folders.cached(dataset, self.revision)
        if found is None and self.max_rows is not None and not inside:
            splits = (split,) if split else self.splits
            return [folders.first_rows(dataset, self.subset, splits, self.revision, self.max_rows, self.where)]
        found = found or folders.fetch(dataset, self.revision, self.where)
        return self._of_folder(found.joinpath(*inside), split)

    def _of_folder(self, folder: Path, split: str | None) -> list[Path]:
        found = folders.splits(folder, self.subset, self.where)
        wanted = (split,) if split else self.splits
        picked = next((name for name in wanted if name in found), None)
        if picked is None and not split and len(found) == 1:
            picked = next(iter(found))
        if picked is None:
            near = nearest(wanted[0], found)
            text = f"{self.shown()} has no split {' or '.join(wanted)}; it has {', '.join(found)}"
            hint = f"write the split behind the name: [{near or next(iter(found))}]"
            raise RLHFError("D01", text, where=self.where, hint=hint)
        return found[picked]


def named(text: str) -> tuple[str, str | None]:
    """NAME[SPLIT] in its two parts; a split's absence is None."""
    match = NAMED.fullmatch(text)
    return (match["name"], match["split"]) if match else (text, None)


def is_file_name(text: str) -> bool:
    """Whether a name ends like a data file."""
    return ending(Path(text)) in ENDINGS


def is_hub_id(name: str) -> bool:
    """Whether a resolved name (paths are absolute by then) is a dataset of the hub."""
    return not os.path.isabs(name) and not os.path.exists(name) and HUB_ID.fullmatch(name) is not None


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
