"""Folders with the hub's layout: which files are a split, in which order, and what is said of those that are none."""

import gzip
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli.config.sources import DataSource, split_name
from rlhf_cli.data.sources import locate_files, read_rows
from rlhf_cli.errors import Problem, RLHFError
from rlhf_cli.jsonl import write_jsonl


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def folder(root: Path, files: dict[str, str]) -> Path:
    """A folder of JSON lines files, each with one row that says its name; a README as given."""
    for name, readme in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            path.write_text(readme)
        elif path.suffix == ".gz":
            path.write_bytes(gzip.compress(f'{{"text": "{name}"}}\n'.encode()))
        else:
            write_jsonl(path, [{"text": name}])
    return root


def tables(root: Path, files: dict[str, str]) -> Path:
    """A folder of files with one row of these columns each; other files hold that text alone."""
    for name, columns in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".jsonl":
            write_jsonl(path, [dict.fromkeys(columns.split(","), "a")])
        elif path.suffix == ".json":
            path.write_text('[{"text": "a"}]')
        else:
            path.write_text(f"{columns}\n{','.join('a' for _ in columns.split(','))}\n")
    return root


def texts(name: Path | str, **options: Any) -> list[str]:
    return [row["text"] for _, row in read_rows(DataSource(str(name), **options))]


def problem(name: Path | str, **options: Any) -> Problem:
    with pytest.raises(RLHFError) as caught:
        locate_files(DataSource(str(name), "sft.yaml:3", **options))
    assert caught.value.exit_code == 2
    (found,) = caught.value.problems
    assert found.code == "D01" and found.where == "sft.yaml:3"
    return found


LAYOUTS = [
    (("train.jsonl", "test.jsonl", "dev.jsonl"), {"": ["train.jsonl"], "[test]": ["test.jsonl"]}),
    (("train/b.jsonl", "train/a.jsonl", "test/a.jsonl"), {"": ["train/a.jsonl", "train/b.jsonl"]}),
    (("data/train-00001.jsonl.gz", "data/train-00000.jsonl.gz", "data/valid-0.jsonl.gz"),
     {"": ["data/train-00000.jsonl.gz", "data/train-00001.jsonl.gz"], "[validation]": ["data/valid-0.jsonl.gz"]}),
    (("any.jsonl", "other.jsonl", ".hidden.jsonl"), {"": ["any.jsonl", "other.jsonl"]}),
]  # fmt: skip


@pytest.mark.parametrize("name", ["plain", "with space", "v2 [final]", "a*b?", "été 数据", ".hidden", "per%20cent#1"])
@pytest.mark.parametrize(("files", "wanted"), LAYOUTS)
def test_the_files_of_a_split_in_their_order(
    here: Path, name: str, files: tuple[str, ...], wanted: dict[str, list[str]]
) -> None:
    folder(here / name, dict.fromkeys(files, ""))
    for split, found in wanted.items():
        assert texts(f"{here / name}{split}") == found
        assert [
            path.relative_to(here / name).as_posix() for path in locate_files(DataSource(f"{here / name}{split}"))
        ] == found


def test_held_out_rows_come_from_validation_or_test_and_rows_of_a_lone_split_from_that(here: Path) -> None:
    usual = {"splits": ("validation", "test")}
    assert texts(folder(here / "a", {"train.jsonl": "", "test.jsonl": ""}), **usual) == ["test.jsonl"]
    assert texts(folder(here / "b", {"dev.jsonl": "", "test.jsonl": "", "train.jsonl": ""}), **usual) == ["dev.jsonl"]
    assert texts(folder(here / "c", {"rows.jsonl": ""}), **usual) == ["rows.jsonl"]


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
    root = folder(here / "a", {"README.md": CONFIGS, "s/1.jsonl": "", "b/1.jsonl": "", "b/2.jsonl": ""})
    assert texts(root, subset="small") == ["s/1.jsonl"]
    assert texts(f"{root}[train_prefs]") == ["b/1.jsonl"]
    assert problem(root) == Problem(
        "D01",
        "a has no split train; it has train_sft, train_prefs",
        "sft.yaml:3",
        "append the split to the name: [train_sft]",
    )
    assert problem(root, subset="smal") == Problem(
        "D01", 'a has no subset "smal"; it has small, big', "sft.yaml:3", "set data.subset: small"
    )
    root = folder(here / "b", {"README.md": CONFIGS.replace("  default: true\n", ""), "s/1.jsonl": "", "b/2.jsonl": ""})
    assert problem(root).text == "b has the subsets small, big" and problem(root).hint == "set data.subset: small"


def test_what_is_not_there(here: Path) -> None:
    root = folder(here / "a", {"train.jsonl": "", "test.jsonl": ""})
    missing = problem(f"{root}[tst]")
    assert missing.text == "a has no split tst; it has train, test" and str(missing.hint).endswith("[test]")
    assert problem(root, subset="x").text == 'a has no subset "x"; it has default'
    (here / "empty").mkdir()
    assert problem(here / "empty").text == "empty contains no data files"
    (here / "empty" / "data.arrow").touch()
    arrow = problem(here / "empty")
    assert arrow.text == "empty contains no data files, but data.arrow" and "to_parquet" in str(arrow.hint)
    (here / "v[1]").mkdir()
    assert problem(here / "v[1]").text.startswith("v[1] contains no data files")
    assert "is a single file without a split [test]" in problem(f"{root}/train.jsonl[test]").text
    near = problem(here / "b" / "trian.jsonl")
    assert near.text == "no such file b/trian.jsonl" and problem(f"{root}/trian.jsonl").hint == (
        "did you mean a/train.jsonl?"
    )


