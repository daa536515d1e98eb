"""Hub datasets: from the Hub cache, downloaded, or their first rows, with a local server as the Hub.

Each read is a separate process, because the Hub client reads its address when it is imported.
"""

import gzip
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from run_cli import must_succeed, python
from stand_in_hub import SHA, Files, serving

from tests.data.test_readers import columns

NOWHERE = "http://127.0.0.1:9"  # a port on which nothing listens
READ = """
import json, sys
from rlhf_cli.errors import RLHFError
from rlhf_cli.config.sources import DataSource
from rlhf_cli.data.sources import is_local, locate_files, raw_rows
for options in json.loads(sys.argv[1]):
    if options.pop("look", False):
        print(json.dumps({"here": is_local(DataSource(**options))}))
        continue
    try:
        source = DataSource(where="sft.yaml:3", **options)
        found = {"files": [str(path) for path in locate_files(source)], "rows": [row for _, row in raw_rows(source)]}
    except RLHFError as error:
        found = {"error": str(error)}
    print(json.dumps(found))
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def ask(home: Path, hub: str, *sources: dict[str, Any], offline: bool = False) -> tuple[list[dict[str, Any]], str]:
    """Read sources in a new process; return the result of each, and stderr."""
    settings = {"HF_ENDPOINT": hub, "HF_HOME": home, "RLHF_CACHE": home / "rlhf", "HOME": home}
    settings |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": int(offline)}
    environment = os.environ | {name: str(value) for name, value in settings.items()}
    done = must_succeed(python("-c", READ, json.dumps(sources), env=environment, timeout=60))
    assert "Traceback" not in done.stderr, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


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


def requests(paths: list[str], name: str) -> list[str]:
    return [path for path in paths if name in path]


@pytest.mark.full
def test_first_rows_are_streamed_once_and_are_not_the_full_dataset(home: Path) -> None:
    first, full = {"name": "lab/tables", "max_rows": 2}, {"name": "lab/tables"}
    is_local = [{**source, "look": True} for source in (first, full)]
    with serving(DATASETS) as (hub, requested):
        (streamed, again), stderr = ask(home, hub, first, first)
        assert streamed["rows"] == TABLE[:2] and again == streamed  # the texts 001 and NA are not converted
        assert Path(streamed["files"][0]).is_relative_to(home / "rlhf")
        assert stderr.count("streaming the first 2 rows of lab/tables") == 1 and "Setting CardData" not in stderr
        requested.clear()
        assert ask(home, hub, first)[0] == [streamed] and not requests(requested, "lab")
        results, stderr = ask(home, hub, *is_local, full, is_local[1])
        assert [results[number]["here"] for number in (0, 1, 3)] == [True, False, True]
        downloaded = results[2]  # the README in the Hub cache does not count as the dataset
        assert downloaded["rows"] == TABLE and "downloading lab/tables from the Hub" in stderr
    assert ask(home, NOWHERE, first, full, offline=True)[0] == [streamed, downloaded]


@pytest.mark.full
def test_first_rows_of_each_file_format_and_of_several_files(home: Path) -> None:
    names = {"lab/shards": 3, "lab/chats": 2, "lab/tables[test]": 9}
    with serving(DATASETS) as (hub, _):
        results, _ = ask(home, hub, *({"name": name, "max_rows": count} for name, count in names.items()))
    shards, chats, test = (result["rows"] for result in results)
    assert shards == [{"text": "a"}, {"text": "b"}, {"text": "c"}] and test == [{"text": "x"}]
    assert chats == [{"messages": turns} for turns in TURNS[:2]]


@pytest.mark.full
def test_a_dataset_is_downloaded_once_and_is_used_without_the_hub(home: Path) -> None:
    part, full = {"name": "lab/shards/more"}, {"name": "lab/shards"}
    with serving(DATASETS) as (hub, requested):
        assert ask(home, hub, part)[0][0]["rows"] == [{"text": "n"}]
        assert not requests(requests(requested, "/resolve/"), "train-")  # only the part is downloaded
        (shards, again), stderr = ask(home, hub, full, full)
        assert [row["text"] for row in shards["rows"]] == ["a", "b", "c", "d"] and again == shards
        assert stderr.count("downloading lab/shards") == 1 and f"/snapshots/{SHA}/" in shards["files"][0]
        requested.clear()
        assert ask(home, hub, full)[0] == [shards] and not requests(requested, "lab")
    three = {**shards, "rows": shards["rows"][:3]}
    assert ask(home, NOWHERE, full, {**full, "max_rows": 3})[0] == [shards, three]


@pytest.mark.full
def test_an_incomplete_snapshot_is_completed_or_an_error(home: Path) -> None:
    with serving(DATASETS) as (hub, _):
        (full,), _ = ask(home, hub, {"name": "lab/shards"})
        (listing,) = home.glob("hub/*/trees/*.json")
        listing.unlink()  # older clients and downloads of single files write none
        Path(full["files"][0]).unlink()
        assert ask(home, hub, {"name": "lab/shards"})[0] == [full] and listing.exists()
        Path(full["files"][1]).unlink()
    (result,), _ = ask(home, NOWHERE, {"name": "lab/shards"}, offline=True)
    assert "error[D01]: sft.yaml:3:" in result["error"]


@pytest.mark.full
def test_d01_of_datasets_splits_and_subsets_and_d03_of_rows(home: Path) -> None:
    first = {"max_rows": 2}
    with serving(DATASETS) as (hub, _):
        results, _ = ask(
            home,
            hub,
            {"name": "lab/none"},
            {"name": "lab/none", **first},
            {"name": "lab/tables[tst]", **first},
            {"name": "lab/tables[tst]"},
            {"name": "lab/subsets", **first},
            {"name": "lab/subsets", **first, "subset": "tow"},
            {"name": "lab/bad", **first},
            {"name": "lab/subsets[test]", **first, "subset": "two"},
        )
    errors = [result.get("error", "") for result in results]
    missing = "error[D01]: sft.yaml:3: `lab/none` is not a local file or folder"
    assert all(error.startswith(missing) for error in errors[:2])
    assert all("has no split tst; it has train, test" in error and "[test]" in error for error in errors[2:4])
    assert "lab/subsets has the subsets one, two" in errors[4] and "data.subset: one" in errors[4]
    assert 'lab/subsets has no subset "tow"; it has one, two' in errors[5] and "data.subset: two" in errors[5]
    assert errors[6].startswith("error[D03]: lab/bad/train.jsonl:2:10: ")
    assert results[7]["rows"] == [{"a": "3"}]


def test_a_dataset_of_more_than_20_gb_is_not_downloaded(home: Path) -> None:
    class Huge(bytes):
        def __len__(self) -> int:
            return 30_000_000_000

    with serving({"lab/huge": {"train.csv": Huge(b"a\n1\n")}}) as (hub, _):
        (result,), _ = ask(home, hub, {"name": "lab/huge"})
    assert "lab/huge has 30 GB on the Hub" in result["error"] and "data.max_rows" in result["error"]


@pytest.mark.full
@pytest.mark.parametrize("offline", [True, False])
def test_an_unreachable_hub_is_an_error_within_seconds(home: Path, offline: bool) -> None:
    start = time.monotonic()
    results, _ = ask(home, NOWHERE, {"name": "lab/none"}, {"name": "lab/none", "max_rows": 2}, offline=offline)
    assert time.monotonic() - start < 15  # `datasets` would retry for 24 seconds
    for result in results:
        assert result["error"].startswith("error[D01]: sft.yaml:3: `lab/none` is not a local file or folder")
        assert "hint: download it with network access: hf download --repo-type dataset lab/none" in result["error"]


@pytest.mark.full
def test_a_cache_without_a_list_of_files_is_used_offline(home: Path) -> None:
    dataset = home / "hub" / "datasets--lab--hand"
    snapshots = {
        "main": (SHA, "train.jsonl", '{"text": "one"}\n' * 3),
        "v2": ("b" * 40, "train.jsonl", '{"text": "two"}\n'),
        "card": ("c" * 40, "README.md", "# Only the card"),
    }
    for revision, (commit, name, content) in snapshots.items():
        for path, text in ((f"refs/{revision}", commit), (f"snapshots/{commit}/{name}", content)):
            (dataset / path).parent.mkdir(parents=True, exist_ok=True)
            (dataset / path).write_text(text)
    tagged, card = {"name": "lab/hand", "revision": "v2", "max_rows": 1}, {"name": "lab/hand", "revision": "card"}
    (main, other, none), stderr = ask(home, NOWHERE, {"name": "lab/hand"}, tagged, card, offline=True)
    assert "the Hub did not provide it: offline mode is on" in none["error"]
    assert main["rows"] == [{"text": "one"}] * 3 and other["rows"] == [{"text": "two"}]
    assert stderr.count("from the Hub cache") == 1
