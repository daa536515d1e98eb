"""JSON Lines in and out, with a place in every message."""

import gzip
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import orjson

from rlhf_cli.errors import RLHFError, closest_path, shown

BOM = b"\xef\xbb\xbf"
BLANK = (b"\n", b"\r\n")
LONGEST = 2**27  # bytes of a line; a row of a million words has some 7 million
MOST_BLANK = 100_000  # empty lines, one behind the other
UTF16 = (b"\xff\xfe", b"\xfe\xff")
# A terminal may obey these as it does ESC; json escapes C0 alone.
DEL_AND_C1 = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}
KEY = re.compile(rb'"\s*:')  # behind each key of a JSON text; in a text of its own it may stand too
ONE_A_LINE = "JSON Lines hold one object a line; a list of objects is read from a file that ends in .json"


def read_jsonl(path: Path, *, where_key: str | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number from 1, row) of each line that is not blank.

    `where_key` is the place that named the file (`config.where("data.train")`), for the message about a missing one.
    Raises RLHFError: D01 missing, D03 malformed, D04 not UTF-8, D12 a line that is no JSON object.
    """
    path = Path(path)
    with open_data(path, where_key) as file:
        yield from numbered_rows(file, path)


def numbered_rows(file: BinaryIO, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """`read_jsonl` of an open file; `path` is its name in messages."""
    for number, raw in numbered_lines(file, path):
        try:
            row = orjson.loads(raw)
        except orjson.JSONDecodeError:
            row = None  # blank, wrong, or odd: the careful reader tells which
        if type(row) is dict:
            if len(KEY.findall(raw)) > len(row):
                _refuse_twice(row, raw, path, number)
            yield number, row
        elif decode(raw, path, number).strip():
            yield number, _row(raw.rstrip(b"\r\n"), path, number)


def numbered_lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, bytes) of each line of an open file, without the mark that some editors begin a file with.

    Raises RLHFError D03 for lines without an end and for lines without end: a small packed file may hold either.
    """
    blank = 0
    for number, raw in enumerate(iter(partial(file.readline, LONGEST + 1), b""), start=1):
        blank = blank + 1 if raw in BLANK else 0
        if len(raw) > LONGEST or blank > MOST_BLANK:
            many = f"more than {MOST_BLANK:,} empty lines" if blank else f"a line of more than {LONGEST:,} bytes"
            raise RLHFError("D03", f"no file of rows: {many}", where=f"{shown(path)}:{number}")
        yield number, raw.removeprefix(BOM) if number == 1 else raw


def open_data(path: Path, where_key: str | None = None) -> BinaryIO:
    """A data file open for its bytes, unpacked where its name ends in .gz. Raises D01 where that cannot be."""
    if not os.path.isfile(path):
        raise _missing(path, where_key)
    try:
        return cast(BinaryIO, gzip.open(path)) if path.suffix.lower() == ".gz" else path.open("rb")
    except OSError as error:
        raise RLHFError("D01", f"cannot read {shown(path)}: {error.strerror}", where=where_key) from error


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes the rows, one line each, keys in the order given. ValueError for a number that is not finite."""
    with Path(path).open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(_line(row) for row in rows)


def append_jsonl(path: Path, row: Mapping[str, Any]) -> bytes:
    """Adds one row at the end, in one write; returns what was written."""
    line = _line(row).encode("utf-8")
    with Path(path).open("ab") as file:
        file.write(line)
    return line


def _missing(path: Path, where: str | None) -> RLHFError:
    if os.path.isdir(path):
        return RLHFError("D01", f"{shown(path)} is a folder, a data file is needed", where=where)
    if os.path.exists(path):
        return RLHFError("D01", f"{shown(path)} is a device or a pipe, a data file is needed", where=where)
    near = closest_path(path)
    return RLHFError("D01", f"no such file: {shown(path)}", where=where, hint=f"did you mean {near}?" if near else None)


def decode(raw: bytes, path: Path, number: int) -> str:
    """The text of what begins in line `number` of a file. Raises D04 where it is not UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = number + raw.count(b"\n", 0, error.start)
        position = error.start - raw.rfind(b"\n", 0, error.start)
        coding = "utf16" if raw.startswith(UTF16) else "latin1"
        raise RLHFError(
            "D04",
            f"byte 0x{raw[error.start]:02X} at position {position} of the line is not UTF-8",
            where=f"{shown(path)}:{line}",
            hint=f"convert the file, for example: iconv -f {coding} -t utf8",
        ) from error


def parse_json(raw: bytes, path: Path, number: int = 1) -> Any:
    """The JSON value that begins in line `number` of a file. Raises RLHFError D03, D04 with line and column.

    Integers beyond 64 bits come as floats.
    """
    try:
        value = orjson.loads(raw)
        _refuse_twice(value, raw, path, number)
        return value
    except orjson.JSONDecodeError as error:
        refusal = error  # it has the better place, json the better words, and some of it json takes
    text = decode(raw, path, number)
    at = f"{shown(path)}:{number + refusal.lineno - 1}:{refusal.colno}"
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        at = f"{shown(path)}:{number + error.lineno - 1}:{error.colno}"
        hint = ONE_A_LINE if number == 1 and text.strip() in ("[", "{") else None
        raise RLHFError("D03", f"not valid JSON: {error.msg}", where=at, hint=hint) from error
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RLHFError("D03", f"not valid JSON: {reason}", where=at) from error
    # Only a \u escape can smuggle in half a surrogate pair, which no tokenizer and no file takes.
    if "\\u" in text:
        _refuse_half_surrogates(value, at)
    _refuse_twice(value, raw, path, number)
    return value


def _refuse_twice(value: Any, raw: bytes, path: Path, number: int) -> None:
    """D03 where a key stands twice in one object of `raw`, whose `value` has lost the first of the two."""

    def look(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                text = f'not valid JSON: the key "{name}" stands twice in one object'
                hint = "take one of the two out: the first would be lost"
                raise RLHFError("D03", text, where=f"{shown(path)}:{number}", hint=hint)
            seen.add(name)

    try:
        if len(KEY.findall(raw)) > _count_keys(value):
            json.loads(raw, object_pairs_hook=look, parse_int=str, parse_float=str)
    except RecursionError as error:  # orjson goes deeper
        raise RLHFError("D03", "not valid JSON: nested too deeply", where=f"{shown(path)}:{number}") from error


def _count_keys(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (len(value) if isinstance(value, dict) else 0) + sum(map(_count_keys, inner))


def _row(raw: bytes, path: Path, number: int) -> dict[str, Any]:
    row = parse_json(raw, path, number)
    if not isinstance(row, dict):
        kinds = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
        text = f"the line holds {kinds.get(type(row), 'a number')}, not an object {{...}}"
        raise RLHFError("D12", text, where=f"{shown(path)}:{number}", hint=ONE_A_LINE)
    return row


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _refuse_half_surrogates(value: Any, where: str) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise RLHFError(
            "D04",
            f"the escape \\u{ord(half):04x} is half a character",
            where=where,
            hint="write both halves of the pair, or the character itself",
        ) from error


def to_json(value: object, **style: Any) -> str:
    """The value as JSON that is harmless on a terminal; `style` is json's."""
    return json.dumps(value, ensure_ascii=False, **style).translate(DEL_AND_C1)


def _line(row: Mapping[str, Any]) -> str:
    return to_json(row, allow_nan=False) + "\n"
