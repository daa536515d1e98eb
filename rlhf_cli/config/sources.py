"""Declarations of data sources: what a data key of a YAML names, and how its rows are read."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Literal

from rlhf_cli.errors import shown

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+(/[\w.-]+)*")
NAME_AND_SPLIT = re.compile(r"(?P<name>.+?)(\[(?P<split>[\w.-]+)\])?")
DATA_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt")


@dataclass(frozen=True)
class HoldoutSplit:
    """Training or held-out part of data split by `data.eval_fraction`.

    A hash of the prompt decides, so all rows of a prompt fall on the same side in all data with this fraction and seed.
    """

    fraction: float
    seed: int
    held_out: bool

    def contains(self, prompt: str) -> bool:
        """Return True if rows of this prompt belong to the part."""
        position = int.from_bytes(blake2b(f"{self.seed}\0{prompt}".encode(), digest_size=8).digest()) / 2**64
        return (position < self.fraction) == self.held_out


@dataclass(frozen=True)
class DataSource:
    """Data of a key and the options for reading it; rlhf_cli.data.sources reads it."""

    name: str  # a path or a hub id, optionally followed by [SPLIT]
    where: str | None = None  # location of the key, for messages
    section: str = "data"  # the key whose `columns` name those of the source
    subset: str | None = None
    revision: str | None = None
    max_rows: int | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    format: Literal["auto", "plain", "transcripts", "turns"] = "auto"
    on_bad: Literal["error", "drop"] = "error"
    pairs_per_prompt: Literal["one", "all"] = "one"  # of rated answers
    min_rating_gap: float = 0.0
    margin_per_point: float | None = None  # None: of grades, the margin of Llama 2; of ratings, none
    share: HoldoutSplit | None = None
    first_words: tuple[int, int] | None = None  # minimum and maximum number of words to keep of a prompt
    splits: tuple[str, ...] = ("train",)  # tried in this order if the name has no [SPLIT]
    weight: float = 1.0  # of a source in a list: how often each of its rows is used
    parts: tuple["DataSource", ...] = ()  # the sources of a list, whose name is not read
    seed: int = 0  # of the rows that a weight draws

    @classmethod
    def of(cls, source: "DataSource | Path | str") -> "DataSource":
        """Return the source itself, or the source of a bare path."""
        return source if isinstance(source, DataSource) else cls(str(source))

    def each(self) -> tuple["DataSource", ...]:
        """Return the sources of a list, or the source itself."""
        return self.parts or (self,)

    def shown(self) -> str:
        """Return the name for messages, of a list the names of its sources."""
        if self.parts:
            return ", ".join(part.shown() for part in self.parts)
        name, split = split_name(self.name)
        return (name if is_hub_id(name) else shown(name)) + (f"[{split}]" if split else "")


def split_name(text: str, base: str = "") -> tuple[str, str | None]:
    """Split NAME[SPLIT] into name and split, None if absent. A path that exists may itself end in brackets."""
    match = None if os.path.exists(os.path.join(base, text)) else NAME_AND_SPLIT.fullmatch(text)
    return (match["name"], match["split"]) if match else (text, None)


def suffix(path: Path) -> str:
    """Return `.jsonl` for rows.jsonl and for rows.jsonl.gz."""
    return (Path(path.stem) if path.suffix.lower() == ".gz" else path).suffix.lower()


def is_file_name(text: str) -> bool:
    """Return True if a name ends like a data file."""
    return suffix(Path(text)) in DATA_SUFFIXES


def is_hub_id(name: str) -> bool:
    """Return True if a resolved name (paths are absolute by then) is a dataset of the hub, or a folder in one."""
    return bool(HUB_ID.fullmatch(name)) and not (os.path.isabs(name) or os.path.exists(name) or is_file_name(name))


def hub_dataset(text: str) -> str | None:
    """Return the dataset OWNER/NAME that a data key of a saved config.yaml names; paths begin with a dot there."""
    name, _ = split_name(text)
    local = name.startswith((".", "/")) or is_file_name(name)
    return split_hub_id(name)[0] if not local and HUB_ID.fullmatch(name) else None


def split_hub_id(name: str) -> tuple[str, str]:
    """Split a hub id into the dataset and the folder inside it ("" for all of it)."""
    owner, repository, *inside = name.split("/")
    return f"{owner}/{repository}", "/".join(inside)
