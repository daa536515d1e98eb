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


def surrogate(ratio: float, advantage: float, **options):
    """(loss, clipped, slope) of one token; the slope is d loss / d logprob."""
    logprob = torch.tensor([math.log(ratio) - 1.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.0], dtype=torch.float64)
    loss, _, clipped = losses.policy_loss(logprob, old, torch.tensor([advantage], dtype=torch.float64), **options)
    loss.sum().backward()
    return loss.item(), clipped.item(), logprob.grad.item()


@pytest.mark.parametrize(
    "ratio,advantage,loss,clipped,slope",
    [  # cliprange 0.2, cliprange_high 0.5
        (1.4, 2.0, -2.8, False, -2.8),  # cliprange alone would have clipped it at 1.2
        (1.6, 2.0, -3.0, True, 0.0),
        (1.6, -2.0, 3.2, False, 3.2),
        (0.7, -2.0, 1.6, True, 0.0),  # below 1 the other bound holds
        (0.7, 2.0, -1.4, False, -1.4),
        (0.85, -2.0, 1.7, False, 1.7),
    ],
)
def test_cliprange_high_quadrants(ratio, advantage, loss, clipped, slope):
    found = surrogate(ratio, advantage, cliprange=0.2, cliprange_high=0.5)
    assert found == (pytest.approx(loss), clipped, pytest.approx(slope))


@pytest.mark.parametrize(
    "ratio,advantage,loss,clipped,slope",
    [  # cliprange 0.2, dual_clip 3
        (5.0, -2.0, 6.0, True, 0.0),  # the ceiling: 3 x 2, where it was 10
        (2.9, -2.0, 5.8, False, 5.8),  # under it
        (5.0, 2.0, -2.4, True, 0.0),  # a good token knows no ceiling, but the usual clip
        (0.5, -2.0, 1.6, True, 0.0),
        (0.5, 2.0, -1.0, False, -1.0),
        (5.0, 0.0, 0.0, False, 0.0),
    ],
)
def test_dual_clip_quadrants(ratio, advantage, loss, clipped, slope):
    found = surrogate(ratio, advantage, cliprange=0.2, dual_clip=3.0)
    assert found == (pytest.approx(loss), clipped, pytest.approx(slope))


def far_off(judged, shift: float = 2.0):
    """The same experience, its old log-probs lower: every ratio is e^shift, about 7.4, and every advantage -1."""
    return replace(judged, logprobs=judged.logprobs - shift, advantages=-judged.mask.float())


def test_dual_clip_and_cliprange_high_reach_the_update():
    """Bad tokens that have become much likelier: a ceiling leaves the policy no gradient at all."""
    plain, capped = tiny.judged(num_ppo_epochs=1), tiny.judged(num_ppo_epochs=1, dual_clip=3.0)
    a, b = (made.update(far_off(judged)) for made, judged in (plain, capped))
    assert a["policy/grad_norm"] > 0.0 and b["policy/grad_norm"] == 0.0
    assert a["loss/policy_avg"] == pytest.approx(math.exp(2.0), rel=1e-4)
    assert b["loss/policy_avg"] == pytest.approx(3.0) and b["policy/clipfrac_avg"] == 1.0
    clipped = []
    for high in (None, 0.6):
        made, judged = tiny.judged(num_ppo_epochs=1, cliprange_high=high)
        good = replace(judged, logprobs=judged.logprobs - math.log(1.5), advantages=judged.mask.float())
        clipped.append(made.update(good))
    assert [stats["policy/clipfrac_avg"] for stats in clipped] == [1.0, 0.0]
    assert [stats["loss/policy_avg"] for stats in clipped] == pytest.approx([-1.2, -1.5], rel=1e-4)


# The entropy bonus


