"""Options of the score and of the KL coefficient: exact values, by hand or by numpy."""

from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch

from rlhf_cli.models import save
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


def test_overlong_penalty_uses_the_length_limit_of_the_update():
    rows = Rollout.from_lists([[5]], [[3, 4, 2]], stop_token_id=tiny.EOS)
    length = {"response_length": {"min": 3, "max": 9}}
    free, charged = tiny.trainer(**length), tiny.trainer(**length, overlong_penalty={"tokens": 2, "factor": 1.0})
    limits = set()
    for update in range(20):
        free.updates = charged.updates = update
        penalty = free.make_experience(rows).scores - charged.make_experience(rows).scores
        expected = {3: 1.0, 4: 0.5}.get(charged.response_length, 0.0)  # of 3 tokens
        assert penalty.item() == pytest.approx(expected, abs=1e-6)
        limits.add(charged.response_length)
    assert {3, 4} < limits


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
def test_use_score_scaling_and_use_score_norm_by_numpy(norm):
    trainer = tiny.trainer(use_score_scaling=True, use_score_norm=norm, learning_rate=0.0)
    previous = []
    for scores in ([1.0, -1.0, 0.5, 2.0], [10.0, 12.0, 9.0, 11.0], [0.0, 0.0, 0.0, 0.0]):
        experience = trainer.make_experience(tiny.rollout(), scores=torch.tensor(scores))
        previous += scores
        shift = np.mean(previous) if norm else 0.0
        expected = (np.array(scores) - shift) / np.std(previous, ddof=1)
        assert experience.scores.tolist() == pytest.approx(expected.tolist(), abs=1e-5)
        assert experience.score_result.weighted_sum.tolist() == scores
        trainer.update(experience)


@pytest.mark.parametrize("norm", [False, True])
def test_equal_scores_are_not_scaled(norm):
    trainer = tiny.trainer(use_score_scaling=True, use_score_norm=norm)
    for _ in range(3):
        experience = trainer.make_experience(tiny.rollout(), scores=torch.full((4,), 0.1))
        assert experience.scores.tolist() == pytest.approx([0.1] * 4)
        trainer.update(experience)


@pytest.mark.parametrize("scaling", [False, True])
def test_score_clip_bounds_what_is_placed(scaling):
    trainer = tiny.trainer(score_clip=0.75, use_score_scaling=scaling)
    experience = trainer.make_experience(tiny.rollout(), scores=torch.tensor([8.0, -8.0, 0.25, 0.0]))
    spread = np.std([8.0, -8.0, 0.25, 0.0], ddof=1) if scaling else 1.0
    assert experience.scores.tolist() == pytest.approx([0.75, -0.75, 0.25 / spread, 0.0])
    assert experience.rewards.sum(1).tolist() == pytest.approx(experience.scores.tolist())


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
    assert (trainer.score_stats.count, trainer.score_stats.mean) == (4, pytest.approx(0.625))
    assert trainer.score_stats.std == pytest.approx(np.std(tiny.SCORES, ddof=1))


# The adaptive KL coefficient


def with_kl(experience, nats: float):
    """The same experience, with objective/kl set by hand."""
    kl = torch.zeros_like(experience.kl)
    kl[:, 0] = nats
    return replace(experience, kl=kl)


def test_adap_kl_ctrl_by_hand_over_three_updates():
    """target 6, horizon 100, four episodes per update: a factor of 1 + 4/100 x the clipped error.

    12 nats: twice the target, clipped to +0.2. 0 nats: clipped to -0.2. 6.6 nats: +0.1, inside.
    """
    trainer = tiny.trainer(adap_kl_ctrl=True, kl_coef=0.2, target=6.0, horizon=100)
    coefficients = []
    for nats in (12.0, 0.0, 6.6):
        experience = with_kl(trainer.make_experience(tiny.rollout(), scores=torch.zeros(4)), nats)
        stats = trainer.update(experience)
        coefficients.append(trainer.kl_coef)
        assert stats["objective/kl"] == pytest.approx(nats) and stats["objective/kl_coef"] == experience.kl_coef
    assert coefficients == pytest.approx([0.2016, 0.1999872, 0.2007871488], rel=1e-6)


def test_without_adap_kl_ctrl_the_coefficient_is_constant():
    trainer = tiny.trainer(kl_coef=0.2)
    trainer.update(with_kl(trainer.make_experience(tiny.rollout(), scores=torch.zeros(4)), 50.0))
    assert trainer.kl_coef == 0.2


def moved(**changes):
    """A trainer whose controller has raised its coefficient by 4 x 0.2 / 2 = 40 %."""
    trainer = tiny.trainer(policy_seed=3, adap_kl_ctrl=True, kl_coef=0.1, target=0.5, horizon=2, **changes)
    trainer.update(with_kl(trainer.make_experience(tiny.rollout(), scores=torch.zeros(4)), 50.0))
    assert trainer.kl_coef == pytest.approx(0.14)
    return trainer


def test_the_adapted_coefficient_is_used_in_the_reward():
    experience = moved().make_experience(tiny.rollout(), scores=torch.zeros(4))
    torch.testing.assert_close(
        experience.rewards[experience.mask], -0.14 * experience.log_ratio[experience.mask], rtol=1e-4, atol=1e-6
    )


def test_the_adapted_coefficient_is_used_in_the_loss():
    """The gradient's KL part is in proportion to it."""
    trainer = moved(kl_in="loss", kl_estimator="full", max_grad_norm=1e9, vf_coef=0.0, dtype=torch.float64)
    experience = trainer.make_experience(tiny.rollout(), scores=torch.zeros(4))
    assert experience.kl_coef == trainer.kl_coef == pytest.approx(0.14)
    with_none, with_it, twice = (
        tiny.gradient(trainer, replace(experience, kl_coef=factor * experience.kl_coef)) for factor in (0.0, 1.0, 2.0)
    )
    once, again = with_it - with_none, twice - with_it
    assert (once - again).norm() / once.norm() < 1e-4 and once.norm() > 1e-3


def test_coefficient_and_moments_come_back_from_disk(tmp_path):
    trainer = moved(use_score_scaling=True)
    trainer.update(trainer.make_experience(tiny.rollout(), scores=torch.tensor(tiny.SCORES)))
    save.save_tree(tmp_path, trainer.state_dict())
    again = tiny.trainer(adap_kl_ctrl=True, kl_coef=0.1, target=0.5, horizon=2, use_score_scaling=True)
    again.load_state_dict(save.load_tree(tmp_path))
    assert (
        again.kl_coef == trainer.kl_coef and again.score_stats == trainer.score_stats and again.score_stats.count == 8
    )
    rest = [m.make_experience(tiny.rollout(), scores=torch.tensor(tiny.SCORES)) for m in (trainer, again)]
    assert torch.equal(rest[0].rewards, rest[1].rewards) and torch.equal(rest[0].scores, rest[1].scores)
