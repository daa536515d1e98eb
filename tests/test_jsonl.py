"""JSON lines: read with their line numbers, every fault with its place, and written so that they read back."""

import json
from pathlib import Path

import pytest

from rlhf_cli.errors import Problem, RLHFError
from rlhf_cli.jsonl import append_jsonl, read_jsonl, write_jsonl

pytestmark = pytest.mark.usefixtures("here")


def problem_of(path: Path, **options: str) -> Problem:
    with pytest.raises(RLHFError) as caught:
        list(read_jsonl(path, **options))
    assert caught.value.exit_code == 2
    [problem] = caught.value.problems
    return problem


def test_rows_come_with_line_numbers_and_blank_lines_are_skipped(here: Path) -> None:
    path = here / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\n  \n{"a": "\xc3\xa9"}\n{"a": "\\ud83d\\ude00 \\u00e9"}')
    assert list(read_jsonl(path)) == [(1, {"a": 1}), (4, {"a": "é"}), (5, {"a": "😀 é"})]
    path.write_text('[\n{"a": 1}\n]\n')
    assert "a list of objects is read from a file that ends in .json" in (problem_of(path).hint or "")


@pytest.mark.parametrize(
    ("line", "code", "where", "text"),
    [
        (b'{"a": 1 "b": 2}', "D03", "a.jsonl:2:9", "not valid JSON: Expecting ',' delimiter"),
        (b'{"a": ', "D03", "a.jsonl:2:7", "not valid JSON: Expecting value"),
        (b'{"a": NaN}', "D03", "a.jsonl:2:7", "not valid JSON: NaN is not a JSON number"),
        (b'{"a": ' + b"9" * 5000 + b"}", "D03", "a.jsonl:2:7", "not valid JSON: Exceeds the limit"),
        (b"[" * 100_000, "D03", "a.jsonl:2:1026", "not valid JSON: nested too deeply"),
        (b'{"a": "caf\xe9"}', "D04", "a.jsonl:2", "byte 0xE9 at position 11 of the line is not UTF-8"),
        (b'{"a": "\\ud83d"}', "D04", "a.jsonl:2:8", "the escape \\ud83d is half of a surrogate pair"),
        (b"[1, 2]", "D12", "a.jsonl:2", "the line holds a list, not an object {...}"),
        (b"null", "D12", "a.jsonl:2", "the line holds null, not an object {...}"),
        (b"3", "D12", "a.jsonl:2", "the line holds a number, not an object {...}"),
    ],
)
def test_faults_have_a_place(here: Path, line: bytes, code: str, where: str, text: str) -> None:
    (here / "a.jsonl").write_bytes(b'{"a": 1}\n' + line + b'\n{"a": 1}\n')
    problem = problem_of(Path("a.jsonl"))
    assert (problem.code, problem.where) == (code, where)
    assert problem.text.startswith(text)


def test_a_missing_file_names_the_nearest_and_who_named_it(here: Path) -> None:
    (here / "pairs.jsonl").touch()
    problem = problem_of(here / "pair.jsonl", where_key="sft.yaml:7")
    assert str(problem) == "error[D01]: sft.yaml:7: no such file pair.jsonl\nhint: did you mean pairs.jsonl?"
    assert problem_of(here).text.endswith("is a folder, a data file is needed")


def test_rows_are_written_in_order_and_never_as_invalid_json(here: Path) -> None:
    path = here / "a.jsonl"
    write_jsonl(path, [{"z": "é", "a": [1.5, None]}])
    append_jsonl(path, {"step": 3})
    with pytest.raises(ValueError):
        append_jsonl(path, {"loss": float("nan")})
    assert path.read_text(encoding="utf-8") == '{"z": "é", "a": [1.5, null]}\n{"step": 3}\n'
    write_jsonl(path, [])
    assert path.read_bytes() == b""


def test_what_is_written_reads_back(here: Path) -> None:
    rows = [{"text": "a\nb\u2028\x85\x1b 😀", "n": 1e-300}, {}]
    write_jsonl(here / "a.jsonl", rows)
    assert [row for _, row in read_jsonl(here / "a.jsonl")] == rows
    assert len((here / "a.jsonl").read_bytes().splitlines()) == len(rows)
    assert json.loads((here / "a.jsonl").read_text().split("\n")[0]) == rows[0]
