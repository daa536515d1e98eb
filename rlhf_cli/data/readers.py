"""One reader for each kind of data file. A row is a dict of plain Python values; nothing is guessed or converted."""

import csv
import io
import sys
import textwrap
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from rlhf_cli.config.sources import suffix
from rlhf_cli.errors import RLHFError, closest_match, shown
from rlhf_cli.jsonl import BOM, decode, numbered_lines, numbered_rows, open_data, parse_json

AT_ONCE = 1024  # rows of a Parquet file
NAME_WORDS, NAME_CHARACTERS = 3, 40  # that the name of a column may have before it seems to be a text

csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a long text is no error


class Place(NamedTuple):
    """Where a row stands."""

    path: Path
    number: int  # from 1
    unit: str = "line"  # or row, where a file has no lines to count

    def __str__(self) -> str:
        return f"{shown(self.path)}:{self.number}" if self.unit == "line" else f"{shown(self.path)}: row {self.number}"

    @property
    def short(self) -> str:
        """Without the file."""
        return f"{self.unit} {self.number}"


Rows = Iterator[tuple[Place, dict[str, Any]]]


def read(path: Path, where: str | None = None, opened: BinaryIO | None = None) -> Rows:
    """The rows of a file by its ending; `opened` is the file where it is not on this disk.

    Raises RLHFError D01 (missing, unreadable, unknown ending), D03, D04, D12.
    """
    reader = READERS.get(suffix(path))
    if reader is None:
        near = closest_match(suffix(path), READERS)
        text = f"{shown(path)}: data files end in {', '.join(READERS)}, optionally followed by .gz"
        raise RLHFError("D01", text, where=where, hint=f"did you mean {near}?" if near else None)
    try:
        with opened or open_data(path, where) as file:
            yield from reader(file, path)
    except (OSError, EOFError, zlib.error) as error:
        raise RLHFError("D01", f"cannot read {shown(path)}: {error}", where=where) from error


def _json_lines(file: BinaryIO, path: Path) -> Rows:
    for number, row in numbered_rows(file, path):
        yield Place(path, number), row


def _json(file: BinaryIO, path: Path) -> Rows:
    """A list of objects; what does not begin like a list is read as JSON lines."""
    raw = file.read().removeprefix(BOM)
    if not raw.lstrip().startswith(b"["):
        yield from _json_lines(io.BytesIO(raw), path)
        return
    for number, row in enumerate(parse_json(raw, path), start=1):
        place = Place(path, number, "row")
        if not isinstance(row, dict):
            raise RLHFError("D12", f"the list contains `{row!r:.40}`, not an object {{...}}", where=str(place))
        yield place, row


def _table(file: BinaryIO, path: Path) -> Rows:
    """CSV or TSV with a header. Every cell is a text as it stands there: "NA" and "1e5" stay what they are."""
    texts = (decode(raw, path, number) for number, raw in numbered_lines(file, path))
    reader = csv.reader(texts, delimiter=TABLES[suffix(path)], strict=True)
    start = 1
    header: list[str] = []
    try:
        for cells in reader:
            place, start = Place(path, start), reader.line_num + 1
            if not cells:
                continue
            if not header:
                header = _header(cells, place)
            elif len(cells) != len(header):
                odd = f"{len(cells)} cells, but the header names {len(header)} columns"
                raise RLHFError("D12", odd, where=str(place), hint="quote text that contains the delimiter")
            else:
                yield place, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        alone = "new-line character" in str(error)
        hint = "convert its line ends: tr '\\r' '\\n'" if alone else 'inside quotes, write a quote twice: ""'
        text = f"not valid CSV: {'a line break outside quotes' if alone else error}"
        raise RLHFError("D03", text, where=str(Place(path, start)), hint=hint) from error


def _header(cells: list[str], place: Place) -> list[str]:
    _unlike(cells, str(place), "the header names", lacks_header(place.path, cells))
    return cells


def _unlike(names: list[str], where: str, who: str, hint: str | None = None) -> None:
    """Raises D03 where two columns have one name: of the two a row would keep the last."""
    twice = next((name for name in names if name and names.count(name) > 1), None)
    if twice is not None:
        text = f'{who} the column "{told([twice])}" twice'
        raise RLHFError("D03", text, where=where, hint=hint or "give each column a different name")


def lacks_header(path: Path, names: Collection[str], wanted: Collection[str] = ()) -> str | None:
    """A hint where the names of a table's columns seem to be its first row; `wanted` are those it needs."""
    texts = [len(name.split()) > NAME_WORDS or len(name) > NAME_CHARACTERS for name in names]
    if suffix(path) not in TABLES or 2 * sum(texts) < len(texts):
        return None
    between = "," if suffix(path) == ".csv" else "\\t"
    header = f" '{between.join(wanted)}'" if wanted else ""
    return f"the first line of {path.name} looks like data; add a header line{header}"


def told(names: Iterable[str]) -> str:
    """Names of columns as messages have them."""
    return ", ".join(textwrap.shorten(name, NAME_CHARACTERS, placeholder="...") for name in names)


def _parquet(file: BinaryIO, path: Path) -> Rows:
    import pyarrow as arrow  # comes with datasets; too slow to import for those who need none
    import pyarrow.parquet as parquet

    number = 0
    try:
        with parquet.ParquetFile(file) as table:
            _unlike(table.schema_arrow.names, shown(path), "the file has")
            for batch in table.iter_batches(batch_size=AT_ONCE):
                for row in _plain(batch, path, number):
                    number += 1
                    yield Place(path, number, "row"), row
    except arrow.ArrowException as error:
        reason = " ".join(str(error).split())
        raise RLHFError("D03", f"not a valid Parquet file: {reason}", where=shown(path)) from error


def _plain(batch: Any, path: Path, before: int) -> list[dict[str, Any]]:
    """The rows of a record batch, which `before` others precede.

    Raises D04 with the row that is not UTF-8, D03 with the row and column of what Python cannot hold: a time beyond its
    years, an unknown time zone, an object with a key twice.
    """
    try:
        return batch.to_pylist()
    except Exception as error:  # pyarrow's and datetime's are of many kinds
        for number in range(batch.num_rows):
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                try:
                    column[number].as_py()
                except Exception as fault:
                    place = str(Place(path, before + number + 1, "row"))
                    if isinstance(fault, UnicodeDecodeError):
                        raise RLHFError("D04", "a text is not UTF-8", where=place) from fault
                    text = f'the value of the column "{told([name])}" cannot be read: {fault}'
                    hint = "remove that column, or store it as text"
                    raise RLHFError("D03", text, where=place, hint=hint) from fault
        raise error


def _text(file: BinaryIO, path: Path) -> Rows:
    """One text a line, without the line's end."""
    for number, raw in numbered_lines(file, path):
        text = decode(raw, path, number).rstrip("\r\n")
        if text.strip():
            yield Place(path, number), {"text": text}


TABLES = {".csv": ",", ".tsv": "\t"}  # ending -> what stands between two cells
READERS: dict[str, Callable[[BinaryIO, Path], Rows]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": _table,
    ".tsv": _table,
    ".parquet": _parquet,
    ".txt": _text,
}
