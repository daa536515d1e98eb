"""Formulas by worked tables, brute force, identities, and numerical gradients in float64 on each branch.

Nothing here recomputes a formula the way the code does. Where a factor is fixed on purpose (the importance ratio of the
KL loss, k3's value), it is fixed in the numerical gradient as well. Points stay clear of the kinks.
"""

import math
from dataclasses import replace
from itertools import chain, product

import pytest
import tiny
import torch
from torch.autograd import gradcheck

from rlhf_cli.config.ppo import RolloutCorrection
from rlhf_cli.models.batch import Prompts, Rollout
from rlhf_cli.ppo import losses
from rlhf_cli.ppo.experience import estimate_advantages
from rlhf_cli.ppo.forward_backward import policy_loss_and_metrics

NAN = float("nan")


def double(*values: float, grad: bool = False) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Masks, rewards, whitening


def test_response_mask_table():
    ids = torch.tensor([[5, 2, 7, 2], [2, 5, 5, 5], [5, 6, 7, 8]])
    expected = [[True, True, False, False], [True, False, False, False], [True] * 4]
    assert losses.response_mask(ids, 2).tolist() == expected
    assert losses.response_mask(ids, None).all()
    assert losses.response_mask(ids, [7, 2]).tolist() == [*expected[:2], [True, True, True, False]]


def test_score_lands_on_the_last_real_token():
    mask = torch.tensor([[True, True, False], [True, True, True], [False, True, False]])
    penalty = torch.tensor([[0.1, 0.2, NAN], [0.1, 0.2, 0.3], [NAN, 0.5, NAN]])
    rewards = losses.compute_token_rewards(torch.tensor([1.0, 2.0, 3.0]), penalty, mask)
    torch.testing.assert_close(rewards, torch.tensor([[-0.1, 0.8, 0.0], [-0.1, -0.2, 1.7], [0.0, 2.5, 0.0]]))


def test_whitening_by_hand():
    x = torch.tensor([[1.0, 3.0, NAN], [5.0, NAN, NAN]])  # mean 3, unbiased variance 4
    mask = torch.tensor([[True, True, False], [True, False, False]])
    torch.testing.assert_close(losses.masked_whiten(x, mask), torch.tensor([[-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]))
    unshifted = losses.masked_whiten(x, mask, shift_mean=False)
    torch.testing.assert_close(unshifted, torch.tensor([[2.0, 3.0, 0.0], [4.0, 0.0, 0.0]]))
    assert losses.masked_mean(x, mask) == 3.0 and losses.masked_var(x, mask) == 4.0
    assert losses.masked_var(x, mask, unbiased=False) == pytest.approx(8 / 3)


def test_explained_variance():
    returns, mask = torch.tensor([[1.0, 2.0, 3.0, NAN]]), torch.tensor([[True, True, True, False]])
    rounded = 3.0 + torch.tensor([[0.0, 2.4e-7, 0.0, 2.4e-7]])  # equal but for the last bit of float32
    assert rounded.unique().numel() == 2
    for values, target, expected in (
        (returns, returns, 1.0),
        (torch.full_like(returns, 2.0), returns, 0.0),
        (torch.tensor([[3.0, 2.0, 1.0, 0.0]]), returns, -3.0),
        (returns, torch.ones_like(returns), 0.0),
        (returns, rounded, 0.0),
    ):
        assert losses.explained_variance(values, target, mask) == pytest.approx(expected)


# Advantages


@pytest.mark.parametrize("gamma,lam", [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.99, 0.0)])
def test_gae_against_the_double_sum(gamma, lam):
    """A_t = sum_l (gamma lam)^l delta_{t+l}, as the double sum it is."""
    lengths = [6, 1, 4]
    mask = torch.tensor([[t < n for t in range(6)] for n in lengths])
    rewards, values = (normal(3, 6, seed=seed).masked_fill(~mask, NAN) for seed in (1, 2))
    advantages, returns = losses.gae(rewards, values, mask, gamma, lam)
    for row, n in enumerate(lengths):
        r, v = rewards[row, :n].tolist(), [*values[row, :n].tolist(), 0.0]
        delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(n)]
        expected = [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)]
        torch.testing.assert_close(advantages[row, :n], double(*expected))
        torch.testing.assert_close(returns[row, :n], advantages[row, :n] + values[row, :n])
        assert (advantages[row, n:] == 0).all() and (returns[row, n:] == 0).all()


