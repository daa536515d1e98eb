"""Datasets of the hub: from its cache, fetched whole, or their first rows, with a stand-in for the hub on this machine.

Each command is a process of its own: what its libraries know of the hub's address they read when they are imported.
"""

import gzip
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from stand_in_hub import SHA, Files, serving

ROOT = Path(__file__).parent.parent
NOWHERE = "http://127.0.0.1:9"  # the port of a service that no machine runs
READ = """
import json, sys
from rlhf_cli.errors import RLHFError
from rlhf_cli.config.sources import DataSource
from rlhf_cli.data.sources import is_local, locate_files, read_rows
for options in json.loads(sys.argv[1]):
    if options.pop("look", False):
        print(json.dumps({"here": is_local(DataSource(**options))}))
        continue
    try:
        source = DataSource(where="sft.yaml:3", **options)
        found = {"files": [str(path) for path in locate_files(source)], "rows": [row for _, row in read_rows(source)]}
    except RLHFError as error:
        found = {"error": str(error)}
    print(json.dumps(found))
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def ask(home: Path, hub: str, *wanted: dict[str, Any], offline: bool = False) -> tuple[list[dict[str, Any]], str]:
    """What sources give in a new process, and what it said on stderr."""
    settings = {"HF_ENDPOINT": hub, "HF_HOME": home, "RLHF_CACHE": home / "rlhf", "PYTHONPATH": ROOT, "HOME": home}
    environment = {**os.environ, **{name: str(value) for name, value in settings.items()}, "HF_HUB_DISABLE_XET": "1"}
    environment["HF_HUB_OFFLINE"] = str(int(offline))
    command = [sys.executable, "-c", READ, json.dumps(wanted)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def columns(rows: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    parquet.write_table(arrow.Table.from_pylist(rows), file)
    return file.getvalue()


TABLE = [
    {"prompt": "001", "completion": "NA"},
    {"prompt": "1e5", "completion": "a\nb"},
    {"prompt": "t", "completion": ""},
]
TURNS = [[{"role": "user", "content": str(n)}, {"role": "assistant", "content": "2020-01-01"}] for n in range(4)]
TWO_SUBSETS = b"""---
configs:
- {config_name: one, data_files: [{split: train, path: one.csv}]}
- {config_name: two, data_files: [{split: train, path: two.csv}, {split: test, path: two_test.csv}]}
---
"""
DATASETS: dict[str, Files] = {
    "lab/tables": {
        "README.md": b"# Tables",
        "train.csv": b'prompt,completion\n001,NA\n1e5,"a\nb"\nt,\n',
        "test.csv": b"text\nx\n",
    },
    "lab/shards": {
        "data/train-00001.jsonl.gz": gzip.compress(b'{"text": "c"}\n{"text": "d"}\n'),
        "data/train-00000.jsonl.gz": gzip.compress(b'{"text": "a"}\n{"text": "b"}\n'),
        "more/notes.jsonl": b'{"text": "n"}\n',
    },
    "lab/chats": {"data/train-0.parquet": columns([{"messages": turns} for turns in TURNS])},
    "lab/bad": {"train.jsonl": b'{"text": "a"}\n{"text": }\n'},
    "lab/subsets": {"README.md": TWO_SUBSETS, "one.csv": b"a\n1\n", "two.csv": b"a\n2\n", "two_test.csv": b"a\n3\n"},
}


def contents(paths: list[str]) -> list[bytes]:
    return [path.encode() for path in paths if path.startswith("GET") and "/resolve/" in path]


def test_first_rows_are_streamed_once_as_they_stand_and_do_not_pass_for_the_whole(home: Path) -> None:
    first = {"name": "lab/tables", "max_rows": 2}
    whole = {"name": "lab/tables"}
    with serving(DATASETS) as (hub, asked):
        (found, again), said = ask(home, hub, first, first)
        assert found["rows"] == TABLE[:2] and again == found  # the text 001 is no number, NA is no gap
        (path,) = found["files"]
        assert Path(path).is_relative_to(home / "rlhf") and said.count("streaming the first 2 rows of lab/tables") == 1
        assert "Traceback" not in said and "Setting CardData" not in said
        asked.clear()
        assert ask(home, hub, first)[0] == [found] and not [path for path in asked if "lab" in path]
        looks = [{**one, "look": True} for one in (first, whole)]
        here = ask(home, hub, looks[0], looks[1], whole, looks[1])
        assert [here[0][number]["here"] for number in (0, 1, 3)] == [True, False, True]
        all_of_it, said = here[0][2], here[1]  # a README in the hub's cache is not the dataset
        assert all_of_it["rows"] == TABLE and "downloading lab/tables from the Hub" in said
    (before, now), _ = ask(home, NOWHERE, first, whole, offline=True)
    assert before == found and now == all_of_it


def test_first_rows_of_each_kind_of_file_and_over_several(home: Path) -> None:
    with serving(DATASETS) as (hub, _):
        (shards, chats, test), _ = ask(
            home,
            hub,
            {"name": "lab/shards", "max_rows": 3},
            {"name": "lab/chats", "max_rows": 2},
            {"name": "lab/tables[test]", "max_rows": 9},
        )
    assert shards["rows"] == [{"text": "a"}, {"text": "b"}, {"text": "c"}]
    assert chats["rows"] == [{"messages": turns} for turns in TURNS[:2]]
    assert test["rows"] == [{"text": "x"}]


def test_a_dataset_is_fetched_once_and_stays_there_when_the_hub_does_not(home: Path) -> None:
    part, whole = {"name": "lab/shards/more"}, {"name": "lab/shards"}
    with serving(DATASETS) as (hub, asked):
        (found,), _ = ask(home, hub, part)
        assert found["rows"] == [{"text": "n"}]
        assert not any("train-" in path for path in asked if "/resolve/" in path)  # the rest of it was not asked for
        (shards, again), said = ask(home, hub, whole, whole)
        assert [row["text"] for row in shards["rows"]] == ["a", "b", "c", "d"] and again == shards
        assert said.count("downloading lab/shards") == 1 and f"/snapshots/{SHA}/" in shards["files"][0]
        asked.clear()
        assert ask(home, hub, whole)[0] == [shards] and not [path for path in asked if "lab" in path]
    three = {**shards, "rows": shards["rows"][:3]}
    assert ask(home, NOWHERE, whole, {**whole, "max_rows": 3})[0] == [shards, three]


def test_a_snapshot_that_misses_files_is_completed(home: Path) -> None:
    with serving(DATASETS) as (hub, _):
        (whole,), _ = ask(home, hub, {"name": "lab/shards"})
        (listing,) = home.glob("hub/*/trees/*.json")
        listing.unlink()  # older clients keep none, and those who ask for a single file get none
        Path(whole["files"][0]).unlink()
        assert ask(home, hub, {"name": "lab/shards"})[0] == [whole] and listing.exists()
        Path(whole["files"][1]).unlink()
    (found,), _ = ask(home, NOWHERE, {"name": "lab/shards"}, offline=True)
    assert "error[D01]: sft.yaml:3:" in found["error"]  # and never half of the data


def test_what_the_hub_or_the_dataset_does_not_have(home: Path) -> None:
    with serving(DATASETS) as (hub, _):
        found, said = ask(
            home,
            hub,
            {"name": "lab/none"},
            {"name": "lab/none", "max_rows": 2},
            {"name": "lab/tables[tst]", "max_rows": 2},
            {"name": "lab/tables[tst]"},
            {"name": "lab/subsets", "max_rows": 2},
            {"name": "lab/subsets", "max_rows": 2, "subset": "tow"},
            {"name": "lab/bad", "max_rows": 2},
            {"name": "lab/subsets[test]", "max_rows": 2, "subset": "two"},
        )
    errors = [one.get("error", "") for one in found]
    assert all(
        error.startswith("error[D01]: sft.yaml:3: `lab/none` is not a local file or folder") for error in errors[:2]
    )
    assert all("has no split tst; it has train, test" in error and "[test]" in error for error in errors[2:4])
    assert "lab/subsets has the subsets one, two" in errors[4] and "data.subset: one" in errors[4]
    assert 'lab/subsets has no subset "tow"; it has one, two' in errors[5] and "data.subset: two" in errors[5]
    assert errors[6].startswith("error[D03]: lab/bad/train.jsonl:2:10: ")
    assert found[7]["rows"] == [{"a": "3"}] and "Traceback" not in said


def test_a_large_dataset_is_not_fetched_unasked(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Huge(bytes):
        def __len__(self) -> int:
            return 30_000_000_000

    with serving({"lab/huge": {"train.csv": Huge(b"a\n1\n")}}) as (hub, _):
        (found,), _ = ask(home, hub, {"name": "lab/huge"})
    assert "lab/huge has 30 GB on the Hub" in found["error"] and "data.max_rows" in found["error"]


@pytest.mark.parametrize("offline", [True, False])
def test_no_hub_and_nothing_in_its_cache_is_said_at_once(home: Path, offline: bool) -> None:
    began = time.monotonic()
    wanted = [{"name": "lab/none"}, {"name": "lab/none", "max_rows": 2}]
    found, said = ask(home, NOWHERE, *wanted, offline=offline)
    assert time.monotonic() - began < 15  # datasets alone would try for 24 seconds
    for one in found:
        assert one["error"].startswith("error[D01]: sft.yaml:3: `lab/none` is not a local file or folder")
        assert "hint: download it with network access: hf download --repo-type dataset lab/none" in one["error"]
    assert "Traceback" not in said


def test_a_cache_made_by_others_is_taken_as_it_stands_offline(home: Path) -> None:
    dataset = home / "hub" / "datasets--lab--hand"
    (dataset / "refs").mkdir(parents=True)
    (dataset / "refs" / "main").write_text(SHA)
    (dataset / "refs" / "v2").write_text("b" * 40)
    for commit, text in ((SHA, "one"), ("b" * 40, "two")):
        snapshot = dataset / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "train.jsonl").write_text(f'{{"text": "{text}"}}\n' * 3)
    (dataset / "refs" / "card").write_text("c" * 40)
    (dataset / "snapshots" / ("c" * 40)).mkdir()
    (dataset / "snapshots" / ("c" * 40) / "README.md").write_text("# Only the card")
    tagged, card = {"name": "lab/hand", "revision": "v2", "max_rows": 1}, {"name": "lab/hand", "revision": "card"}
    (main, other, none), said = ask(home, NOWHERE, {"name": "lab/hand"}, tagged, card, offline=True)
    assert "the Hub did not provide it: offline mode is on" in none["error"]
    assert main["rows"] == [{"text": "one"}] * 3 and other["rows"] == [{"text": "two"}]
    assert said.count("from the Hub cache") == 1
