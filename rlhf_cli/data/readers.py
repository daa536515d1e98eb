"""Readers of data files by suffix, and errors in single rows. Rows are dicts of plain Python values, not converted."""

import csv
import io
import json
import sys
import textwrap
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson

from rlhf_cli.config.sources import suffix
from rlhf_cli.errors import RLHFError, did_you_mean, shell_path, shell_word, shown
from rlhf_cli.jsonl import BOM, decode, numbered_lines, numbered_rows, open_data, parse_json

PARQUET_BATCH_ROWS = 1024
MAX_NAME_CHARACTERS = 40

csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # long texts are allowed


class RowLocation(NamedTuple):
    """File and number of a row."""

    path: Path
    number: int  # from 1
    unit: str = "line"  # "row" for files without lines

    def __str__(self) -> str:
        separator = ":" if self.unit == "line" else ": row "
        return f"{shown(self.path)}{separator}{self.number}"

    @property
    def short(self) -> str:
        """Return the location without the file."""
        return f"{self.unit} {self.number}"


class BadRow(Exception):
    """A row that cannot be used: error code, message without the location, and an optional hint."""

    def __init__(self, code: str, text: str, hint: str | None = None) -> None:
        super().__init__(text)
        self.code = code
        self.text = text
        self.hint = hint


def describe_value(value: Any) -> str:
    """Describe a JSON value for a message."""
    match value:
        case None | bool():
            return json.dumps(value)
        case int() | float():
            return f"the number {value}"
        case str():
            return "text"
        case list():
            return "a list"
    return "an object"


Row = dict[str, Any]
RowIterator = Iterator[tuple[RowLocation, Row]]


def read(path: Path, where: str | None = None, stream: BinaryIO | None = None) -> RowIterator:
    """Yield the rows of a file, or of its remote `stream`. Raises RLHFError D01, D03, D04, D12."""
    reader = READERS.get(suffix(path))
    if reader is None:
        text = f"{shown(path)}: data files end in {', '.join(READERS)}, optionally followed by .gz"
        raise RLHFError("D01", text, where=where, hint=did_you_mean(suffix(path), READERS))
    try:
        with stream or open_data(path, where) as file:
            yield from reader(file, path)
    except (OSError, EOFError, zlib.error) as error:
        raise RLHFError("D01", f"cannot read {shown(path)}: {error}", where=where) from error


def _json_lines(file: BinaryIO, path: Path) -> RowIterator:
    for number, row in numbered_rows(file, path):
        yield RowLocation(path, number), row


def _json(file: BinaryIO, path: Path) -> RowIterator:
    """Read a list of objects, or JSON lines if the file does not start with a list."""
    raw = file.read().removeprefix(BOM)
    if not raw.lstrip().startswith(b"["):
        _refuse_rows_under_a_key(raw, path)
        yield from _json_lines(io.BytesIO(raw), path)
        return
    for number, row in enumerate(parse_json(raw, path), start=1):
        location = RowLocation(path, number, "row")
        if not isinstance(row, dict):
            raise RLHFError("D12", f"the list contains `{row!r:.40}`, not an object {{...}}", where=str(location))
        yield location, row


def _refuse_rows_under_a_key(raw: bytes, path: Path) -> None:
    """Raise D12 if the file is one object with a list of objects, {"data": [{...}, ...]}."""
    try:
        whole = orjson.loads(raw)
    except orjson.JSONDecodeError:  # several objects, or none: the reader of lines says what is wrong
        return
    if not isinstance(whole, dict):
        return
    for key, value in whole.items():
        if value and isinstance(value, list) and all(map(_is_row, value)):
            text = f'the file is one object, with its rows under "{format_columns([key])}"; expected a list of objects'
            list_alone = shell_word(f".[{json.dumps(key)}]")
            hint = f"write the list alone, for example: jq {list_alone} {shell_path(path)} > rows.json"
            raise RLHFError("D12", text, where=shown(path), hint=hint)


def _is_row(value: Any) -> bool:
    """Return True for an object that is no message of a conversation, {role, ...} or {from, ...}."""
    return isinstance(value, dict) and "role" not in value and "from" not in value