def test_gae_with_a_hole_skips_the_token():
    """A token that does not count, such as a tool's output, has no effect."""
    mask, full = torch.tensor([[True, False, True]]), torch.ones(1, 2, dtype=torch.bool)
    advantages, _ = losses.gae(torch.tensor([[1.0, NAN, 2.0]]), torch.tensor([[0.5, NAN, 0.25]]), mask, 1.0, 0.5)
    dense, _ = losses.gae(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5, 0.25]]), full, 1.0, 0.5)
    assert advantages[0, [0, 2]].tolist() == dense[0].tolist() and advantages[0, 1] == 0


# Clipped losses

HIGH, DUAL = {"cliprange_high": 0.5}, {"dual_clip": 3.0}


@pytest.mark.parametrize(
    "options,ratio,advantage,loss,clipped,slope",
    [  # cliprange 0.2; slope = d loss / d logprob
        ({}, 1.5, 2.0, -2.4, True, 0.0),  # too far up on a good token: clipped, no gradient
        ({}, 1.5, -2.0, 3.0, False, 3.0),  # up on a bad token: full gradient back
        ({}, 0.5, 2.0, -1.0, False, -1.0),  # down on a good token: full gradient back
        ({}, 0.5, -2.0, 1.6, True, 0.0),  # down enough on a bad token: clipped
        ({}, 1.0, 2.0, -2.0, False, -2.0),
        (HIGH, 1.4, 2.0, -2.8, False, -2.8),  # cliprange would have clipped it at 1.2
        (HIGH, 1.6, 2.0, -3.0, True, 0.0),
        (HIGH, 1.6, -2.0, 3.2, False, 3.2),
        (HIGH, 0.7, -2.0, 1.6, True, 0.0),  # below 1 the other bound applies
        (HIGH, 0.7, 2.0, -1.4, False, -1.4),
        (HIGH, 0.85, -2.0, 1.7, False, 1.7),
        (DUAL, 5.0, -2.0, 6.0, True, 0.0),  # the ceiling, 3 x 2; 10 without it
        (DUAL, 2.9, -2.0, 5.8, False, 5.8),  # below the ceiling
        (DUAL, 5.0, 2.0, -2.4, True, 0.0),  # a good token has no ceiling, only the usual clip
        (DUAL, 0.5, -2.0, 1.6, True, 0.0),
        (DUAL, 0.5, 2.0, -1.0, False, -1.0),
        (DUAL, 5.0, 0.0, 0.0, False, 0.0),
        (HIGH | DUAL, 1.4, 2.0, -2.8, False, -2.8),
        (HIGH | DUAL, 5.0, -2.0, 6.0, True, 0.0),
    ],
)
def test_policy_loss_quadrants(options, ratio, advantage, loss, clipped, slope):
    logprob = double(math.log(ratio) - 1.0, grad=True)
    got, got_ratio, got_clipped = losses.policy_loss(logprob, double(-1.0), double(advantage), 0.2, **options)
    got.sum().backward()
    assert (got.item(), got_ratio.item()) == pytest.approx((loss, ratio)) and got_clipped.item() is clipped
    assert logprob.grad.item() == pytest.approx(slope)


