"""Presets that are fitted to a GPU: what is written of them."""

from pathlib import Path

import pytest
from ppo_folder import must_succeed

from tests.presets.test_recipes import rlhf


@pytest.mark.full
def test_a_changed_rate_is_written_without_binary_digits(tmp_path: Path) -> None:
    must_succeed(rlhf("init", "hh", tmp_path / "run", "--gpu", "12", "--baselines"))
    assert "learning_rate: 1e-5 " in (tmp_path / "run/dpo.yaml").read_text()
