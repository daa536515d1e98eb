"""Options of the loss and the brakes of an update: values and gradients by hand, by brute force, or bit for bit."""

import math
from dataclasses import replace

import pytest
import tiny
import torch

from rlhf_cli.config.ppo_options import PPOSettings
from rlhf_cli.models import forward
from rlhf_cli.models.batch import Rollout
from rlhf_cli.ppo import losses
from rlhf_cli.ppo.forward_backward import ModelRunner, policy_losses


@pytest.mark.parametrize(
    "changes,ratio,advantage,loss,clipped",
    [
        ({}, math.exp(2), -1.0, math.exp(2), False),
        ({"dual_clip": 3.0}, math.exp(2), -1.0, 3.0, True),
        ({}, 1.5, 1.0, -1.2, True),
        ({"cliprange_high": 0.6}, 1.5, 1.0, -1.5, False),
    ],
)
def test_dual_clip_and_cliprange_high_reach_the_update(changes, ratio, advantage, loss, clipped):
    trainer, experience = tiny.trainer_and_experience(num_ppo_epochs=1, **changes)
    fields = {"logprobs": experience.logprobs - math.log(ratio), "advantages": advantage * experience.mask.float()}
    stats = trainer.update(replace(experience, **fields))
    assert stats["loss/policy_avg"] == pytest.approx(loss, rel=1e-4) and stats["policy/clipfrac_avg"] == clipped
    assert (stats["policy/grad_norm"] == 0.0) is clipped


# The entropy bonus


def test_entropy_gradient_on_three_tokens():
    """dH/dz_j = -p_j (log p_j + H) / T, derived on paper; the loss is minus the coefficient times it."""
    temperature, logits = 0.5, torch.tensor([[0.3, -0.4, 1.1], [0.0, 0.0, 2.0]], dtype=torch.float64)
    rows = Rollout.from_lists([[1]], [[0, 2]])
    old = torch.log_softmax(logits / temperature, -1)[[0, 1], [0, 2]][None]
    tokens = tiny.experience(rows, logprobs=old).gather(rows.micro_batch(torch.arange(1)))  # no advantage
    point = logits.clone().requires_grad_(True)
    settings = PPOSettings(total_episodes=64, temperature=temperature, entropy_coef=0.25)
    loss, metrics = policy_losses(tokens, point, None, 0.05, settings)
    (found,) = torch.autograd.grad(loss.sum(), point)
    for row in range(2):
        p = torch.softmax(logits[row] / temperature, -1).tolist()
        entropy = -sum(x * math.log(x) for x in p)
        expected = [0.25 * x * (math.log(x) + entropy) / temperature for x in p]
        assert found[row].tolist() == pytest.approx(expected, abs=1e-12)
        assert metrics["policy/entropy_avg"][row].item() == pytest.approx(entropy)


def test_entropy_coef_keeps_the_policy_broad():
    after = {}
    for coef in (0.0, 1.0):
        trainer, experience = tiny.trainer_and_experience(
            entropy_coef=coef, learning_rate=3e-3, num_ppo_epochs=8, ratio_threshold=None
        )
        before = trainer.update(replace(experience, advantages=torch.zeros_like(experience.advantages)))[
            "policy/entropy_avg"
        ]
        micro = experience.rollout.micro_batch(torch.arange(4))
        log_probs = losses.log_probs(forward.response_logits(trainer.policy, micro), trainer.settings.temperature)
        after[coef] = float(losses.entropy(log_probs.detach()).mean())
    start = tiny.one_step(learning_rate=0.0)[1]["policy/entropy_avg"]
    assert after[0.0] == pytest.approx(start, rel=1e-5) and after[1.0] > before > 1.1 * start


@pytest.mark.parametrize("what", ["entropy", "full"])
def test_a_token_of_probability_0_leaves_the_gradient_finite(what):
    """Some models give padding rows of their vocabulary a logit of -inf; 0 log 0 is 0, and so is its slope."""
    logits = torch.tensor([[0.5, 0.0, -math.inf]], requires_grad=True)
    other = torch.tensor([[0.0, 0.0, -math.inf]])
    entropy = losses.entropy(losses.log_probs(logits, 1.0))
    found = entropy if what == "entropy" else losses.exact_kl(logits, other, 1.0)
    (slope,) = torch.autograd.grad(found.sum(), logits)
    assert torch.isfinite(slope).all() and slope[0, 2] == 0.0 and slope[0, 0].abs() > 1e-3