@pytest.mark.parametrize(
    "value,old,target,loss,clipped",
    [
        (1.0, 0.9, 2.0, 0.5, False),  # inside the range
        (2.0, 0.0, 3.0, 0.5 * 2.8**2, True),  # too far towards the target: the loss is that of 0.2
        (2.0, 0.0, -1.0, 0.5 * 9.0, False),  # away from the target: the loss is that of the value
        (-0.15, 0.0, 3.0, 0.5 * 3.15**2, False),
    ],
)
def test_value_loss_by_hand(value, old, target, loss, clipped):
    point = double(value, grad=True)
    got, got_clipped = losses.value_loss(point, double(old), double(target), 0.2)
    assert got.item() == pytest.approx(loss, rel=1e-6) and got_clipped.item() is clipped
    assert gradcheck(lambda v: losses.value_loss(v, double(old), double(target), 0.2)[0], (point,))
    (slope,) = torch.autograd.grad(got.sum(), point)
    assert slope.item() == (0.0 if clipped else pytest.approx(value - target))


# Log-probs and entropy


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_log_probs_entropy_and_exact_kl_have_their_numerical_gradients(temperature):
    logits, ref, ids = normal(5, 3).requires_grad_(True), normal(5, 3, seed=1), torch.tensor([0, 2, 1, 1, 1])
    assert gradcheck(lambda x: losses.token_logprobs(x, ids, temperature), (logits,))
    assert gradcheck(lambda x: losses.entropy(losses.log_probs(x, temperature)), (logits,))
    assert gradcheck(lambda x: losses.exact_kl(x, ref, temperature), (logits,))


def test_token_logprobs_and_entropy():
    logits = torch.tensor([[0.0, 0.0, 0.0], [2.0, 0.0, -math.inf], [1000.0, 0.0, -1000.0]])
    logprobs = losses.token_logprobs(logits, torch.tensor([1, 0, 0]), temperature=2.0)
    entropy = losses.entropy(losses.log_probs(logits, temperature=2.0))
    p = 1 / (1 + math.exp(-1.0))
    assert logprobs.tolist() == pytest.approx([-math.log(3), math.log(p), 0.0], abs=1e-6)
    assert entropy.tolist() == pytest.approx([math.log(3), -p * math.log(p) - (1 - p) * math.log(1 - p), 0.0], abs=1e-6)
    assert (entropy >= 0).all()
    logits, ids = normal(4, 50).bfloat16(), torch.tensor([1, 2, 3, 4])
    expected = torch.log_softmax(logits.double() / 0.7, -1).gather(-1, ids[:, None])[:, 0]
    got = losses.token_logprobs(logits, ids, 0.7)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("what", ["entropy", "full"])
def test_a_token_of_probability_0_leaves_the_gradient_finite(what):
    """Some models give padding rows of their vocabulary a logit of -inf; 0 log 0 is 0, and so is its slope."""
    logits = torch.tensor([[0.5, 0.0, -math.inf]], requires_grad=True)
    other = torch.tensor([[0.0, 0.0, -math.inf]])
    entropy = losses.entropy(losses.log_probs(logits, 1.0))
    found = entropy if what == "entropy" else losses.exact_kl(logits, other, 1.0)
    (slope,) = torch.autograd.grad(found.sum(), logits)
    assert torch.isfinite(slope).all() and slope[0, 2] == 0.0 and slope[0, 0].abs() > 1e-3


# KL: a vocabulary of three tokens, over which everything can be summed exactly.

PI, REF = double(0.7, 0.2, 0.1), double(0.2, 0.3, 0.5)
EXACT = float((PI * (PI / REF).log()).sum())


@pytest.mark.parametrize("kind,unbiased", [("k1", True), ("k3", True), ("k2", False), ("abs", False)])
def test_kl_estimators_in_expectation(kind, unbiased):
    expected = float((PI * losses.token_kl(PI.log(), REF.log(), kind)).sum())
    assert (abs(expected - EXACT) < 1e-12) is unbiased
    assert float(losses.exact_kl(PI.log()[None], REF.log()[None], 1.0)) == pytest.approx(EXACT, abs=1e-6)
    logprobs = normal(5).requires_grad_(True)
    assert gradcheck(lambda x: losses.token_kl(x, normal(5, seed=1), kind), (logprobs,))


