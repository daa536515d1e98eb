"""Data files by suffix: the same rows in every format, and every fault with its place."""

import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from rlhf_cli.config.sources import DataSource
from rlhf_cli.data.sources import raw_rows
from tests.data.test_sources import Rows, problem, read

pytestmark = pytest.mark.usefixtures("here")


ROWS: Rows = [  # no value may be converted or stripped
    {"prompt": "NA", "completion": "1e5"},
    {"prompt": "001", "completion": " true\t"},
    {"prompt": 'a "quoted", b', "completion": "two\nlines, \u2028 one"},
    {"prompt": "2020-01-01", "completion": "null"},
    {"prompt": "é 😀 \x00", "completion": "\\n {not} [json]"},
]


def table(rows: Rows, delimiter: str, ends: str = "\n") -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter, lineterminator=ends)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def columns(rows: Rows) -> bytes:
    file = io.BytesIO()
    parquet.write_table(arrow.Table.from_pylist(rows), file, row_group_size=2)
    return file.getvalue()


def lines(rows: Rows, ends: str = "\n") -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + ends for row in rows).encode()


WRITTEN: dict[str, Callable[[Rows], bytes]] = {
    "a.jsonl": lines,
    "a.ndjson": lambda rows: lines(rows, "\r\n"),
    "escaped.json": lambda rows: json.dumps(rows, indent=2).encode(),
    "lines.json": lines,
    "a.csv": lambda rows: table(rows, ","),
    "crlf.csv": lambda rows: table(rows, ",", "\r\n"),
    "a.tsv": lambda rows: table(rows, "\t"),
    "a.parquet": columns,
}


def places(name: str) -> list[str]:
    return [str(place) for place, _ in raw_rows(DataSource(name))]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", WRITTEN)
def test_every_format_gives_the_same_rows(here: Path, name: str, packed: bool) -> None:
    raw = WRITTEN[name](ROWS)
    path = here / (f"{name}.gz" if packed else name)
    path.write_bytes(gzip.compress(raw) if packed else raw)
    assert read(str(path)) == ROWS


@pytest.mark.parametrize("name", [name for name in WRITTEN if "parquet" not in name])
def test_a_byte_order_mark_is_not_part_of_the_first_column(here: Path, name: str) -> None:
    (here / name).write_bytes(b"\xef\xbb\xbf" + WRITTEN[name](ROWS))
    assert read(name) == ROWS


CONVERSATION = [{"role": "user", "content": "NA"}, {"role": "assistant", "content": "001\n"}]


@pytest.mark.parametrize("name", ["a.jsonl", "escaped.json", "a.parquet"])
def test_conversations_are_lists_of_plain_dicts(here: Path, name: str) -> None:
    rows = [{"messages": CONVERSATION}, {"messages": CONVERSATION[:1]}]
    (here / name).write_bytes(WRITTEN[name](rows))
    assert read(name) == rows and type(read(name)[0]["messages"][0]) is dict


def test_a_text_file_gives_one_row_per_line(here: Path) -> None:
    (here / "a.txt").write_bytes("\ufeffone\r\n\n two \u2028 2\n".encode())
    assert read("a.txt") == [{"text": "one"}, {"text": " two \u2028 2"}]
    assert places("a.txt") == ["a.txt:1", "a.txt:3"]


def test_locations_are_the_lines_of_the_file(here: Path) -> None:
    (here / "a.csv").write_text('\na,b\n1,"x\ny"\n\n"p\n\n\nq",2\n3,4\n')
    assert places("a.csv") == ["a.csv:3", "a.csv:6", "a.csv:10"]
    (here / "a.jsonl").write_text('\n{"a": 1}\n\n{"a": 2}\n')
    assert places("a.jsonl") == ["a.jsonl:2", "a.jsonl:4"]
    (here / "a.json").write_text('[{"a": 1},\n\n{"a": 2}]')
    assert places("a.json") == ["a.json: row 1", "a.json: row 2"]
    (here / "a.parquet").write_bytes(columns([{"a": 1}] * 3000))
    assert places("a.parquet")[2500] == "a.parquet: row 2501"


@pytest.mark.parametrize(
    ("name", "raw"), [("a.jsonl", b""), ("a.json", b"[]"), ("a.csv", b""), ("b.csv", b"a,b\r\n"), ("a.txt", b"\n \n")]
)
def test_an_empty_file_has_no_rows(here: Path, name: str, raw: bytes) -> None:
    (here / name).write_bytes(raw)
    assert read(name) == []


