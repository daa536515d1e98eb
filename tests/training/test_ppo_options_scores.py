"""Options of the score and of the KL coefficient: exact values, by hand or by numpy."""

from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch

from rlhf_cli.models.batch import Rollout
from rlhf_cli.ppo.experience import RunningMeanStd


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


# Running moments


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


def frozen_state(trainer):
    """Everything that make_experience could change, copied."""
    state = trainer.state_dict()
    weights = [tiny.weights(model) for model in (trainer.policy, trainer.value, trainer.ref)]
    return weights, state["moments"], state["updates"], state["kl_coef"], torch.get_rng_state()


def test_make_experience_changes_nothing_and_update_commits():
    trainer = tiny.trainer(use_score_scaling=True, adap_kl_ctrl=True)
    before = frozen_state(trainer)
    experience = trainer.make_experience(tiny.rollout(), scores=torch.tensor(tiny.SCORES))
    trainer.make_experience(tiny.rollout(), scores=torch.tensor([100.0, 0.0, 0.0, 0.0]))  # shown, not trained on
    after = frozen_state(trainer)
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
    assert before[1:4] == after[1:4] and torch.equal(before[4], after[4])
    trainer.update(experience)
    assert (trainer.score_moments.count, trainer.score_moments.mean) == (4, pytest.approx(0.625))
    assert trainer.score_moments.std == pytest.approx(np.std(tiny.SCORES, ddof=1))


# The adaptive KL coefficient


def test_adap_kl_ctrl_by_hand_over_three_updates():
    """target 6, horizon 100, four episodes per update: a factor of 1 + 4/100 x the clipped error.

    12 nats: twice the target, clipped to +0.2. 0 nats: clipped to -0.2. 6.6 nats: +0.1, inside.
    """
    trainer = tiny.trainer(adap_kl_ctrl=True, kl_coef=0.2, target=6.0, horizon=100)
    coefficients = []
    for nats in (12.0, 0.0, 6.6):
        experience = trainer.make_experience(tiny.rollout(), scores=torch.zeros(4))
        kl = torch.zeros_like(experience.kl).index_fill(1, torch.tensor(0), nats)
        stats = trainer.update(replace(experience, kl=kl))
        coefficients.append(trainer.kl_coef)
        assert stats["objective/kl"] == pytest.approx(nats) and stats["objective/kl_coef"] == experience.kl_coef
    assert coefficients == pytest.approx([0.2016, 0.1999872, 0.2007871488], rel=1e-6)