def test_estimators_by_hand():
    r = math.log(0.5 / 0.1)  # token 2: ref .5, pi .1
    for kind, value in {"k1": -r, "k2": r * r / 2, "k3": 5.0 - 1.0 - r, "abs": r}.items():
        assert float(losses.token_kl(PI.log()[2], REF.log()[2], kind)) == pytest.approx(value)
    one, other = torch.tensor([[1.0, 0.0, -math.inf]]), torch.tensor([[0.0, 0.0, -math.inf]])
    p = 1 / (1 + math.exp(-2.0))
    expected = p * math.log(p / 0.5) + (1 - p) * math.log((1 - p) / 0.5)
    assert float(losses.exact_kl(one, other, 0.5)) == pytest.approx(expected, abs=1e-6)
    assert losses.approx_kl(torch.tensor([1.0]), torch.tensor([0.6])).item() == pytest.approx(0.08)


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_kl_loss_with_its_fixed_factors(kind):
    """pi / pi_old is fixed; k3 has k2's slope: -(pi / pi_old) r at each token."""
    logprobs, old, ref = (normal(5, seed=seed, scale=0.5) for seed in range(3))
    point = logprobs.clone().requires_grad_(True)
    (found,) = torch.autograd.grad(losses.token_kl_loss(point, old, ref, kind).sum(), point)
    fixed, h, r = (logprobs - old).exp(), 1e-6, ref - logprobs
    torch.testing.assert_close(found, fixed * (((r - h) ** 2 - (r + h) ** 2) / (4 * h)), rtol=1e-6, atol=1e-8)
    value = {"k2": r**2 / 2, "k3": r.exp() - 1 - r}[kind]
    torch.testing.assert_close(losses.token_kl_loss(logprobs, old, ref, kind), fixed * value)


# Corrections of the rollout


RATIOS = [[2.0, 0.5], [4.0], [0.5, 5.0, 0.8]]  # probability of each token in the training over that in the engine
BY_HAND = {
    "token_truncate": ([[2, 0.5, 0], [3, 0, 0], [0.5, 3, 0.8]], [False, False, True, False, True, False], 9.8 / 6),
    "sequence_mask": ([[1, 1, 0], [0, 0, 0], [2, 2, 2]], [False, True, False], 8 / 6),
}
MODES = pytest.mark.parametrize("mode", BY_HAND)


@MODES
def test_weights_by_hand(mode):
    """With the default cap, 3. Padding has no effect, and an engine without log-probs is refused."""
    rows = Rollout.from_lists([[1]] * 3, [[5] * len(row) for row in RATIOS])
    drawn, ours = torch.full((3, 3), math.nan), torch.full((3, 3), -1.5)
    drawn[rows.response_mask] = -1.5 - torch.tensor([*chain(*RATIOS)]).log()
    with pytest.raises(ValueError, match="rollout_correction needs the engine's log-probs"):
        tiny.experience(rows, logprobs=ours).corrected(RolloutCorrection(mode=mode))
    found = tiny.experience(replace(rows, logprobs=drawn), logprobs=ours).corrected(RolloutCorrection(mode=mode))
    weights, capped, mean = BY_HAND[mode]
    torch.testing.assert_close(found.weights, torch.tensor(weights).float())
    metrics = found.metrics(kl_in_reward=True)
    assert found.capped.tolist() == capped and metrics["rollout/correction_mean"] == pytest.approx(mean)
    assert metrics["rollout/correction_capped"] == pytest.approx(sum(capped) / len(capped))


# Responses of one or two tokens out of three, drawn from OFF where the policy is ON: sums over all responses.

