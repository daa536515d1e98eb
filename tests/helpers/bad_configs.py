"""What the tests of configs share: a minimal file of each stage, loading one, and the messages of a bad one."""

from pathlib import Path
from typing import Any

import pytest

from rlhf_cli.config.loading import load
from rlhf_cli.errors import RLHFError

MINIMAL = {
    "sft": "model: {path: base}\ndata: {train: train.jsonl}\n",
    "reward": "data: {train: pairs.jsonl}\n",
    "dpo": "data: {train: pairs.jsonl}\n",
    "ppo": "data: {prompts: prompts.jsonl}\nppo: {total_episodes: 640}\n",
    "eval": "data: {prompts: held-out.jsonl}\n",
}
HEAD = {
    "sft": "model: {path: ./base}\ndata: {train: train.jsonl}\n",
    "reward": "data: {train: pairs.jsonl}\n",
    "dpo": "data: {train: pairs.jsonl}\n",
    "ppo": "data: {prompts: prompts.jsonl}\nrewards: {reward: {weight: 1}}\n",
    "eval": "data: {prompts: held-out.jsonl}\njudges: {}\n",
}


def messages(stage: str, content: str | bytes, *overrides: str) -> list[str]:
    """The problems, as printed, of STAGE.yaml with this content in the working directory."""
    path = Path(f"{stage}.yaml")
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(RLHFError) as caught:
        load(stage, str(path), overrides)
    assert caught.value.exit_code == 2
    return [str(problem) for problem in caught.value.problems]


def only(stage: str, content: str | bytes, *overrides: str) -> str:
    """The same where there is exactly one."""
    [message] = messages(stage, content, *overrides)
    return message


def written(folder: Path, stage: str, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stage}.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def loaded(folder: Path, stage: str, text: str = "", *overrides: str) -> Any:
    """The config of a stage from a file in `folder`; without a text, the minimal one."""
    return load(stage, written(folder, stage, text or MINIMAL[stage]), overrides)