# The language-model loss

PTX = [([5, 6], [7, 8, 2]), ([9], [10, 2]), ([4, 11, 12], [3, 3, 5, 6, 2]), ([13], [14, 15, 4, 2])]


@pytest.fixture
def ptx_rows(monkeypatch) -> list[tuple[tuple[int, ...], int]]:
    """The ptx rows of each forward pass: (ids, number of targets), row by row."""
    rows, plain = [], ModelRunner.backward_ptx

    def spy(runner, micro, share):
        for row in range(len(micro.rows)):
            count = int((micro.row_index == row).sum())
            rows.append((tuple(micro.ids[row, : micro.lengths[row]].tolist()), count))
        return plain(runner, micro, share)

    monkeypatch.setattr(ModelRunner, "backward_ptx", spy)
    return rows


def test_ptx_coef_adds_the_gradient_of_the_mean_nll_of_the_sampled_rows(ptx_rows):
    exact = {"dtype": torch.float64, "max_grad_norm": 1e9}
    without = tiny.gradient(*tiny.trainer_and_experience(**exact))
    gained = tiny.gradient(*tiny.trainer_and_experience(ptx_coef=2.5, ptx=PTX, **exact)) - without
    assert len(ptx_rows) == 4, "as many rows as the minibatch has episodes"
    known = {tuple(prompt + completion): len(completion) for prompt, completion in PTX}
    assert all(known[ids] == count for ids, count in ptx_rows)
    model, nll = tiny.causal(seed=3).double(), []
    for ids, count in ptx_rows:
        logits = model(input_ids=torch.tensor([ids])).logits[0, -count - 1 : -1]
        nll.append(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[-count:]), reduction="sum"))
    mean = sum(nll) / sum(count for _, count in ptx_rows)
    expected = torch.cat([g.reshape(-1) for g in torch.autograd.grad(2.5 * mean, list(model.parameters()))])
    torch.testing.assert_close(gained[: len(expected)], expected, rtol=1e-9, atol=1e-12)
    assert gained[len(expected) :].abs().max() == 0.0, "the value model gets no gradient from it"


def test_ptx_rows_depend_only_on_seed_update_and_epoch(ptx_rows):
    """They are keyed by the episode, so that neither minibatches nor micro-batches nor other draws change them."""
    many = [([5], [first, second, 2]) for first in range(3, 16) for second in range(3, 16)]
    sampled = {}
    for minibatches, seed in ((1, 0), (2, 0), (1, 1)):
        ptx_rows.clear()
        trainer, experience = tiny.trainer_and_experience(
            ptx_coef=0.1, ptx=many, num_mini_batches=minibatches, ratio_threshold=None, seed=seed
        )
        torch.rand(7)
        assert trainer.update(experience)["loss/ptx_avg"] > 0.0
        trainer.update(trainer.make_experience(tiny.rollout(), scores=torch.tensor(tiny.SCORES)))
        ids = [ids for ids, _ in ptx_rows]
        sampled[minibatches, seed] = [tuple(sorted(ids[start : start + 4])) for start in range(0, len(ids), 4)]
    assert sampled[1, 0] == sampled[2, 0] != sampled[1, 1]
    assert len(sampled[1, 0]) == len(set(sampled[1, 0])) == 8, "four epochs of two updates"


def test_ptx_loss_falls_as_it_is_trained():
    trainer, experience = tiny.trainer_and_experience(ptx_coef=1.0, ptx=PTX[:1])
    flat = replace(experience, advantages=torch.zeros_like(experience.advantages))
    history = [trainer.update(flat)["loss/ptx_avg"] for _ in range(3)]
    assert history[0] > history[1] > history[2]
    assert "loss/ptx_avg" not in tiny.one_step()[1]


# Early stopping and ratio_threshold


def recorded(**changes):
    """A trainer after an update; the policykl of each of its optimizer steps; its metrics."""
    trainer, experience = tiny.trainer_and_experience(
        learning_rate=3e-3, ratio_threshold=None, **{"num_ppo_epochs": 6, **changes}
    )
    steps, plain = [], trainer._train_minibatch
    trainer._train_minibatch = lambda *args: (steps.append(plain(*args)), steps[-1])[1]
    stats = trainer.update(experience)
    return trainer, [step["policy/policykl"] for step in steps], stats