ON, OFF, NO_CAP = [0.7, 0.2, 0.1], [0.4, 0.4, 0.2], 1e9


def of_responses(probabilities, length):
    return [math.prod(each) for each in product(probabilities, repeat=length)]


# mass: the probability times the weight of each response
@pytest.mark.parametrize("mode,length,cap,mass", [
    (None, 2, None, of_responses(OFF, 2)),
    ("token_truncate", 1, NO_CAP, ON),
    ("token_truncate", 1, 1.5, [0.6, 0.2, 0.1]),
    ("sequence_mask", 2, NO_CAP, of_responses(ON, 2)),
    ("sequence_mask", 2, 3.0, [0.0, *of_responses(ON, 2)[1:]]),  # 1.75^2 = 3.0625
])  # fmt: skip
def test_the_expected_gradient_is_that_of_the_policys_own_responses(mode, length, cap, mass):
    responses, on, off = list(product(range(3), repeat=length)), torch.tensor(ON).double(), torch.tensor(OFF).double()
    advantages = torch.randn(len(responses), length, generator=torch.Generator().manual_seed(0)).double()
    rows = replace(Rollout.from_lists([[1]] * len(responses), responses), logprobs=off.log()[torch.tensor(responses)])
    experience = tiny.experience(rows, logprobs=on.log()[torch.tensor(responses)], advantages=advantages)
    experience = experience.corrected(mode and RolloutCorrection(mode=mode, cap=cap))
    tokens, logits = experience.token_batch(rows.micro_batch(torch.arange(len(rows)))), on.log().requires_grad_(True)
    settings, each = tiny.settings(temperature=1.0), logits.expand(len(rows) * length, 3)
    loss, _ = policy_loss_and_metrics(tokens, each, None, 0.0, settings)
    sampled = torch.tensor(of_responses(OFF, length)).double().repeat_interleave(length)
    (found,) = torch.autograd.grad((sampled * loss).sum(), logits)

    def slope(masses):  # of sum_y mass(y) sum_t -A_t log pi(y_t) by the logits: d log pi(v) = [v] - pi
        pairs = [(row, t, token) for row, response in enumerate(responses) for t, token in enumerate(response)]
        return sum(masses[row] * -advantages[row, t] * (torch.eye(3)[token] - on) for row, t, token in pairs)

    torch.testing.assert_close(found, slope(mass), rtol=0, atol=1e-6)
    assert bool((found - slope(of_responses(ON, length))).abs().max() < 1e-6) is (cap == NO_CAP)


def updated(shift, **changes):
    """The policy before an update on rows whose engine had its log-probs less `shift`; the trainer; the metrics."""
    options = {"policy_seed": 3, "learning_rate": 3e-3, "num_mini_batches": 2, "ratio_threshold": None}
    drawn = replace(tiny.rollout(), logprobs=tiny.trainer_and_experience(**options)[1].logprobs - shift)
    trainer = tiny.trainer(**options, max_logprob_gap=9.0, **changes)
    before, experience = tiny.weights(trainer.policy), trainer.make_experience(drawn, scores=torch.tensor(tiny.SCORES))
    return before, trainer, trainer.update(experience)


@pytest.mark.full
@MODES
def test_with_equal_log_probs_the_update_is_that_without_the_option(mode):
    (_, plain, expected), (_, ours, found) = updated(0.0), updated(0.0, rollout_correction={"mode": mode})
    assert {**expected, "rollout/correction_mean": 1.0, "rollout/correction_capped": 0.0} == found
    assert torch.equal(tiny.weights(plain.policy), tiny.weights(ours.policy))


