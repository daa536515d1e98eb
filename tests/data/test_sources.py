"""Data files: the same rows in every format, the files of each split of a folder, and every fault with its place.

Modules: `data/folders.py`, `data/readers.py`.
"""

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

from rlhf_cli.config.sources import DataSource, split_name
from rlhf_cli.data import sources
from rlhf_cli.data.sources import locate_files, raw_rows
from rlhf_cli.errors import Problem, RLHFError

pytestmark = pytest.mark.usefixtures("here")
Rows = list[dict[str, Any]]
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


def read(name: str, **options: Any) -> Rows:
    return [row for _, row in raw_rows(DataSource(name, **options))]


def places(name: str) -> list[str]:
    return [str(place) for place, _ in raw_rows(DataSource(name))]


def problem(name: str, **options: Any) -> Problem:
    with pytest.raises(RLHFError) as caught:
        read(name, **options)
    assert caught.value.exit_code == 2 and len(caught.value.problems) == 1
    return caught.value.problems[0]


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


def test_rows_after_max_rows_are_not_read(here: Path) -> None:
    (here / "a.jsonl").write_text('{"a": 1}\n{"a": 2}\nno json\n')
    assert read("a.jsonl", max_rows=2) == [{"a": 1}, {"a": 2}]
    assert problem("a.jsonl", max_rows=3).code == "D03"


def test_all_missing_files_are_listed_by_key(here: Path) -> None:
    (here / "pairs.jsonl").touch()
    with pytest.raises(RLHFError) as caught:
        sources.locate(
            {"data.train": DataSource(str(here / "pair.jsonl"), "x.yaml:2"), "data.eval": DataSource("b" * 300)}
        )
    first, second = caught.value.problems
    assert str(first) == "error[D01]: x.yaml:2: data.train: no such file pair.jsonl\nhint: did you mean pairs.jsonl?"
    assert second.code == "D01" and second.text.startswith("data.eval: no such file bbb")


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


# --- folders


