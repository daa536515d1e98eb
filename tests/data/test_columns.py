"""Columns of other people's files: labels, and messages of the system."""

from pathlib import Path
from typing import Any

import pytest
from run_cli import rlhf

from rlhf_cli import data, jsonl
from tests.data.test_rows_of_other_tools import RULE, dialogue, texts_of, turn


def test_sft_names_a_label_that_it_does_not_read(folder: Path) -> None:
    rows = [
        {"prompt": p, "completion": c, "label": number % 2 == 0} for number, (p, c, _) in enumerate([texts_of(1)] * 9)
    ]
    jsonl.write_jsonl(folder / "rows.jsonl", rows)
    result = rlhf("check", "sft.yaml")
    assert result.exit_code == 0
    assert "warning[D17]: rows.jsonl: not read: label, which may say which answers are bad" in result.stderr


@pytest.mark.parametrize("template", [True, False])
def test_a_system_column_beside_transcripts_is_read(tmp_path: Path, chat: Any, tokenizer: Any, template: bool) -> None:
    row = {"system": RULE, "prompt": dialogue("Hi", "").rstrip(), "chosen": " Yes", "rejected": " No"}
    jsonl.write_jsonl(tmp_path / "pairs.jsonl", [row] * 9)
    used = chat if template else tokenizer
    found = data.preference_rows(tmp_path / "pairs.jsonl", used, max_length=None)
    prompt = [turn("system", RULE), turn("user", "Hi")] if template else f"{RULE}\n\nHuman: Hi\n\nAssistant:"
    assert found[0]["prompt_ids"] == data.encode(used, prompt, None)[0]
    assert found.columns == "prompt, chosen, rejected, system"