def _table(file: BinaryIO, path: Path) -> RowIterator:
    """Read CSV or TSV with a header. Every cell stays text, also "NA" and "1e5"."""
    texts = _lines_of_table(file, path)
    reader = csv.reader(texts, delimiter=TABLES[suffix(path)], strict=True)
    start = 1
    header: list[str] = []
    try:
        for cells in reader:
            location = RowLocation(path, start)
            start = reader.line_num + 1
            if not cells:
                continue
            if not header:
                header = cells
                _refuse_duplicate_names(header, str(location), "the header names")
            elif len(cells) != len(header):
                text = f"{len(cells)} cells, but the header names {len(header)} columns"
                raise RLHFError("D12", text, where=str(location), hint="quote text that contains the delimiter")
            else:
                yield location, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        reason = str(error)
        hint = 'inside quotes, write a quote twice: ""'
        if "new-line character" in reason:
            reason = "a line break outside quotes"
            hint = "convert its line ends: tr '\\r' '\\n'"
        where = str(RowLocation(path, start))
        raise RLHFError("D03", f"not valid CSV: {reason}", where=where, hint=hint) from error


def _lines_of_table(file: BinaryIO, path: Path) -> Iterator[str]:
    """Yield the lines of a table. Raises D02 if another delimiter splits the header, as in the CSV of spreadsheets."""
    is_header = True
    for number, raw in numbered_lines(file, path):
        text = decode(raw, path, number)
        if is_header and text.strip():
            _refuse_other_delimiter(text, path, str(RowLocation(path, number)))
            is_header = False
        yield text


def _refuse_other_delimiter(header: str, path: Path, where: str) -> None:
    if TABLES[suffix(path)] in header:
        return
    for delimiter, words in DELIMITERS.items():
        names = next(csv.reader([header.rstrip("\r\n")], delimiter=delimiter))
        if len(names) > 1:
            text = f"the header has one column; separated by {words} it would name {format_columns(names)}"
            raise RLHFError("D02", text, where=where, hint="separate the columns by commas, or by tabs in a .tsv file")


def _refuse_duplicate_names(names: list[str], where: str, subject: str) -> None:
    """Raise D03 if two columns have the same name; a row would keep only the last."""
    for name in names:
        if name and names.count(name) > 1:
            text = f'{subject} the column "{format_columns([name])}" twice'
            raise RLHFError("D03", text, where=where, hint="give each column a different name")


def format_columns(names: Iterable[str]) -> str:
    """Join column names for a message, with long names shortened."""
    return ", ".join(textwrap.shorten(name, MAX_NAME_CHARACTERS, placeholder="...") for name in names)


def _parquet(file: BinaryIO, path: Path) -> RowIterator:
    import pyarrow as arrow  # a dependency of datasets; slow to import
    import pyarrow.parquet as parquet

    number = 0
    try:
        with parquet.ParquetFile(file) as table:
            _refuse_duplicate_names(table.schema_arrow.names, shown(path), "the file has")
            for batch in table.iter_batches(batch_size=PARQUET_BATCH_ROWS):
                for row in _batch_to_rows(batch, path, number):
                    number += 1
                    yield RowLocation(path, number, "row"), row
    except arrow.ArrowException as error:
        reason = " ".join(str(error).split())
        raise RLHFError("D03", f"not a valid Parquet file: {reason}", where=shown(path)) from error


def _batch_to_rows(batch: Any, path: Path, before: int) -> list[Row]:
    """Return the rows of a record batch that follows `before` rows. Raises D04 (not UTF-8), D03 (no Python value)."""
    try:
        return list(batch.to_pylist())
    except Exception as error:  # pyarrow and datetime raise many types
        if batch.num_rows > 1:  # find the row
            rows = []
            for index in range(batch.num_rows):
                rows += _batch_to_rows(batch.slice(index, 1), path, before + index)
            return rows
        location = str(RowLocation(path, before + 1, "row"))
        if isinstance(error, UnicodeDecodeError):
            raise RLHFError("D04", "a text is not UTF-8", where=location) from error
        hint = "remove its column, or store it as text"
        raise RLHFError("D03", f"a value cannot be read: {error}", where=location, hint=hint) from error


def _text(file: BinaryIO, path: Path) -> RowIterator:
    """Read one text per line, without line ends."""
    for number, raw in numbered_lines(file, path):
        text = decode(raw, path, number).rstrip("\r\n")
        if text.strip():
            yield RowLocation(path, number), {"text": text}


DELIMITERS = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}  # instead of the delimiter of the suffix
TABLES = {".csv": ",", ".tsv": "\t"}  # suffix -> delimiter
READERS: dict[str, Callable[[BinaryIO, Path], RowIterator]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": _table,
    ".tsv": _table,
    ".parquet": _parquet,
    ".txt": _text,
}
