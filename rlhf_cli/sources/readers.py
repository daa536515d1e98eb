"""One reader for each kind of data file. A row is a dict of plain Python values; nothing is guessed or converted."""

import csv
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_cli.errors import RLHFError, nearest, shown
from rlhf_cli.rows import BOM, decoded, open_data, read_jsonl

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


def read(path: Path, where: str | None = None) -> Rows:
    """The rows of a file by its ending. Raises RLHFError D01 (missing, unreadable, unknown ending), D03, D04, D12."""
    reader = ENDINGS.get(ending(path))
    if reader is None:
        near = nearest(ending(path), ENDINGS)
        text = f"{shown(path)}: a data file ends in {', '.join(ENDINGS)}, or in one of them and .gz"
        raise RLHFError("D01", text, where=where, hint=f"did you mean {near}?" if near else None)
    try:
        yield from reader(path, where)
    except (OSError, EOFError, zlib.error) as error:
        raise RLHFError("D01", f"cannot read {shown(path)}: {error}", where=where) from error


def ending(path: Path) -> str:
    """`.jsonl` of rows.jsonl and of rows.jsonl.gz."""
    return (Path(path.stem) if path.suffix == ".gz" else path).suffix.lower()


def _json_lines(path: Path, where: str | None) -> Rows:
    for number, row in read_jsonl(path, where_key=where):
        yield Place(path, number), row


def _json(path: Path, where: str | None) -> Rows:
    """A list of objects; what does not begin like a list is read as JSON lines."""
    with open_data(path, where) as file:
        raw = file.read().removeprefix(BOM)
    if not raw.lstrip().startswith(b"["):
        yield from _json_lines(path, where)
        return
    text = _utf8(raw, path)
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        at = f"{shown(path)}:{error.lineno}:{error.colno}"
        raise RLHFError("D03", f"not valid JSON: {error.msg}", where=at) from error
    for number, row in enumerate(rows, start=1):
        place = Place(path, number, "row")
        if not isinstance(row, dict):
            raise RLHFError("D12", f"the list holds {row!r:.40}, not an object {{...}}", where=str(place))
        yield place, row


def _table(path: Path, where: str | None) -> Rows:
    """CSV or TSV with a header. Every cell is a text as it stands there: "NA" and "1e5" stay what they are."""
    with open_data(path, where) as file:
        text = _utf8(file.read().removeprefix(BOM), path)
    delimiter = "\t" if ending(path) == ".tsv" else ","
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        header = next(reader, [])
        start = reader.line_num + 1
        for cells in reader:
            place, start = Place(path, start), reader.line_num + 1
            if not cells:
                continue
            if len(cells) != len(header):
                odd = f"{len(cells)} cells, but the header in line 1 names {len(header)} columns"
                raise RLHFError("D12", odd, where=str(place), hint="put a text that holds the delimiter in quotes")
            yield place, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise RLHFError("D03", f"not valid CSV: {error}", where=f"{shown(path)}:{reader.line_num}") from error


def _parquet(path: Path, where: str | None) -> Rows:
    import pyarrow as arrow  # comes with datasets; too slow to import for those who need none
    import pyarrow.parquet as parquet

    if not path.is_file():
        raise RLHFError("D01", f"no such file: {shown(path)}", where=where)
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield Place(path, number, "row"), row
    except arrow.ArrowInvalid as error:
        raise RLHFError("D03", f"no valid Parquet file: {error}", where=shown(path)) from error


def _text(path: Path, where: str | None) -> Rows:
    """One text a line, without the line's end."""
    with open_data(path, where) as file:
        for number, raw in enumerate(file, start=1):
            text = decoded(raw.removeprefix(BOM) if number == 1 else raw, path, number).rstrip("\r\n")
            if text.strip():
                yield Place(path, number), {"text": text}


def _utf8(raw: bytes, path: Path) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        number = raw.count(b"\n", 0, error.start) + 1
        first = raw.rfind(b"\n", 0, error.start) + 1
        last = raw.find(b"\n", error.start)
        return decoded(raw[first : last if last >= 0 else None], path, number)  # raises D04 with the line


ENDINGS: dict[str, Callable[[Path, str | None], Rows]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": _table,
    ".tsv": _table,
    ".parquet": _parquet,
    ".txt": _text,
}
