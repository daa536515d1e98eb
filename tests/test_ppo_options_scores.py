"""Options of the score and of the KL coefficient: exact values, by hand or by numpy."""

from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch

from rlhf_cli.models import save
from rlhf_cli.models.batch import Rollout
from rlhf_cli.ppo import losses
from rlhf_cli.ppo.scores import RunningMeanStd


def test_overlong_penalty_table():
    """Limit 8, tokens 4, factor 2: free up to 4 tokens, then half a point more a token."""
    lengths = [1, 4, 5, 6, 7, 8]
    rows = Rollout.from_lists([[5]] * 6, [[3] * (n - 1) + [tiny.EOS] for n in lengths], stop_token_id=tiny.EOS)
    free, charged = (
        tiny.trainer(response_length=8, overlong_penalty=penalty).make_experience(rows).scores
        for penalty in (None, {"tokens": 4, "factor": 2.0})
    )
    assert (free - charged).tolist() == pytest.approx([0.0, 0.0, 0.5, 1.0, 1.5, 2.0], abs=1e-6)


def test_overlong_penalty_goes_by_the_length_drawn_for_the_update():
    rows = Rollout.from_lists([[5]], [[3, 4, 2]], stop_token_id=tiny.EOS)
    changes = {"response_length": {"min": 3, "max": 9}, "overlong_penalty": {"tokens": 2, "factor": 1.0}}
    free, charged = tiny.trainer(response_length=changes["response_length"]), tiny.trainer(**changes)
    seen = set()
    for update in range(20):
        free.updates = charged.updates = update
        limit = charged.response_length
        wanted = {3: 1.0, 4: 0.5}.get(limit, 0.0)  # 3 tokens written
        penalty = free.make_experience(rows).scores - charged.make_experience(rows).scores
        assert penalty.item() == pytest.approx(wanted, abs=1e-6)
        seen.add(limit)
    assert {3, 4} < seen


def test_both_penalties_come_after_scaling_and_clip():
    """Row 1 of the four never ends: 9 / spread is clipped to 0.5, and then 1 is taken off."""
    made = tiny.trainer(rewards={"nine": lambda rollout: torch.tensor([1.0, 9.0, 1.0, 1.0])}, score_clip=0.5)
    rows = Rollout.from_lists([[5]] * 4, [[2], [3] * 8, [2], [2]], stop_token_id=tiny.EOS)
    assert made.make_experience(rows).scores.tolist() == pytest.approx([0.5, -0.5, 0.5, 0.5])


# Running moments


def test_merged_moments_are_those_of_all_scores_together():
    draw = np.random.default_rng(0)
    batches = [draw.normal(100.0, 1e-2, size) for size in (1, 7, 64, 3)]  # a mean that swamps a naive sum of squares
    moments, seen = RunningMeanStd(), np.array([])
    for batch in batches:
        moments, seen = moments.updated(torch.tensor(batch)), np.concatenate([seen, batch])
        assert moments.count == len(seen)
        assert moments.mean == pytest.approx(seen.mean(), rel=1e-12)
        assert moments.std == pytest.approx(seen.std(ddof=1) if len(seen) > 1 else 0.0, rel=1e-9)


@pytest.mark.parametrize("norm", [False, True])
def test_use_score_scaling_and_use_score_norm_by_numpy(norm):
    made = tiny.trainer(use_score_scaling=True, use_score_norm=norm, learning_rate=0.0)
    seen = []
    for scores in ([1.0, -1.0, 0.5, 2.0], [10.0, 12.0, 9.0, 11.0], [0.0, 0.0, 0.0, 0.0]):
        judged = made.make_experience(tiny.rollout(), scores=torch.tensor(scores))
        seen += scores
        shift = np.mean(seen) if norm else 0.0
        wanted = (np.array(scores) - shift) / np.std(seen, ddof=1)
        assert judged.scores.tolist() == pytest.approx(wanted.tolist(), abs=1e-5)
        assert judged.score_result.weighted_sum.tolist() == scores
        made.update(judged)


def test_scores_that_never_differed_are_left_as_they_are():
    for norm in (False, True):
        made = tiny.trainer(use_score_scaling=True, use_score_norm=norm)
        for _ in range(3):
            judged = made.make_experience(tiny.rollout(), scores=torch.full((4,), 0.1))
            assert judged.scores.tolist() == pytest.approx([0.1] * 4)
            made.update(judged)


@pytest.mark.parametrize("scaling", [False, True])
def test_score_clip_bounds_what_is_placed(scaling):
    made = tiny.trainer(score_clip=0.75, use_score_scaling=scaling)
    judged = made.make_experience(tiny.rollout(), scores=torch.tensor([8.0, -8.0, 0.25, 0.0]))
    spread = np.std([8.0, -8.0, 0.25, 0.0], ddof=1) if scaling else 1.0
    assert judged.scores.tolist() == pytest.approx([0.75, -0.75, 0.25 / spread, 0.0])
    assert judged.rewards.sum(1).tolist() == pytest.approx(judged.scores.tolist())


def frozen_state(made):
    """Everything that judge could change, copied."""
    state = made.state_dict()
    weights = [tiny.weights(model) for model in (made.policy, made.value, made.ref)]
    return weights, state["moments"], state["updates"], state["kl_coef"], torch.get_rng_state()


