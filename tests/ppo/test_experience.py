"""Scores, penalties and their running moments: exact values, by hand or by numpy."""

import numpy as np
import pytest
import tiny
import torch

from rlhf_cli.models.batch import Rollout
from rlhf_cli.ppo.scores import RunningMeanStd


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


def test_merged_moments_are_those_of_all_scores_together():
    generator = np.random.default_rng(0)
    batches = [generator.normal(100.0, 1e-2, size) for size in (1, 7, 64, 3)]  # a mean that swamps a sum of squares
    moments = RunningMeanStd()
    for count in range(1, 5):
        moments, scores = moments + RunningMeanStd.of(torch.tensor(batches[count - 1])), np.concatenate(batches[:count])
        deviation = scores.std(ddof=1) if len(scores) > 1 else 0.0
        assert (moments.count, moments.mean) == (len(scores), pytest.approx(scores.mean(), rel=1e-12))
        assert moments.std == pytest.approx(deviation, rel=1e-9)
        error = deviation / len(scores) ** 0.5 if count > 1 else np.inf
        assert moments.standard_error == pytest.approx(error, rel=1e-9)


@pytest.mark.parametrize("norm", [False, True])
def test_equal_scores_are_not_scaled(norm):
    trainer = tiny.trainer(use_score_scaling=True, use_score_norm=norm)
    for _ in range(3):
        experience = trainer.make_experience(tiny.rollout(), scores=torch.full((4,), 0.1))
        assert experience.scores.tolist() == pytest.approx([0.1] * 4)
        trainer.update(experience)
