"""The identity of a stage: content and not dates, and differences that read like a changelog."""

import os
from pathlib import Path

import pytest
from fake_config import FakeConfig

from rlhf_cli import runs
from rlhf_cli.config.sources import DataSource
from rlhf_cli.errors import RLHFError


def test_differences_read_like_a_changelog() -> None:
    old = {
        "config": {"ppo": {"kl_coef": 0.05, "whiten": True}, "rewards": {}, "gone": 1, "f": {"x": None}},
        "parents": {"models.sft": "a", "models.reward": "b"},
        "data": {"data.prompts": "c"},
    }
    new = {
        "config": {"ppo": {"kl_coef": 0.1, "whiten": False, "x": 3}, "rewards": {"short": {"weight": 1.0}}},
        "parents": {"models.sft": "z", "models.reward": "b", "models.value": "v"},
        "data": {"data.prompts": "y"},
    }
    assert set(runs.identity_difference(old, new)) == {
        "ppo.kl_coef 0.05 -> 0.1",
        "ppo.whiten true -> false",
        "ppo.x: new key 3",
        "gone: no longer set (was 1)",
        "rewards.short.weight: new key 1.0",
        "models.sft: other weights",
        "models.value: was not set",
        "data.prompts: other content",
    }
    assert runs.identity_difference(old, old) == []
    assert runs.identity_difference({"config": {"f": {"x": None}}}, {}) == ["f.x: no longer set (was null)"]
    assert "ppo.x: new key 3" not in runs.identity_difference(old, new, {"ppo.x": 3})  # a newer version added the key
    assert "ppo.x: new key 3" in runs.identity_difference(old, new, {"ppo.x": 4})


def test_identity_follows_content_and_not_dates_and_all_missing_files_are_named(tmp_path: Path) -> None:
    path, config = tmp_path / "rows.jsonl", FakeConfig(tmp_path)

    def identity() -> dict:
        return runs.compute_identity(config, {}, {"data.train": DataSource.of(path)})

    path.write_text("{}\n")
    first = identity()
    os.utime(path, (1, 1))
    assert identity() == first
    path.write_text("{} \n")
    assert runs.identity_difference(first, identity()) == ["data.train: other content"]
    (tmp_path / "rows.jsonl").write_text("")
    data = {f"data.{name}": DataSource.of(tmp_path / name) for name in ("row.jsonl", "nothing-like-it")}
    with pytest.raises(RLHFError) as caught:
        runs.compute_identity(FakeConfig(tmp_path), {}, data)
    assert [problem.code for problem in caught.value.problems] == ["D01", "D01"]
    assert f"did you mean {tmp_path}/rows.jsonl?" in str(caught.value)
