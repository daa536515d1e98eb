"""A run for the tests of `rlhf check`."""

import json
from pathlib import Path

import pytest
from bad_inputs import replace

from rlhf_cli import jsonl


@pytest.fixture
def run_folder(folder: Path) -> Path:
    """A run whose later stages start from what the earlier ones are still to make."""
    replace("reward.yaml", "model: {path: model}\n", "")
    replace("ppo.yaml", "models: {sft: model, reward: scorer}\n", "")
    replace("ppo.yaml", "total_episodes: 64", "total_episodes: 64\n  response_length: 32")
    pairs = {json.dumps(row): row for _, row in jsonl.read_jsonl(folder / "pairs.jsonl")}  # none twice
    jsonl.write_jsonl(folder / "pairs.jsonl", pairs.values())
    jsonl.write_jsonl(folder / "held-out.jsonl", [{"prompt": f"And the {n}?"} for n in range(9)])
    (folder / "eval.yaml").write_text("data: {prompts: held-out.jsonl}\neval: {n: 9, best_of: []}\n")
    return folder
