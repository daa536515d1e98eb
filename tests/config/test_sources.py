"""The data of a config: what its keys name, and what makes a result another one."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from bad_configs import loaded

from rlhf_cli import jsonl, runs
from rlhf_cli.config.sources import DataSource, HoldoutSplit


def data_config(folder: Path, **data: Any) -> Any:
    return loaded(folder, "sft", yaml.safe_dump({"model": {"path": "base"}, "data": data}))


def test_every_reading_option_reaches_the_source(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"columns": {"prompt": "question"}, "format": "plain", "subset": "small"}
    keys |= {"revision": "v2", "max_rows": 7, "on_bad": "drop"}
    sources = data_config(tmp_path, train="lab/tables", eval="b.csv[test]", **keys).sources()
    train, held_out = sources["data.train"], sources["data.eval"]
    assert (train.name, train.splits) == ("lab/tables", ("train",))
    assert (held_out.name, held_out.splits) == (f"{tmp_path}/b.csv[test]", ("validation", "test"))
    for source in sources.values():
        assert {option: getattr(source, option) for option in keys} == keys
        assert str(source.where).rpartition(":")[0].endswith("sft.yaml") and source.share is None


@pytest.mark.parametrize(
    ("stage", "trained", "held_out"),
    [
        ("sft", "data.train", "data.eval"),
        ("reward", "data.train", "data.eval"),
        ("ppo", "data.prompts", "data.eval_prompts"),
        ("eval", None, "data.prompts"),
    ],
)
def test_a_fraction_is_held_out_of_one_file_in_every_stage(
    tmp_path: Path, stage: str, trained: str | None, held_out: str
) -> None:
    sources = loaded(tmp_path, stage, "", "data.eval_fraction=0.1", "data.split_seed=3").sources()
    shares = {key: source.share for key, source in sources.items()}
    assert shares == ({trained: HoldoutSplit(0.1, 3, False)} if trained else {}) | {
        held_out: HoldoutSplit(0.1, 3, True)
    }
    assert len({source.name for source in sources.values()}) == 1
    assert {source.splits for source in sources.values()} == {("train",)}


NAMES = [
    ("a.jsonl", "{here}/a.jsonl"),
    ("lab/tables", "lab/tables"),
    ("lab/tables[test]", "lab/tables[test]"),
    ("lab/tables/part", "lab/tables/part"),
    ("./lab/tables", "{here}/lab/tables"),
    ("lab/tables.csv", "{here}/lab/tables.csv"),
    ("mine/tables", "{here}/mine/tables"),  # the folder `mine` is there: a slip of the pen is no dataset of the hub
    ("mine/tables/part", "{here}/mine/tables/part"),
    ("with space [1]/été.csv[test]", "{here}/with space [1]/été.csv[test]"),
    ("odd[1]", "{here}/odd[1]"),
    ("odd[1][test]", "{here}/odd[1][test]"),
]


@pytest.mark.parametrize(("written", "expected"), NAMES)
def test_a_name_is_a_path_unless_only_a_hub_dataset_can_be_meant(tmp_path: Path, written: str, expected: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "odd[1]").mkdir()
    config = data_config(tmp_path, train=written)
    assert config.data.train == expected.format(here=tmp_path)
    again = tmp_path / "RUN" / "sft"
    assert loaded(again, "sft", yaml.safe_dump(config.dump(relative_to=again))).data.train == config.data.train


def test_the_tokenizer_of_new_weights_reads_the_training_data_as_it_is_read(tmp_path: Path) -> None:
    def source(train: str) -> DataSource:
        new = {"model_type": "llama", "tokenizer": {"train": train, "vocab_size": 300}}
        data = {"train": "lab/tables", "subset": "a", "max_rows": 5, "eval_fraction": 0.5, "columns": {"text": "b"}}
        text = yaml.safe_dump({"model": {"new": new}, "data": data})
        return loaded(tmp_path, "sft", text).sources()["model.new.tokenizer.train"]

    same, other = source("lab/tables"), source("lab/other")
    assert (same.subset, same.max_rows, same.share, dict(same.columns)) == ("a", 5, None, {})
    assert (other.name, other.subset, other.max_rows) == ("lab/other", None, None)


def identity(folder: Path, **data: Any) -> dict[str, Any]:
    config = data_config(folder, **data)
    return runs.compute_identity(config, {}, config.sources())


def data_folder(root: Path) -> Path:
    (root / "data").mkdir(parents=True)
    for name in ("train-0", "train-1", "test"):
        jsonl.write_jsonl(root / "data" / f"{name}.jsonl", [{"text": name}])
    return root


def test_only_what_is_in_the_files_counts_and_not_where_they_lie(tmp_path: Path) -> None:
    root = data_folder(tmp_path / "a")
    before = identity(tmp_path, train="a", eval="a[test]", max_rows=5)
    root.rename(tmp_path / "moved")
    assert identity(tmp_path, train="moved", eval="./moved/data/test.jsonl", max_rows=5) == before
    (tmp_path / "moved" / "notes.md").write_text("no data")
    assert identity(tmp_path, train="moved", eval="moved[test]", max_rows=5) == before


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        ({"train": "a[test]"}, ["data.train: other content"]),
        ({"max_rows": 4}, ["data.max_rows 5 -> 4"]),
        ({"on_bad": "drop"}, ["data.on_bad error -> drop"]),
        ({"format": "plain"}, ["data.format auto -> plain"]),
        ({"eval_fraction": 0.5}, ["data.eval_fraction null -> 0.5", "data.eval: was not set"]),
    ],
)
def test_what_changes_the_rows_is_another_result(tmp_path: Path, change: dict[str, Any], lines: list[str]) -> None:
    data_folder(tmp_path / "a")
    before, after = ({"train": "a", "max_rows": 5} | extra for extra in ({}, change))
    assert runs.identity_difference(identity(tmp_path, **before), identity(tmp_path, **after)) == lines


@pytest.mark.parametrize("name", ["train-1", "train-2"])
def test_each_file_of_a_split_counts(tmp_path: Path, name: str) -> None:
    root = data_folder(tmp_path / "a")
    before = identity(tmp_path, train="a", eval="a[test]")
    jsonl.write_jsonl(root / "data" / f"{name}.jsonl", [{"text": "changed or new"}])
    after = identity(tmp_path, train="a", eval="a[test]")
    assert runs.identity_difference(before, after) == ["data.train: other content"]