def test_entropy_gradient_on_three_tokens():
    """dH/dz_j = -p_j (log p_j + H) / T, worked out on paper; the loss is minus the coefficient times it."""
    temperature, logits = 0.5, torch.tensor([[0.3, -0.4, 1.1], [0.0, 0.0, 2.0]], dtype=torch.float64)
    rows = Rollout.from_lists([[1]], [[0, 2]])
    old = torch.log_softmax(logits / temperature, -1)[[0, 1], [0, 2]][None]
    made = tiny.experience(rows, logprobs=old)  # no advantage, so no other gradient
    point = logits.clone().requires_grad_(True)
    settings = PPOSettings(total_episodes=64, temperature=temperature, entropy_coef=0.25)
    parts = policy_losses(made.gather(rows.micro_batch(torch.arange(1))), point, None, made.kl_coef, settings)
    (found,) = torch.autograd.grad(parts.loss.sum(), point)
    for row in range(2):
        weights = [math.exp(x / temperature) for x in logits[row].tolist()]
        p = [w / sum(weights) for w in weights]
        entropy = -sum(x * math.log(x) for x in p)
        wanted = [0.25 * x * (math.log(x) + entropy) / temperature for x in p]
        assert found[row].tolist() == pytest.approx(wanted, abs=1e-12)
        assert parts.metrics["policy/entropy_avg"][row].item() == pytest.approx(entropy)


def test_entropy_coef_keeps_the_policy_broad():
    quiet = {"learning_rate": 3e-3, "num_ppo_epochs": 8, "ratio_threshold": None}
    after = {}
    for coef in (0.0, 1.0):
        made, judged = tiny.judged(entropy_coef=coef, **quiet)
        before = made.update(replace(judged, advantages=torch.zeros_like(judged.advantages)))["policy/entropy_avg"]
        micro = judged.rollout.micro_batch(torch.arange(4))
        log_probs = losses.log_probs(forward.response_logits(made.policy, micro), made.settings.temperature)
        after[coef] = float(losses.entropy(log_probs.detach()).mean())
    start = tiny.one_step(learning_rate=0.0)[1]["policy/entropy_avg"]
    assert after[0.0] == pytest.approx(start, rel=1e-5) and after[1.0] > before > 1.1 * start


@pytest.mark.parametrize("what", ["entropy", "full"])
def test_a_token_the_model_rules_out_leaves_the_gradient_finite(what):
    """Some models give padding rows of their vocabulary a logit of -inf; 0 log 0 is 0, and so is its slope."""
    logits = torch.tensor([[0.5, 0.0, -math.inf]], requires_grad=True)
    if what == "entropy":
        found = losses.entropy(losses.log_probs(logits, 1.0))
    else:
        found = losses.exact_kl(logits, torch.tensor([[0.0, 0.0, -math.inf]]), 1.0)
    (slope,) = torch.autograd.grad(found.sum(), logits)
    assert torch.isfinite(slope).all() and slope[0, 2] == 0.0 and slope[0, 0].abs() > 1e-3


# The language-model loss


PTX = [([5, 6], [7, 8, 2]), ([9], [10, 2]), ([4, 11, 12], [3, 3, 5, 6, 2]), ([13], [14, 15, 4, 2])]


def drawn(monkeypatch) -> list:
    """The ptx rows of each forward pass as they are read: (ids, number of targets), row by row."""
    seen, plain = [], ModelRunner.backward_ptx

    def spy(passes, micro, share):
        for place in range(len(micro.rows)):
            count = int((micro.row_index == place).sum())
            seen.append((tuple(micro.ids[place, : micro.lengths[place]].tolist()), count))
        return plain(passes, micro, share)

    monkeypatch.setattr(ModelRunner, "backward_ptx", spy)
    return seen


