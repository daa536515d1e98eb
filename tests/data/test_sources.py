"""Sources of data: at most max_rows are read, and all missing files are listed."""

from pathlib import Path
from typing import Any

import pytest

from rlhf_cli.config.sources import DataSource
from rlhf_cli.data import sources
from rlhf_cli.data.sources import raw_rows
from rlhf_cli.errors import Problem, RLHFError

pytestmark = pytest.mark.usefixtures("here")
Rows = list[dict[str, Any]]


def read(name: str, **options: Any) -> Rows:
    return [row for _, row in raw_rows(DataSource(name, **options))]


def problem(name: str, **options: Any) -> Problem:
    with pytest.raises(RLHFError) as caught:
        read(name, **options)
    assert caught.value.exit_code == 2 and len(caught.value.problems) == 1
    return caught.value.problems[0]


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