@pytest.mark.parametrize("minibatches", [1, 2])
def test_early_stopping_ends_the_epochs_after_the_last_minibatch_of_one(minibatches):
    free, steps, stats = recorded(num_mini_batches=minibatches)
    assert stats["policy/epochs"] == 6 and len(steps) == 6 * minibatches
    ends = steps[minibatches - 1 :: minibatches]
    limit = (max(ends[:-1]) + sorted(ends[:-1])[-2]) / 2  # exceeded by one of the first five epochs
    assert limit > 0
    stop = next(epoch for epoch, kl in enumerate(ends, 1) if kl > limit)
    stopped, trainer, stats = recorded(num_mini_batches=minibatches, early_stopping=True, target_kl=limit / 1.5)
    assert 1 < stop < 6 and stats["policy/epochs"] == stop and trainer == steps[: stop * minibatches]
    short, _, _ = recorded(num_ppo_epochs=stop, num_mini_batches=minibatches)
    assert torch.equal(tiny.weights(stopped.policy), tiny.weights(short.policy))
    assert not torch.equal(tiny.weights(stopped.policy), tiny.weights(free.policy))
    assert recorded(early_stopping=True, target_kl=100.0)[2]["policy/epochs"] == 6


def off_by(experience, rows, shift: float = 5.0):
    """The experience with the old log-probs of some rows lowered: their ratios are e^5, about 148."""
    old = experience.logprobs.clone()
    old[rows] -= shift
    return replace(experience, logprobs=old)


@pytest.mark.parametrize("threshold,skipped", [(10.0, 8), (None, 0)])  # two minibatches, four epochs
def test_ratio_threshold_lets_no_weight_change(threshold, skipped):
    trainer, experience = tiny.trainer_and_experience(num_mini_batches=2, ratio_threshold=threshold)
    before = tiny.weights(trainer.policy), tiny.weights(trainer.value)
    stats = trainer.update(off_by(experience, torch.arange(4)))
    assert stats["policy/skipped_minibatches"] == skipped
    assert torch.equal(before[0], tiny.weights(trainer.policy)) is torch.equal(before[1], tiny.weights(trainer.value))
    assert torch.equal(before[0], tiny.weights(trainer.policy)) is bool(skipped)
    assert not skipped or stats["val/ratio"] == pytest.approx(math.exp(5.0), rel=1e-3)


def test_ratio_threshold_skips_the_one_minibatch_that_exceeds_it():
    def after(threshold, *which):
        """An update of one epoch on the minibatches `which`, of which the first one is off."""
        trainer, experience = tiny.trainer_and_experience(
            num_mini_batches=2, num_ppo_epochs=1, ratio_threshold=threshold
        )
        experience = off_by(experience, torch.cat(experience.minibatches[0]))
        return trainer, trainer.update(replace(experience, minibatches=tuple(experience.minibatches[i] for i in which)))

    (trainer, stats), (alone, second) = after(10.0, 0, 1), after(10.0, 1)
    assert stats["policy/skipped_minibatches"] == 1
    assert torch.equal(tiny.weights(trainer.policy), tiny.weights(alone.policy)), "as if it did not exist"
    assert stats["val/ratio"] == second["val/ratio"] == pytest.approx(1.0), "nor is it in the averages"
    assert after(200.0, 0, 1)[1]["policy/skipped_minibatches"] == 0


@pytest.mark.parametrize("threshold,skipped", [(10.0, 1), (20.0, 0)])
def test_ratio_threshold_applies_to_the_mean_ratio(threshold, skipped):
    """One ratio of 148 among eleven: a mean of 14, over 10 and under 20."""
    trainer, experience = tiny.trainer_and_experience(num_ppo_epochs=1, ratio_threshold=threshold)
    old = experience.logprobs.clone()
    old[0, 0] -= 5.0
    stats = trainer.update(replace(experience, logprobs=old))
    assert stats["val/ratio"] == pytest.approx((148.41 + 10) / 11, rel=1e-2)
    assert stats["policy/skipped_minibatches"] == skipped