def test_ptx_coef_adds_the_gradient_of_the_mean_nll_of_the_drawn_rows(monkeypatch):
    seen = drawn(monkeypatch)
    exact = {"dtype": torch.float64, "max_grad_norm": 1e9}
    plain, judged = tiny.judged(**exact)
    without = tiny.gradient(plain, judged)
    made, judged = tiny.judged(ptx_coef=2.5, ptx=PTX, **exact)
    gained = tiny.gradient(made, judged) - without
    assert len(seen) == 4, "as many rows as the minibatch has episodes"
    known = {tuple(prompt + completion): len(completion) for prompt, completion in PTX}
    assert all(known[ids] == count for ids, count in seen)
    model = tiny.causal(seed=3).double()
    nll = []
    for ids, count in seen:
        logits = model(input_ids=torch.tensor([ids])).logits[0, -count - 1 : -1]
        nll.append(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[-count:]), reduction="sum"))
    mean = sum(nll) / sum(count for _, count in seen)
    wanted = torch.autograd.grad(2.5 * mean, list(model.parameters()))
    policy = gained[: sum(g.numel() for g in wanted)]
    torch.testing.assert_close(policy, torch.cat([g.reshape(-1) for g in wanted]), rtol=1e-9, atol=1e-12)
    assert gained[len(policy) :].abs().max() == 0.0, "the value model learns nothing from it"


def test_ptx_rows_are_drawn_by_seed_and_update_alone(monkeypatch):
    seen = drawn(monkeypatch)
    draws = {}
    for name, changes in {"one": {}, "again": {}, "other": {"seed": 1}}.items():
        seen.clear()
        made, judged = tiny.judged(ptx_coef=1.0, ptx=PTX, num_mini_batches=2, num_ppo_epochs=3, **changes)
        torch.rand(7)
        stats = made.update(judged)
        assert stats["loss/ptx_avg"] > 0.0
        draws[name] = [ids for ids, _ in seen]
    assert draws["one"] == draws["again"] != draws["other"]
    assert len(draws["one"]) == 4 * 3 and len(set(draws["one"])) > 1


def test_each_epoch_and_update_draws_ptx_rows_of_its_own_however_it_is_cut(monkeypatch):
    """Keyed by the episode, so that neither minibatches nor micro-batches change a draw."""
    seen, many = drawn(monkeypatch), [([5], [first, second, 2]) for first in range(3, 16) for second in range(3, 16)]
    found = {}
    for minibatches in (1, 2):
        seen.clear()
        made, judged = tiny.judged(ptx_coef=0.1, ptx=many, num_mini_batches=minibatches, ratio_threshold=None)
        made.update(judged)
        made.update(made.make_experience(tiny.rollout(), scores=torch.tensor(tiny.SCORES)))
        ids = [ids for ids, _ in seen]
        found[minibatches] = [sorted(ids[start : start + 4]) for start in range(0, len(ids), 4)]
    assert found[1] == found[2] and len(found[1]) == 8
    assert len({tuple(epoch) for epoch in found[1]}) == 8, "four epochs of two updates"


