"""The data files of each split of a folder, with the rules of the `datasets` library."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli.config.sources import DataSource, split_name
from rlhf_cli.data.sources import locate_files, raw_rows
from rlhf_cli.errors import Problem
from tests.data.test_sources import problem

pytestmark = pytest.mark.usefixtures("here")


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