def folder(root: Path, *names: str, readme: str | None = None) -> Path:
    """Write files with one row each, whose text is the file's name."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"text": name})
        texts = {".jsonl": line, ".gz": line, ".json": f"[{line}]"}
        raw = texts.get(path.suffix, f"text\n{name}\n").encode()
        path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    if readme is not None:
        (root / "README.md").write_text(readme)
    return root


def texts(name: Path | str, **options: Any) -> list[str]:
    return [row["text"] for _, row in raw_rows(DataSource(str(name), **options))]


def files(name: Path | str) -> list[str]:
    return [path.name for path in locate_files(DataSource(str(name)))]


def folder_problem(name: Path | str, **options: Any) -> Problem:
    found = problem(str(name), where="sft.yaml:3", **options)
    assert found.code == "D01" and found.where == "sft.yaml:3"
    return found


@pytest.mark.full
@pytest.mark.parametrize("name", ["plain", "with space", "v2 [final]", "a*b?", "été 数据", ".hidden", "per%20cent#1"])
@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (("train.jsonl", "test.jsonl", "dev.jsonl"), {"": ["train.jsonl"], "[test]": ["test.jsonl"]}),
        (("train/b.jsonl", "train/a.jsonl", "test/a.jsonl"), {"": ["train/a.jsonl", "train/b.jsonl"]}),
        (("data/train-00001.jsonl.gz", "data/train-00000.jsonl.gz", "data/valid-0.jsonl.gz"),
         {"": ["data/train-00000.jsonl.gz", "data/train-00001.jsonl.gz"], "[validation]": ["data/valid-0.jsonl.gz"]}),
        (("any.jsonl", "other.jsonl", ".hidden.jsonl"), {"": ["any.jsonl", "other.jsonl"]}),
    ],
)  # fmt: skip
def test_the_files_of_a_split_in_order(
    here: Path, name: str, names: tuple[str, ...], splits: dict[str, list[str]]
) -> None:
    folder(here / name, *names)
    for split, expected in splits.items():
        located = locate_files(DataSource(f"{here / name}{split}"))
        assert [path.relative_to(here / name).as_posix() for path in located] == expected
        assert texts(f"{here / name}{split}") == expected


def test_evaluation_rows_come_from_validation_or_test_or_the_only_split(here: Path) -> None:
    usual = {"splits": ("validation", "test")}
    assert texts(folder(here / "a", "train.jsonl", "test.jsonl"), **usual) == ["test.jsonl"]
    assert texts(folder(here / "b", "dev.jsonl", "test.jsonl", "train.jsonl"), **usual) == ["dev.jsonl"]
    assert texts(folder(here / "c", "rows.jsonl"), **usual) == ["rows.jsonl"]


CONFIGS = """---
configs:
- config_name: small
  data_files: [{split: train, path: s/*.jsonl}]
- config_name: big
  default: true
  data_files: [{split: train_sft, path: b/2.jsonl}, {split: train_prefs, path: b/1.jsonl}]
---
"""


def test_subsets_of_the_readme(here: Path) -> None:
    root = folder(here / "a", "s/1.jsonl", "b/1.jsonl", "b/2.jsonl", readme=CONFIGS)
    assert texts(root, subset="small") == ["s/1.jsonl"] and texts(f"{root}[train_prefs]") == ["b/1.jsonl"]
    text, hint = "a has no split train; it has train_sft, train_prefs", "append the split to the name: [train_sft]"
    assert folder_problem(root) == Problem("D01", text, "sft.yaml:3", hint)
    text, hint = 'a has no subset "smal"; it has small, big', "set data.subset: small"
    assert folder_problem(root, subset="smal") == Problem("D01", text, "sft.yaml:3", hint)
    root = folder(here / "b", "s/1.jsonl", "b/2.jsonl", readme=CONFIGS.replace("  default: true\n", ""))
    assert folder_problem(root) == Problem("D01", "b has the subsets small, big", "sft.yaml:3", hint)


def test_d01_of_missing_files_splits_and_subsets(here: Path) -> None:
    root = folder(here / "a", "train.jsonl", "test.jsonl")
    missing = folder_problem(f"{root}[tst]")
    assert missing.text == "a has no split tst; it has train, test" and str(missing.hint).endswith("[test]")
    assert folder_problem(root, subset="x").text == 'a has no subset "x"; it has default'
    (here / "empty").mkdir()
    assert folder_problem(here / "empty").text == "empty contains no data files"
    (here / "empty" / "data.arrow").touch()
    arrow = folder_problem(here / "empty")
    assert arrow.text == "empty contains no data files, but data.arrow" and "to_parquet" in str(arrow.hint)
    (here / "v[1]").mkdir()
    assert folder_problem(here / "v[1]").text.startswith("v[1] contains no data files")
    assert "is a single file without a split [test]" in folder_problem(f"{root}/train.jsonl[test]").text
    assert folder_problem(here / "b" / "trian.jsonl").text == "no such file b/trian.jsonl"
    assert folder_problem(f"{root}/trian.jsonl").hint == "did you mean a/train.jsonl?"


@pytest.mark.full
@pytest.mark.parametrize(
    ("names", "train", "message"),
    [
        (("mine.csv",), ["mine.csv"], "train is mine.csv"),
        (("Feb.CSV", "jan.csv"), ["Feb.CSV", "jan.csv"], "train is Feb.CSV, jan.csv"),
        (("1.csv", "2.csv", "3.csv", "4.csv", "sub/5.csv"), ["1.csv", "2.csv", "3.csv", "4.csv", "5.csv"],
         "train is 1.csv, 2.csv, 3.csv and 2 more"),
        (("pairs.csv", "test.csv"), ["pairs.csv"], "train is pairs.csv, the rest; test is test.csv"),
        (("pairs.jsonl", "Test.csv"), ["pairs.jsonl"], "train is pairs.jsonl, the rest; test is Test.csv"),
        (("pairs.csv", "my_train.csv"), ["my_train.csv"], "pairs.csv ignored: train is my_train.csv"),
        (("train.jsonl", "3.csv"), ["train.jsonl"], "3.csv ignored: train is train.jsonl"),
        (("test.csv",), ["test.csv"], "no split train; test is used"),
        # a run's YAML files, of which `datasets` would make a split, and notes are not data
        (("mine.csv", "eval.yaml", "load.py", "notes.txt", "dev.json", "a.eval"), ["mine.csv"], "train is mine.csv"),
        (("notes.json", "config.json"), ["notes.json"], "train is notes.json"),
        (("train.csv", "test-1.csv", "LICENSE.txt"), ["train.csv"], None),
    ],
)  # fmt: skip
def test_files_of_other_names_become_train_with_one_message(
    here: Path, capsys: pytest.CaptureFixture[str], names: tuple[str, ...], train: list[str], message: str | None
) -> None:
    root = folder(here / "a", *names)
    assert files(root) == train and files(root) == train
    assert capsys.readouterr().err == (f"data     a: {message}\n" if message else "")


def test_d01_of_files_of_several_formats_and_files_may_be_empty(here: Path) -> None:
    found = folder_problem(folder(here / "a", "1.csv", "2.jsonl"))
    assert "several formats: 1.csv, 2.jsonl" in found.text and found.hint == "set one of them: a/1.csv"
    (folder(here / "b", "1.csv", "3.csv") / "2.csv").write_text("")
    assert len(files(here / "b")) == 3


def test_a_readme_means_that_other_formats_are_copies(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder(here / "a", "1.jsonl", "2.jsonl", "3.csv", readme="# a")
    assert files("a") == ["1.jsonl", "2.jsonl"]
    assert capsys.readouterr().err == "data     a: train is 1.jsonl, 2.jsonl\n"
    head = "---\nconfigs:\n- config_name: default\n  data_files: [{split: train, path: 3.csv}]\n---\n"
    folder(here / "b", "1.jsonl", "3.csv", readme=head)
    assert files("b") == ["3.csv"] and not capsys.readouterr().err


def test_brackets_are_a_split_unless_the_path_exists(here: Path) -> None:
    assert split_name("a/b[test]") == ("a/b", "test") and split_name("a/b") == ("a/b", None)
    assert split_name("a[1]/b.jsonl") == ("a[1]/b.jsonl", None)
    (here / "a[1]").mkdir()
    assert split_name("a[1]") == ("a[1]", None) and split_name("a[1][test]") == ("a[1]", "test")
    assert split_name("a[1]", base=str(here.parent)) == ("a", "1")


def test_the_cache_of_datasets_is_not_used(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", here / "cache")
    assert texts(folder(here / "a", "train.jsonl")) == ["train.jsonl"]
    assert not (here / "cache").exists()
