"""Penalties of scores: exact values, by hand."""

import pytest
import tiny
import torch

from rlhf_cli.models.batch import Rollout


def test_overlong_penalty_table():
    """Limit 8, tokens 4, factor 2: free up to 4 tokens, then half a point more per token."""
    lengths = [1, 4, 5, 6, 7, 8]
    rows = Rollout.from_lists([[5]] * 6, [[3] * (n - 1) + [tiny.EOS] for n in lengths], stop_token_id=tiny.EOS)
    free, charged = (
        tiny.trainer(response_length=8, overlong_penalty=penalty).make_experience(rows).scores
        for penalty in (None, {"tokens": 4, "factor": 2.0})
    )
    assert (free - charged).tolist() == pytest.approx([0.0, 0.0, 0.5, 1.0, 1.5, 2.0], abs=1e-6)


def test_both_penalties_come_after_scaling_and_clip():
    """Row 1 of the four never ends: 9 / spread is clipped to 0.5, and then 1 is subtracted."""
    trainer = tiny.trainer(rewards={"nine": lambda rollout: torch.tensor([1.0, 9.0, 1.0, 1.0])}, score_clip=0.5)
    rows = Rollout.from_lists([[5]] * 4, [[2], [3] * 8, [2], [2]], stop_token_id=tiny.EOS)
    assert trainer.make_experience(rows).scores.tolist() == pytest.approx([0.5, -0.5, 0.5, 0.5])