UNNAMED = [
    (("mine.csv",), ["mine.csv"], "train is mine.csv"),
    (("Feb.CSV", "jan.csv"), ["Feb.CSV", "jan.csv"], "train is Feb.CSV and jan.csv"),
    (("1.csv", "2.csv", "3.csv", "4.csv", "sub/5.csv"), ["1.csv", "2.csv", "3.csv", "4.csv", "sub/5.csv"],
     "train is 1.csv, 2.csv, 3.csv and 2 more"),
    (("pairs.csv", "test.csv"), ["pairs.csv"], "train is pairs.csv, the rest; test is test.csv"),
    (("pairs.jsonl", "Test.csv"), ["pairs.jsonl"], "train is pairs.jsonl, the rest; test is Test.csv"),
    (("pairs.csv", "my_train.csv"), ["my_train.csv"], "pairs.csv ignored: train is my_train.csv"),
    (("train.jsonl", "3.csv"), ["train.jsonl"], "3.csv ignored: train is train.jsonl"),
    (("test.csv",), ["test.csv"], "no split train; test is used"),
    # neither the YAMLs of a run, of which datasets would make a split, nor notes are data
    (("mine.csv", "eval.yaml", "load.py", "notes.txt", "dev.json", "a.eval"), ["mine.csv"],
     "train is mine.csv"),
    (("notes.json", "config.json"), ["notes.json"], "train is notes.json"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "train", "said"), UNNAMED)
def test_files_of_other_names_are_read_as_meant_and_that_is_said(
    here: Path, capsys: pytest.CaptureFixture[str], files: tuple[str, ...], train: list[str], said: str
) -> None:
    root = tables(here / "a", dict.fromkeys(files, "text"))
    for _ in range(2):
        assert [str(path.relative_to(root)) for path in locate_files(DataSource(str(root)))] == train
    assert capsys.readouterr().err == f"data     a: {said}\n"  # once


def test_what_names_say_needs_no_word(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tables(here / "a", {"train.csv": "text", "test-1.csv": "other", "LICENSE.txt": "text"})
    assert locate_files(DataSource(str(root))) == [root / "train.csv"] and not capsys.readouterr().err


def test_it_is_asked_which_of_unlike_files_are_meant(here: Path) -> None:
    kinds = problem(tables(here / "a", {"1.csv": "text", "2.jsonl": "text"}))
    assert kinds.text == "a contains data files of several formats: 1.csv and 2.jsonl"
    assert kinds.hint == "set one of them: a/1.csv"
    columns = problem(tables(here / "b", {"faq.csv": "question,answer", "pairs.csv": "prompt,chosen,rejected"}))
    assert columns.hint == "set one of them: b/faq.csv" and columns.text == (
        "b contains files with different columns: faq.csv (answer, question) and pairs.csv (chosen, prompt, rejected)"
    )
    both = {"1.csv": "How do I make a soup?,So.", "2.csv": "How do I make a pie with leek?,So."}
    assert problem(tables(here / "c", both)).hint == ("the first line of 1.csv looks like data; add a header line")
    json = {"1.jsonl": "prompt,chosen,rejected", "2.jsonl": "prompt,chosen,rejected,margin"}
    assert len(locate_files(DataSource(str(tables(here / "e", json))))) == 2, "a margin is where there is one"
    assert problem(tables(here / "f", {**json, "3.jsonl": "prompt,completion"})).hint == "set one of them: f/1.jsonl"
    assert (
        "2.csv" in problem(tables(here / "g", {name.replace("jsonl", "csv"): each for name, each in json.items()})).text
    )
    (tables(here / "h", {"1.csv": "a", "3.csv": "a"}) / "2.csv").write_text("")
    assert len(locate_files(DataSource(str(here / "h")))) == 3, "what is empty has no other columns"
    beside_test = problem(tables(here / "d", {"1.csv": "a", "2.csv": "b", "test.csv": "a"}))
    assert "1.csv (a) and 2.csv (b)" in beside_test.text


def test_a_readme_may_say_that_other_kinds_are_the_same_data(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables(here / "a", {"1.jsonl": "text", "2.jsonl": "text", "3.csv": "other", "README.md": "# a"})
    assert [path.name for path in locate_files(DataSource("a"))] == ["1.jsonl", "2.jsonl"]
    assert capsys.readouterr().err == "data     a: train is 1.jsonl and 2.jsonl\n"
    head = "---\nconfigs:\n- config_name: default\n  data_files: [{split: train, path: 3.csv}]\n---\n"
    tables(here / "b", {"1.jsonl": "text", "3.csv": "other", "README.md": head})
    assert [path.name for path in locate_files(DataSource("b"))] == ["3.csv"]
    assert not capsys.readouterr().err


def test_a_split_behind_a_name_and_brackets_in_one(here: Path) -> None:
    assert split_name("a/b[test]") == ("a/b", "test") and split_name("a/b") == ("a/b", None)
    assert split_name("a[1]/b.jsonl") == ("a[1]/b.jsonl", None)
    (here / "a[1]").mkdir()
    assert split_name("a[1]") == ("a[1]", None) and split_name("a[1][test]") == ("a[1]", "test")
    assert split_name("a[1]", base=str(here.parent)) == ("a", "1")  # not there: a split


def test_nothing_is_left_in_the_hubs_cache(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", here / "cache")
    assert texts(folder(here / "a", {"train.jsonl": ""})) == ["train.jsonl"]
    assert not (here / "cache").exists()