@pytest.mark.parametrize("dtype,limit", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_ptx_gradient_is_the_same_for_any_micro_batching(dtype, limit):
    grads = []
    for rows, parts, tokens in ((8, 1, "auto"), (1, 8, "auto"), (4, 2, 9)):
        sizes = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": parts}
        made, judged = tiny.judged(
            dtype=dtype, ptx_coef=1.0, ptx=PTX, max_grad_norm=1e9, micro_batch_tokens=tokens, **sizes
        )
        grads.append(tiny.gradient(made, judged))
    for other in grads[1:]:
        assert (grads[0] - other).norm() / grads[0].norm() <= limit


def test_ptx_loss_falls_as_it_is_trained():
    made, judged = tiny.judged(ptx_coef=1.0, ptx=PTX[:1])
    flat = replace(judged, advantages=torch.zeros_like(judged.advantages))
    history = [made.update(flat)["loss/ptx_avg"] for _ in range(3)]
    assert history[0] > history[1] > history[2]
    assert "loss/ptx_avg" not in tiny.one_step()[1]


# Brakes


def recorded(**changes):
    """A trainer after an update; the policykl of each of its optimizer steps; its metrics."""
    made, judged = tiny.judged(learning_rate=3e-3, num_ppo_epochs=6, ratio_threshold=None, **changes)
    seen, plain = [], made._train_minibatch
    made._train_minibatch = lambda *given: (seen.append(plain(*given)), seen[-1])[1]
    stats = made.update(judged)
    return made, [step["policy/policykl"] for step in seen], stats


@pytest.mark.parametrize("minibatches", [1, 2])
def test_early_stopping_ends_the_epochs_after_the_last_minibatch_of_one(minibatches):
    free, steps, stats = recorded(num_mini_batches=minibatches)
    assert stats["policy/epochs"] == 6 and len(steps) == 6 * minibatches
    ends = steps[minibatches - 1 :: minibatches]
    limit = (max(ends[:-1]) + sorted(ends[:-1])[-2]) / 2  # passed by one epoch of the first five alone
    assert limit > 0
    stop = next(epoch for epoch, kl in enumerate(ends, 1) if kl > limit)
    braked, made, stats = recorded(num_mini_batches=minibatches, early_stopping=True, target_kl=limit / 1.5)
    assert 1 < stop < 6 and stats["policy/epochs"] == stop and made == steps[: stop * minibatches]
    short, judged = tiny.judged(
        learning_rate=3e-3, num_ppo_epochs=stop, num_mini_batches=minibatches, ratio_threshold=None
    )
    short.update(judged)
    assert torch.equal(tiny.weights(braked.policy), tiny.weights(short.policy))
    assert not torch.equal(tiny.weights(braked.policy), tiny.weights(free.policy))


def test_a_target_kl_out_of_reach_stops_nothing():
    assert recorded(early_stopping=True, target_kl=100.0)[2]["policy/epochs"] == 6


def off_by(judged, rows, shift: float = 5.0):
    """The experience with the old log-probs of some rows lowered: their ratios are e^5, about 148."""
    old = judged.logprobs.clone()
    old[rows] -= shift
    return replace(judged, logprobs=old)


def test_ratio_threshold_lets_no_weight_change():
    made, judged = tiny.judged(num_mini_batches=2)
    before = tiny.weights(made.policy), tiny.weights(made.value)
    stats = made.update(off_by(judged, torch.arange(4)))
    assert stats["policy/skipped_minibatches"] == 8  # two minibatches, four epochs
    assert torch.equal(before[0], tiny.weights(made.policy)) and torch.equal(before[1], tiny.weights(made.value))
    assert stats["val/ratio"] == pytest.approx(math.exp(5.0), rel=1e-3)
    made, judged = tiny.judged(num_mini_batches=2, ratio_threshold=None)
    stats = made.update(off_by(judged, torch.arange(4)))
    assert stats["policy/skipped_minibatches"] == 0 and not torch.equal(before[0], tiny.weights(made.policy))


def test_ratio_threshold_skips_the_one_minibatch_that_passes_it():
    def after(threshold, *which):
        """An update of one epoch on the minibatches `which` of a plan whose first one is off."""
        made, judged = tiny.judged(num_mini_batches=2, num_ppo_epochs=1, ratio_threshold=threshold)
        judged = off_by(judged, torch.cat(judged.minibatches[0]))
        return made, made.update(replace(judged, minibatches=tuple(judged.minibatches[i] for i in which)))

    (made, stats), (alone, second) = after(10.0, 0, 1), after(10.0, 1)
    assert stats["policy/skipped_minibatches"] == 1
    assert torch.equal(tiny.weights(made.policy), tiny.weights(alone.policy)), "as if it had not been there"
    assert stats["val/ratio"] == second["val/ratio"] == pytest.approx(1.0), "nor in the averages"
    assert after(200.0, 0, 1)[1]["policy/skipped_minibatches"] == 0


def test_ratio_threshold_goes_by_the_mean_not_by_one_token():
    """One ratio of 148 among eleven: a mean of 14, over 10 and under 20."""
    for threshold, skipped in ((10.0, 1), (20.0, 0)):
        made, judged = tiny.judged(num_ppo_epochs=1, ratio_threshold=threshold)
        old = judged.logprobs.clone()
        old[0, 0] -= 5.0
        stats = made.update(replace(judged, logprobs=old))
        assert stats["val/ratio"] == pytest.approx((148.41 + 10) / 11, rel=1e-2)
        assert stats["policy/skipped_minibatches"] == skipped