@pytest.mark.full
def test_only_the_surrogate_is_weighted():
    """All rows are masked: the policy does not move without other terms; the value model learns as ever."""
    masked = {"rollout_correction": {"mode": "sequence_mask", "cap": 1.1}}
    (_, plain, _), (before, ours, stats) = updated(0.0), updated(1.0, **masked)
    assert stats["rollout/correction_capped"] == 1.0 and stats["loss/policy_avg"] == 0.0 < stats["loss/value_avg"]
    assert torch.equal(tiny.weights(ours.policy), before) and not torch.equal(tiny.weights(plain.policy), before)
    assert torch.equal(tiny.weights(ours.value), tiny.weights(plain.value))
    for term in ({"kl_in": "loss", "kl_estimator": "full"}, {"entropy_coef": 0.1}):
        assert not torch.equal(tiny.weights(updated(1.0, **masked, **term)[1].policy), before)


# Advantages of groups


def test_a_value_model_has_the_estimator_of_its_setting(monkeypatch):
    monkeypatch.setitem(losses.VALUE_ADVANTAGES, "own", lambda rewards, values, *_: (rewards + 1, values))
    rewards, values = torch.rand(4, 5), torch.rand(4, 5)
    settings = tiny.settings(advantage_norm="none").model_copy(update={"advantage": "own"})
    advantages, returns, scale = estimate_advantages(tiny.rollout(), rewards, values, settings)
    assert torch.equal(advantages, rewards + 1) and torch.equal(returns, values) and scale == 1.0


GROUPS = pytest.mark.parametrize("estimator", losses.GROUP_ADVANTAGES)
QUERIES = [[5, 6], [7], [8, 9, 4], [6, 6]]
PROMPTS = Prompts.from_lists(QUERIES)


def test_advantages_by_hand():
    returns = torch.tensor([[1.0, 2.0, 6.0], [0.0, 0.0, -3.0]]).double()
    by_others = [[1 - 4, 2 - 3.5, 6 - 1.5], [1.5, 1.5, -3.0]]
    torch.testing.assert_close(losses.rloo(returns), torch.tensor(by_others).double())
    deviation = torch.tensor([[7.0], [3.0]]).double().sqrt()  # unbiased
    by_all = torch.tensor([[-2, -1, 3], [1, 1, -2]]) / (deviation + 1e-4)
    torch.testing.assert_close(losses.grpo(returns), by_all)


@GROUPS
def test_equal_returns_have_no_advantage(estimator):
    """Exactly, although the mean of three 0.1 is not 0.1; whitening leaves it at 0."""
    rewards = torch.tensor([[0.0, 0.1], [0.1, torch.nan], [0.1, 0.0]])
    mask = ~rewards.isnan()
    advantages = losses.group_advantages(rewards, mask, 3, estimator)
    assert advantages.tolist() == losses.masked_whiten(advantages, mask).tolist() == [[0.0, 0.0]] * 3


def test_leaving_one_out_is_the_deviation_from_the_mean_of_all_times_k_over_k_minus_1():
    returns = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).double()
    torch.testing.assert_close(losses.rloo(returns), 4 / 3 * (returns - returns.mean(1, keepdim=True)))


@GROUPS
def test_advantages_are_those_of_the_rows_of_the_prompt(estimator):
    """In shuffled minibatches, by a loop over the rows that have the same prompt.

    Each pair of rows has another gap, so small that it shows in grpo's advantage beside the 1e-4.
    """
    groups = {"num_samples_per_prompt": 2, "advantage": estimator, "advantage_norm": "none", "num_mini_batches": 4}
    trainer = tiny.trainer(policy_seed=3, kl_coef=1e-4, **groups)
    queries = [query for query in QUERIES for _ in range(2)]
    rollout = Rollout.from_lists(queries, 2 * tiny.RESPONSES, stop_token_id=tiny.EOS)
    experience = trainer.make_experience(rollout, scores=[(-2) ** row / 1000 for row in range(8)])
    returns = experience.rewards.double().sum(1).tolist()
    assert len(set(returns)) == 8
    for minibatch in experience.minibatches:
        for rows in minibatch:
            micro_batch = rollout.micro_batch(rows)
            found = experience.token_batch(micro_batch).advantages
            for row in rows.tolist():
                prompt = rollout.prompt_tokens(row)
                (other,) = (each for each in range(8) if each != row and rollout.prompt_tokens(each) == prompt)
                gap = returns[row] - returns[other]  # of two values the unbiased deviation is |gap| / sqrt(2)
                expected = gap if estimator == "rloo" else gap / 2 / (abs(gap) / math.sqrt(2) + 1e-4)
                own = found[rows[micro_batch.row_index] == row]
                assert own.tolist() == pytest.approx([expected] * int(experience.mask[row].sum()), rel=1e-4)


