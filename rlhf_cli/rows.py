"""JSON Lines in and out, with a place in every message."""

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import orjson

from rlhf_cli.errors import RLHFError, nearest_file, shown

BOM = b"\xef\xbb\xbf"
ONE_A_LINE = "a data file holds one JSON object a line (JSON Lines)"


def read_jsonl(path: Path, *, where_key: str | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number from 1, row) of each line that is not blank.

    `where_key` is the place that named the file (`config.where("data.train")`), for the message about a missing one.
    Raises RLHFError: D01 missing, D03 malformed, D04 not UTF-8, D12 a line that is no JSON object.
    """
    path = Path(path)
    with open_data(path, where_key) as file:
        for number, raw in enumerate(file, start=1):
            if number == 1:
                raw = raw.removeprefix(BOM)
            try:
                row = orjson.loads(raw)
            except orjson.JSONDecodeError:
                row = None  # blank, wrong, or odd: the careful reader tells which
            if type(row) is dict:
                yield number, row
                continue
            text = decoded(raw, path, number)
            if text.strip():
                yield number, _row(text.rstrip("\r\n"), path, number)


def open_data(path: Path, where_key: str | None = None) -> BinaryIO:
    """A data file open for its bytes, unpacked where its name ends in .gz. Raises D01 where that cannot be."""
    if not path.is_file():
        raise _missing(path, where_key)
    try:
        return cast(BinaryIO, gzip.open(path)) if path.suffix == ".gz" else path.open("rb")
    except OSError as error:
        raise RLHFError("D01", f"cannot read {shown(path)}: {error.strerror}", where=where_key) from error


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes the rows, one line each, keys in the order given. ValueError for a number that is not finite."""
    with Path(path).open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(_line(row) for row in rows)


def append_jsonl(path: Path, row: Mapping[str, Any]) -> None:
    """Adds one row at the end, in one write."""
    with Path(path).open("a", encoding="utf-8", newline="\n") as file:
        file.write(_line(row))


def _missing(path: Path, where: str | None) -> RLHFError:
    if path.is_dir():
        return RLHFError("D01", f"{shown(path)} is a folder, a data file is needed", where=where)
    if path.exists():
        return RLHFError("D01", f"{shown(path)} is a device or a pipe, a data file is needed", where=where)
    near = nearest_file(path)
    return RLHFError("D01", f"no such file: {shown(path)}", where=where, hint=f"did you mean {near}?" if near else None)


def decoded(raw: bytes, path: Path, number: int) -> str:
    """The text of a line. Raises D04 where it is not UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RLHFError(
            "D04",
            f"byte 0x{raw[error.start]:02X} at position {error.start + 1} of the line is not UTF-8",
            where=f"{shown(path)}:{number}",
            hint="convert the file, for example: iconv -f latin1 -t utf8",
        ) from error


def _row(text: str, path: Path, number: int) -> dict[str, Any]:
    where = f"{shown(path)}:{number}"
    try:
        row = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        hint = ONE_A_LINE if number == 1 and text.strip() in ("[", "{") else None
        raise RLHFError("D03", f"not valid JSON: {error.msg}", where=f"{where}:{error.colno}", hint=hint) from error
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RLHFError("D03", f"not valid JSON: {reason}", where=f"{where}:1") from error
    if not isinstance(row, dict):
        kinds = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
        raise RLHFError(
            "D12",
            f"the line holds {kinds.get(type(row), 'a number')}, not an object {{...}}",
            where=where,
            hint=ONE_A_LINE,
        )
    # Only a \u escape can smuggle in half a surrogate pair, which no tokenizer and no file takes.
    if "\\u" in text:
        _refuse_half_surrogates(row, where)
    return row


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _refuse_half_surrogates(row: dict[str, Any], where: str) -> None:
    try:
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise RLHFError(
            "D04",
            f"the escape \\u{ord(half):04x} is half a character",
            where=where,
            hint="write both halves of the pair, or the character itself",
        ) from error


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
