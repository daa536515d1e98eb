"""Overrides of a run go to its stages."""

import pytest
from fake_config import CONFIGS

from rlhf_cli.pipeline.load import route_overrides


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["*.seed=3"], {stage: ["*.seed=3"] for stage in CONFIGS}),
        (
            ["model.new.hidden_size=8", "data.on_identical=drop"],
            {"sft": ["model.new.hidden_size=8"], "reward": ["data.on_identical=drop"]},
        ),
        (["*.models.dtype=float32"], {stage: ["*.models.dtype=float32"] for stage in ("ppo", "eval")}),
        (
            ["sft:model.dtype=float32", "ppo:seed=4", "reward:data.columns={a: b}"],
            {"sft": ["model.dtype=float32"], "ppo": ["seed=4"], "reward": ["data.columns={a: b}"]},
        ),
    ],
)
def test_a_star_sets_a_key_in_every_stage_that_has_it_and_a_stage_in_one(texts: list[str], expected: dict) -> None:
    routed = route_overrides(texts, list(CONFIGS))
    assert {stage: sets for stage, sets in routed.items() if sets} == expected
