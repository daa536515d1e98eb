"""The data keys of a config: what they name, what contradicts, and what makes a result another one."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_cli import jsonl, runs
from rlhf_cli.config.loading import load
from rlhf_cli.config.sources import DataSource, HoldoutSplit
from rlhf_cli.errors import RLHFError

MODEL = {"model": {"path": "base"}}


def config(folder: Path, stage: str = "sft", **sections: Any) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stage}.yaml"
    path.write_text(yaml.safe_dump(sections))
    return load(stage, path, [])


def sft(folder: Path, **data: Any) -> dict[str, DataSource]:
    return config(folder, **MODEL, data=data).sources()


def test_every_key_that_says_how_to_read_reaches_the_source(tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "columns": {"prompt": "question"},
        "format": "plain",
        "subset": "small",
        "revision": "v2",
        "max_rows": 7,
        "on_bad": "drop",
    }
    found = sft(tmp_path, train="lab/tables", eval="b.csv[test]", **keys)
    for key, name, splits in (
        ("data.train", "lab/tables", ("train",)),
        ("data.eval", f"{tmp_path}/b.csv[test]", ("validation", "test")),
    ):
        assert found[key].name == name and found[key].splits == splits and found[key].share is None
        assert {option: getattr(found[key], option) for option in keys} == keys
        assert str(found[key].where).rpartition(":")[0].endswith("sft.yaml")


@pytest.mark.parametrize(
    ("stage", "sections", "learnt", "held_out"),
    [
        ("sft", {**MODEL, "data": {"train": "a.jsonl"}}, "data.train", "data.eval"),
        ("reward", {"data": {"train": "a.jsonl"}}, "data.train", "data.eval"),
        ("ppo", {"data": {"prompts": "a.jsonl"}, "ppo": {"total_episodes": 64}}, "data.prompts", "data.eval_prompts"),
        ("eval", {"data": {"prompts": "a.jsonl"}}, None, "data.prompts"),
    ],
)
def test_a_fraction_is_held_out_of_one_file_in_every_stage(
    tmp_path: Path, stage: str, sections: dict[str, Any], learnt: str | None, held_out: str
) -> None:
    sections["data"] |= {"eval_fraction": 0.1, "split_seed": 3}
    found = config(tmp_path, stage, **sections).sources()
    shares = {key: source.share for key, source in found.items()}
    assert shares == ({learnt: HoldoutSplit(0.1, 3, False)} if learnt else {}) | {held_out: HoldoutSplit(0.1, 3, True)}
    assert {source.name for source in found.values()} == {f"{tmp_path}/a.jsonl"}
    assert {source.splits for source in found.values()} == {("train",)}


@pytest.mark.parametrize(
    ("data", "code", "text"),
    [
        (
            {"eval": "b.jsonl", "eval_fraction": 0.1},
            "C17",
            "data.eval and data.eval_fraction both define the held-out data",
        ),
        ({"split_seed": 1}, "C17", "data.split_seed has no effect without data.eval_fraction"),
        ({"eval_fraction": 1.0}, "C06", "1"),
        ({"eval_fraction": 0.0}, "C06", "0"),
        ({"max_rows": 0}, "C06", "0"),
        ({"format": "transcript"}, "C07", "transcripts"),
        ({"on_bad": "dorp"}, "C07", "drop"),
    ],
)
def test_what_contradicts_or_is_out_of_range(tmp_path: Path, data: dict[str, Any], code: str, text: str) -> None:
    with pytest.raises(RLHFError) as error:
        sft(tmp_path, train="a.jsonl", **data)
    assert [problem.code for problem in error.value.problems] == [code] and text in str(error.value)
    assert "sft.yaml:" in str(error.value)


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


@pytest.mark.parametrize(("written", "meant"), NAMES)
def test_a_name_is_a_path_unless_it_can_only_be_a_dataset_of_the_hub(tmp_path: Path, written: str, meant: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "odd[1]").mkdir()
    made = config(tmp_path, **MODEL, data={"train": written})
    assert made.data.train == meant.format(here=tmp_path)
    again = tmp_path / "RUN" / "sft"
    assert config(again, **made.dump(relative_to=again)).data.train == made.data.train


def test_a_folder_of_data_stays_a_path_where_it_is_gone(tmp_path: Path) -> None:
    (tmp_path / "mine" / "rows").mkdir(parents=True)
    dumped = config(tmp_path, **MODEL, data={"train": "mine/rows"}).dump(relative_to=tmp_path)
    other = config(tmp_path / "elsewhere", **MODEL, data={"train": dumped["data"]["train"]})
    assert other.data.train == f"{tmp_path}/elsewhere/mine/rows"


def test_the_tokenizer_of_new_weights_reads_the_training_data_as_it_is_read(tmp_path: Path) -> None:
    def source(train: str) -> DataSource:
        new = {"model_type": "llama", "tokenizer": {"train": train, "vocab_size": 300}}
        data = {"train": "lab/tables", "subset": "a", "max_rows": 5, "eval_fraction": 0.5, "columns": {"text": "b"}}
        return config(tmp_path, model={"new": new}, data=data).sources()["model.new.tokenizer.train"]

    same, other = source("lab/tables"), source("lab/other")
    assert (same.subset, same.max_rows, same.share, dict(same.columns)) == ("a", 5, None, {})
    assert (other.name, other.subset, other.max_rows) == ("lab/other", None, None)


# --- what makes a result another one


def identity(folder: Path, **data: Any) -> dict[str, Any]:
    made = config(folder, **MODEL, data=data)
    return runs.compute_identity(made, {}, made.sources())


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


def test_each_file_of_a_split_counts(tmp_path: Path) -> None:
    root = data_folder(tmp_path / "a")
    before = identity(tmp_path, train="a", eval="a[test]")
    jsonl.write_jsonl(root / "data" / "train-1.jsonl", [{"text": "changed"}])
    assert runs.identity_difference(before, identity(tmp_path, train="a", eval="a[test]")) == [
        "data.train: other content"
    ]
    jsonl.write_jsonl(root / "data" / "train-1.jsonl", [{"text": "train-1"}])
    jsonl.write_jsonl(root / "data" / "train-2.jsonl", [{"text": "new"}])
    assert runs.identity_difference(before, identity(tmp_path, train="a", eval="a[test]")) == [
        "data.train: other content"
    ]
