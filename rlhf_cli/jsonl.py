"""Read and write JSON Lines, with file and line in every message."""

import gzip
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard, cast

import orjson

from rlhf_cli.errors import RLHFError, closest_path, shown

BOM = b"\xef\xbb\xbf"
BLANK = (b"\n", b"\r\n")
MAX_LINE_BYTES = 2**27  # a row of a million words has about 7 million
MAX_BLANK_LINES = 100_000  # in a row
UTF16 = (b"\xff\xfe", b"\xfe\xff")
# control characters like ESC that json, which escapes C0 only, leaves in
DEL_AND_C1 = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}
KEY = re.compile(rb'"\s*:')  # follows each key; may also occur inside a string
ONE_PER_LINE = "JSON Lines hold one object a line; a list of objects is read from a file that ends in .json"


def values_of(row: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return some values of a data file's row, e.g. a date or NaN of Parquet, as JSON can write them."""
    return json.loads(json.dumps({name: row.get(name) for name in names}, default=str), parse_constant=str)


def read_jsonl(path: Path, *, where_key: str | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, row) for each line that is not blank.

    `where_key` is the location that named the file (`config.where("data.train")`), for the message about a missing one.
    Raises RLHFError: D01 missing, D03 malformed, D04 not UTF-8, D12 a line that is not a JSON object.
    """
    path = Path(path)
    with open_data(path, where_key) as file:
        yield from numbered_rows(file, path)


def numbered_rows(file: BinaryIO, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield like `read_jsonl` from an open file; `path` is its name in messages."""
    for number, raw in numbered_lines(file, path):
        try:
            row = orjson.loads(raw)
        except orjson.JSONDecodeError:
            row = None  # blank or invalid: `parse_json` reports which
        if type(row) is dict:
            if len(KEY.findall(raw)) > len(row):
                _refuse_duplicate_keys(row, raw, path, number)
            yield number, row
        elif decode(raw, path, number).strip():
            row = parse_json(raw.rstrip(b"\r\n"), path, number)
            if not isinstance(row, dict):
                kinds = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
                text = f"the line holds {kinds.get(type(row), 'a number')}, not an object {{...}}"
                raise RLHFError("D12", text, where=f"{shown(path)}:{number}", hint=ONE_PER_LINE)
            yield number, row


def numbered_lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, bytes) of each line of an open file, without a byte order mark.

    Raises RLHFError D03 for overlong lines and too many empty ones: a small compressed file may hold either.
    """
    blank = 0
    for number, raw in enumerate(iter(partial(file.readline, MAX_LINE_BYTES + 1), b""), start=1):
        blank = blank + 1 if raw in BLANK else 0
        if len(raw) > MAX_LINE_BYTES or blank > MAX_BLANK_LINES:
            problem = f"a line of more than {MAX_LINE_BYTES:,} bytes"
            problem = f"more than {MAX_BLANK_LINES:,} empty lines" if blank else problem
            raise RLHFError("D03", f"not a file of rows: {problem}", where=f"{shown(path)}:{number}")
        yield number, raw.removeprefix(BOM) if number == 1 else raw


def open_data(path: Path, where_key: str | None = None) -> BinaryIO:
    """Open a data file for its bytes, decompressed if its name ends in .gz. Raises D01 if that fails."""
    if not os.path.isfile(path):
        kind = "a folder" if os.path.isdir(path) else "a device or a pipe" if os.path.exists(path) else None
        text = f"{shown(path)} is {kind}, a data file is needed" if kind else f"no such file {shown(path)}"
        near = None if kind else closest_path(path)
        raise RLHFError("D01", text, where=where_key, hint=near and f"did you mean {near}?")
    try:
        return cast(BinaryIO, gzip.open(path)) if path.suffix.lower() == ".gz" else path.open("rb")
    except OSError as error:
        raise RLHFError("D01", f"cannot read {shown(path)}: {error.strerror}", where=where_key) from error


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one line per row, keys in the order given. Raises ValueError for a number that is not finite."""
    with Path(path).open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(to_json(row, allow_nan=False) + "\n" for row in rows)


def append_jsonl(path: Path, row: Mapping[str, Any]) -> bytes:
    """Append one row in one write, and return its bytes."""
    line = (to_json(row, allow_nan=False) + "\n").encode("utf-8")
    with Path(path).open("ab") as file:
        file.write(line)
    return line


def decode(raw: bytes, path: Path, number: int) -> str:
    """Return the text that begins in line `number` of a file. Raises D04 if it is not UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = number + raw.count(b"\n", 0, error.start)
        position = error.start - raw.rfind(b"\n", 0, error.start)
        coding = "utf16" if raw.startswith(UTF16) else "cp1252"
        text = f"byte 0x{raw[error.start]:02X} at position {position} of the line is not UTF-8"
        hint = f"convert the file, for example: iconv -f {coding} -t utf8"
        raise RLHFError("D04", text, where=f"{shown(path)}:{line}", hint=hint) from error


def parse_json(raw: bytes, path: Path, number: int = 1) -> Any:
    """Return the JSON value that begins in line `number` of a file. Raises RLHFError D03, D04 with line and column.

    Integers beyond 64 bits become floats.
    """
    try:
        value = orjson.loads(raw)
        _refuse_duplicate_keys(value, raw, path, number)
        return value
    except orjson.JSONDecodeError as error:
        orjson_error = error  # has the better location; json has the better message, and accepts more
    text = decode(raw, path, number)
    at = f"{shown(path)}:{number + orjson_error.lineno - 1}:{orjson_error.colno}"
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        at = f"{shown(path)}:{number + error.lineno - 1}:{error.colno}"
        hint = ONE_PER_LINE if number == 1 and text.strip() in ("[", "{") else None
        raise RLHFError("D03", f"not valid JSON: {error.msg}", where=at, hint=hint) from error
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RLHFError("D03", f"not valid JSON: {reason}", where=at) from error
    # only a \u escape can produce half a surrogate pair, which cannot be tokenized or written
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            problem = f"the escape \\u{ord(error.object[error.start]):04x} is half of a surrogate pair"
            hint = "write both halves, or the character itself"
            raise RLHFError("D04", problem, where=at, hint=hint) from error
    _refuse_duplicate_keys(value, raw, path, number)
    return value


def _refuse_duplicate_keys(value: Any, raw: bytes, path: Path, number: int) -> None:
    """Raise D03 for a key that occurs twice in one object of `raw`; `value` has only the last."""

    def check(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                text = f'not valid JSON: the key "{name}" occurs twice in one object'
                raise RLHFError("D03", text, where=f"{shown(path)}:{number}", hint="remove one of the two")
            seen.add(name)

    try:
        if len(KEY.findall(raw)) > _count_keys(value):
            json.loads(raw, object_pairs_hook=check, parse_int=str, parse_float=str)
    except RecursionError as error:  # orjson allows deeper nesting
        raise RLHFError("D03", "not valid JSON: nested too deeply", where=f"{shown(path)}:{number}") from error


def _count_keys(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (len(value) if isinstance(value, dict) else 0) + sum(map(_count_keys, inner))


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def to_json(value: object, **style: Any) -> str:
    """Return the value as JSON without terminal control characters; `style` is passed to json."""
    return json.dumps(value, ensure_ascii=False, **style).translate(DEL_AND_C1)


def is_number(value: Any) -> TypeGuard[float]:
    """Return True for an int or float, False for a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)
