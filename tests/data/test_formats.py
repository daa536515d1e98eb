"""Rows under rlhf's column names: the first row is the schema of the others."""

from pathlib import Path
from typing import Any

import pytest

from rlhf_cli import data, jsonl
from rlhf_cli.config.sources import DataSource
from rlhf_cli.data.datasets import PAIR_FORMS
from rlhf_cli.data.formats import DatasetReader
from rlhf_cli.data.readers import BadRow
from tests.data.test_rows_of_other_tools import texts_of


def test_columns_that_the_first_row_lacks_are_named(
    tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = dict(zip(("prompt", "chosen", "rejected"), texts_of(0), strict=True))
    jsonl.write_jsonl(tmp_path / "pairs.jsonl", [pair, {**pair, "context": "Some words.", "source": "x"}])
    found = data.preference_rows(tmp_path / "pairs.jsonl", tokenizer, max_length=None)
    assert found.columns == "prompt, chosen, rejected; not read: context, source"
    assert "warning[D17]" in capsys.readouterr().err


def test_columns_of_prompts_are_for_reward_functions(
    tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    jsonl.write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "Tell me", "context": "Some words.", "answer": "x"}])
    found = data.prompt_rows(tmp_path / "prompts.jsonl", tokenizer, max_length=None)
    assert found.columns == "prompt; for reward functions: context, answer"
    assert capsys.readouterr().err == ""


def test_many_bad_rows_at_the_start_do_not_slow_the_reading(tmp_path: Path, tokenizer: Any) -> None:
    """The first rows are looked at once: 20,000 took half a minute."""
    bad, good = {"prompt": "", "chosen": "a", "rejected": "b"}, {"prompt": "A b c", "chosen": "a", "rejected": "b"}
    jsonl.write_jsonl(tmp_path / "pairs.jsonl", [*[bad] * 1000, good])
    reader = DatasetReader(DataSource(str(tmp_path / "pairs.jsonl"), on_bad="drop"), PAIR_FORMS)
    heads = []
    for location, _, row in reader.rows():
        heads.append(reader._head)
        if not row["prompt"]:
            reader.note(location, BadRow("D08", "the prompt is empty"))
    assert all(head is heads[0] for head in heads) and len(heads) == 1001