# Responses of two tokens out of three; k of them are drawn: sums over all draws.


@pytest.mark.parametrize("k", [2, 3])
def test_the_expected_gradient_of_rloo_is_that_of_the_policy(k):
    logits = torch.randn(2, 3, generator=torch.Generator().manual_seed(1)).double().requires_grad_()
    responses = list(product(range(3), repeat=2))
    scores = torch.randn(9, generator=torch.Generator().manual_seed(2)).double()
    logprobs = torch.log_softmax(logits, -1)[torch.arange(2), torch.tensor(responses)]  # (9, 2), of each token
    mass = logprobs.sum(1).exp()
    (policy_gradient,) = torch.autograd.grad((mass * scores).sum(), logits, retain_graph=True)
    draws = torch.tensor(list(product(range(9), repeat=k)))
    for estimator, exact in (("rloo", True), ("grpo", False)):
        advantages = losses.GROUP_ADVANTAGES[estimator](scores[draws])[..., None].expand(-1, k, 2)
        loss = losses.policy_loss(logprobs[draws], logprobs[draws].detach(), advantages, 0.2)[0].sum(2).mean(1)
        (found,) = torch.autograd.grad((mass[draws].prod(1).detach() * loss).sum(), logits, retain_graph=True)
        assert torch.allclose(found, -policy_gradient, atol=1e-12) is exact


# The trainer


@pytest.mark.full
@GROUPS
def test_a_policy_learns_without_a_value_model(estimator):
    """To end within two tokens, after 7 to 14 updates; no number, weight or optimizer state is of a value model."""
    options = {"num_samples_per_prompt": 8, "kl_coef": 0.0, "learning_rate": 1e-3, "ratio_threshold": None}
    rewards = {"short": lambda rollout: -rollout.response_lengths.float()}
    trainer = tiny.trainer(rewards=rewards, advantage=estimator, **options, **tiny.batch(16, 32))
    history = [trainer.step(PROMPTS)]
    while history[-1]["objective/response_length"] > 2 and len(history) < 50:
        history.append(trainer.step(PROMPTS))
    assert history[-1]["objective/response_length"] <= 2 < 4 < history[0]["objective/response_length"]
    assert not [name for name in history[0] if "value" in name or "explained" in name or name == "val/clipfrac_avg"]
    assert [*trainer.state_dict()] == ["updates", "seed", "kl_coef", "moments", "policy", "optimizer", "scheduler"]
    assert {group["name"].partition("/")[0] for group in trainer.optimizer.param_groups} == {"policy"}


def test_a_rollout_without_groups_is_scored_and_not_trained_on():
    trainer = tiny.trainer(num_samples_per_prompt=2, advantage="rloo")
    experience = trainer.make_experience(trainer.generate(PROMPTS, purpose="headline"))
    assert experience.advantages is None and "objective/kl" in experience.metrics(kl_in_reward=True)
    with pytest.raises(ValueError, match="advantage rloo needs num_samples_per_prompt 2 adjacent responses"):
        trainer.update(experience)
    rollout = trainer.generate(PROMPTS)
    shuffled = replace(rollout, **{name: tensor.roll(1, 0) for name, tensor in rollout._tensors.items()})
    assert rollout.has_groups(2) and not rollout.has_groups(3) and not shuffled.has_groups(2)