def test_judge_changes_nothing_and_update_commits():
    made = tiny.trainer(use_score_scaling=True, adap_kl_ctrl=True)
    before = frozen_state(made)
    judged = made.make_experience(tiny.rollout(), scores=torch.tensor(tiny.SCORES))
    made.make_experience(tiny.rollout(), scores=torch.tensor([100.0, 0.0, 0.0, 0.0]))  # shown, never learned from
    after = frozen_state(made)
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
    assert before[1:4] == after[1:4] and torch.equal(before[4], after[4])
    made.update(judged)
    assert (made.score_stats.count, made.score_stats.mean) == (4, pytest.approx(0.625))
    assert made.score_stats.std == pytest.approx(np.std(tiny.SCORES, ddof=1))


# The adaptive KL coefficient


def with_kl(judged, nats: float):
    """The same experience, with objective/kl set by hand."""
    kl = torch.zeros_like(judged.kl)
    kl[:, 0] = nats
    return replace(judged, kl=kl)


def test_adap_kl_ctrl_by_hand_over_three_updates():
    """target 6, horizon 100, four episodes an update: a factor of 1 + 4/100 x the clipped error.

    12 nats: twice the target, clipped to +0.2. 0 nats: clipped to -0.2. 6.6 nats: +0.1, inside.
    """
    made = tiny.trainer(adap_kl_ctrl=True, kl_coef=0.2, target=6.0, horizon=100)
    coefficients = []
    for nats in (12.0, 0.0, 6.6):
        judged = with_kl(made.make_experience(tiny.rollout(), scores=torch.zeros(4)), nats)
        stats = made.update(judged)
        coefficients.append(made.kl_coef)
        assert stats["objective/kl"] == pytest.approx(nats) and stats["objective/kl_coef"] == judged.kl_coef
    assert coefficients == pytest.approx([0.2016, 0.1999872, 0.2007871488], rel=1e-6)


def test_without_adap_kl_ctrl_the_coefficient_stands():
    made = tiny.trainer(kl_coef=0.2)
    made.update(with_kl(made.make_experience(tiny.rollout(), scores=torch.zeros(4)), 50.0))
    assert made.kl_coef == 0.2


def moved(**changes):
    """A trainer whose controller has raised its coefficient by 4 x 0.2 / 2 = 40 %."""
    made = tiny.trainer(policy_seed=3, adap_kl_ctrl=True, kl_coef=0.1, target=0.5, horizon=2, **changes)
    made.update(with_kl(made.make_experience(tiny.rollout(), scores=torch.zeros(4)), 50.0))
    assert made.kl_coef == pytest.approx(0.14)
    return made


def test_the_adapted_coefficient_is_used_in_the_reward():
    judged = moved().make_experience(tiny.rollout(), scores=torch.zeros(4))
    wanted = -0.14 * (judged.logprobs - judged.ref_logprobs)
    torch.testing.assert_close(judged.rewards[judged.mask], wanted[judged.mask], rtol=1e-4, atol=1e-6)


def test_the_adapted_coefficient_is_used_in_the_loss():
    """The gradient's KL part is in proportion to it."""
    made = moved(kl_in="loss", kl_estimator="full", max_grad_norm=1e9, vf_coef=0.0, dtype=torch.float64)
    judged = made.make_experience(tiny.rollout(), scores=torch.zeros(4))
    assert judged.kl_coef == made.kl_coef == pytest.approx(0.14)
    with_none, with_it, twice = (
        tiny.gradient(made, replace(judged, kl_coef=factor * judged.kl_coef)) for factor in (0.0, 1.0, 2.0)
    )
    once, again = with_it - with_none, twice - with_it
    assert (once - again).norm() / once.norm() < 1e-4 and once.norm() > 1e-3


def test_coefficient_and_moments_come_back_from_disk(tmp_path):
    made = moved(use_score_scaling=True)
    made.update(made.make_experience(tiny.rollout(), scores=torch.tensor(tiny.SCORES)))
    save.save_tree(tmp_path, made.state_dict())
    again = tiny.trainer(adap_kl_ctrl=True, kl_coef=0.1, target=0.5, horizon=2, use_score_scaling=True)
    again.load_state_dict(save.load_tree(tmp_path))
    assert again.kl_coef == made.kl_coef and again.score_stats == made.score_stats and again.score_stats.count == 8
    rest = [m.make_experience(tiny.rollout(), scores=torch.tensor(tiny.SCORES)) for m in (made, again)]
    assert torch.equal(rest[0].rewards, rest[1].rewards) and torch.equal(rest[0].scores, rest[1].scores)


def test_the_controller_steers_towards_its_target():
    """Far above the target the coefficient only grows, far below it only falls."""
    for target, grows in ((1e-6, True), (1e6, False)):
        made = tiny.trainer(adap_kl_ctrl=True, target=target, horizon=100, policy_seed=3)
        history = [made.step(tiny.prompts(seed=step))["objective/kl_coef"] for step in range(4)]
        assert history == sorted(history, reverse=not grows) and history[0] != history[-1]


def test_a_formula_of_whose_sign_there_is_no_doubt():
    up, down = (losses.adapt_kl_coef(1.0, kl, target=2.0, episodes=10, horizon=100) for kl in (9.0, 0.1))
    assert up == pytest.approx(1.02) and down == pytest.approx(0.98)