BAD_UTF8 = b"caf\xe9"
FAULTS = [
    ("a.csv", b'a,b\n1,"x\ny"\n1,2,3\n', "D12", "a.csv:4", "3 cells, but the header names 2 columns"),
    ("a.csv", b"a,b\n1\n", "D12", "a.csv:2", "1 cells, but"),
    ("a.csv", b'a,b\n1,2\n3,"x\ny\n4,5\n', "D03", "a.csv:3", "unexpected end of data"),  # where the quote opens
    ("a.csv", b'a,b\n"x"y,2\n', "D03", "a.csv:2", "not valid CSV"),
    ("a.csv", b"a,b\r1,2\r", "D03", "a.csv:1", "a line break outside quotes"),
    ("a.csv", b"a,b,a\n1,2,3\n", "D03", "a.csv:1", 'the column "a" twice'),
    ("a.csv", b'a,b\n1,"x\ny"\n1,' + BAD_UTF8 + b"\n", "D04", "a.csv:4", "byte 0xE9 at position 6"),
    ("a.tsv", b"a\tb\n1\t" + BAD_UTF8, "D04", "a.tsv:2", "byte 0xE9"),
    ("a.txt", b"one\ntwo\n" + BAD_UTF8 + b"\nfour\n", "D04", "a.txt:3", "byte 0xE9 at position 4"),
    ("a.json", b'[{"a": 1},\n {"a": "' + BAD_UTF8 + b'"}]', "D04", "a.json:2", "byte 0xE9 at position 12"),
    ("a.json", b'[{"a": 1},\n {"a": }]', "D03", "a.json:2:8", "Expecting value"),
    ("a.json", b'[{"a": 1},\n {"a": NaN}]', "D03", "a.json:2:8", "NaN is not a JSON number"),
    ("a.json", b'[{"a": 1},\n {"a": "\\ud83d"}]', "D04", "a.json:2:9", "\\ud83d is half of a surrogate pair"),
    ("a.json", b'[{"a": ' + b"9" * 5000 + b"}]", "D03", "a.json:1:8", "Exceeds the limit"),
    ("a.json", b"[" * 50_000, "D03", "a.json:1:1026", "nested too deeply"),
    ("a.json", b'[{"a": 1}, [2]]', "D12", "a.json: row 2", "the list contains `[2]`, not an object"),
    ("lines.json", b'{"a": 1}\n{"a"}\n', "D03", "lines.json:2:5", "Expecting ':'"),
    ("a.parquet", b"PAR1 no PAR1", "D03", "a.parquet", "not a valid Parquet file"),
    ("a.csv.gz", gzip.compress(b"a,b\n1,2\n" * 99, mtime=0)[:-20], "D01", None, "cannot read a.csv.gz"),
    ("a.jsonl.gz", b'{"a": 1}', "D01", None, "cannot read a.jsonl.gz: Not a gzipped file"),
    ("a.jsnl", b"", "D01", None, "data files end in .jsonl, .ndjson, .json, .csv, .tsv, .parquet, .txt"),
    ("a", b"", "D01", None, "data files end in"),
]


@pytest.mark.parametrize(("name", "raw", "code", "where", "text"), FAULTS)
def test_faults_have_a_code_and_a_place(
    here: Path, name: str, raw: bytes, code: str, where: str | None, text: str
) -> None:
    (here / name).write_bytes(raw)
    found = problem(name)
    assert (found.code, found.where) == (code, where) and text in found.text, str(found)


def test_large_numbers_are_read_alike_in_both_json_formats(here: Path) -> None:
    odd = '{"a": 18446744073709551616, "b": 1e400, "c": 2, "d": -0.0}'
    (here / "a.jsonl").write_text(odd)
    (here / "a.json").write_text(f"[{odd}]")
    (row,) = read("a.jsonl")
    assert read("a.json") == [row] and row == {"a": 2**64, "b": float("inf"), "c": 2, "d": 0.0}


BAD_TEXT = arrow.array([b"a"] * 1500 + [BAD_UTF8], arrow.binary()).view(arrow.string())
LARGE = arrow.array([1] * 1500 + [2**62], arrow.duration("s"))
TWICE = arrow.StructArray.from_arrays([arrow.array(["a"]), arrow.array(["b"])], names=["key", "key"])


@pytest.mark.parametrize(
    ("columns", "names", "code", "where", "text"),
    [
        ([BAD_TEXT], ["text"], "D04", "a.parquet: row 1501", "not UTF-8"),
        ([LARGE], ["value"], "D03", "a.parquet: row 1501", "too large"),
        ([TWICE], ["value"], "D03", "a.parquet: row 1", "duplicate field names"),
        ([["a"], ["b"]], ["prompt", "prompt"], "D03", "a.parquet", 'the file has the column "prompt" twice'),
    ],
)
def test_faults_of_parquet_values_have_their_row(
    here: Path, columns: list[Any], names: list[str], code: str, where: str, text: str
) -> None:
    parquet.write_table(arrow.table(columns, names=names), here / "a.parquet")
    found = problem("a.parquet")
    assert (found.code, found.where) == (code, where) and text in found.text, found
