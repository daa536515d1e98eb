"""Every loss has its numerical gradient, in float64, on each of its branches.

Where a factor is held fixed on purpose (the importance ratio of the KL loss, k3's value) the numbers are differentiated
with that factor held fixed as well. Points stay clear of the kinks, where there is no gradient to compare.
"""

import math

import pytest
import tiny
import torch
from torch.autograd import gradcheck

from rlhf_cli.config.ppo_options import PPOSettings
from rlhf_cli.models.batch import Rollout
from rlhf_cli.ppo import losses
from rlhf_cli.ppo.forward_backward import policy_losses, value_losses

ROWS = Rollout.from_lists([[1], [2, 0]], [[0, 2, 1], [1, 1]])  # three tokens, five response tokens
MICRO = ROWS.micro_batch(torch.arange(2))
TARGETS = MICRO.targets


def draws(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


CLIPS = {
    "plain": {"cliprange": 0.2},
    "asymmetric": {"cliprange": 0.2, "cliprange_high": 0.5},
    "dual": {"cliprange": 0.2, "dual_clip": 3.0},
    "asymmetric and dual": {"cliprange": 0.1, "cliprange_high": 0.4, "dual_clip": 2.0},
}


@pytest.mark.parametrize("clips", CLIPS.values(), ids=CLIPS.keys())
@pytest.mark.parametrize("advantage", [-1.5, 0.7])
def test_policy_loss_in_each_of_its_regions(clips, advantage):
    """Ratios below, inside and above the range, and above the ceiling; both signs of the advantage."""
    ratios = torch.tensor([0.3, 0.7, 0.93, 1.0, 1.15, 1.3, 1.45, 1.7, 2.5, 4.0, 9.0], dtype=torch.float64)
    logprobs, old = (ratios.log() - 2.0).requires_grad_(True), torch.full_like(ratios, -2.0)
    advantages = torch.full_like(ratios, advantage)
    assert gradcheck(lambda x: losses.policy_loss(x, old, advantages, **clips)[0], (logprobs,))
    loss, _, clipped = losses.policy_loss(logprobs, old, advantages, **clips)
    (slope,) = torch.autograd.grad(loss.sum(), logprobs)
    assert (slope[clipped] == 0).all() and (slope[~clipped] != 0).all(), "clipped says where there is no gradient"
    assert clipped.any() and not clipped.all()


@pytest.mark.parametrize("value,clipped", [(0.1, False), (2.0, True), (-2.0, False), (-0.15, False)])
def test_value_loss_on_both_branches(value, clipped):
    """Old value 0, range 0.2, return 3: inside, past the range towards the return, and away from it."""
    point = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    old, wanted = torch.zeros(1, dtype=torch.float64), torch.full((1,), 3.0, dtype=torch.float64)
    assert gradcheck(lambda v: losses.value_loss(v, old, wanted, 0.2)[0], (point,))
    loss, found = losses.value_loss(point, old, wanted, 0.2)
    assert found.item() is clipped
    assert torch.autograd.grad(loss.sum(), point)[0].item() == (0.0 if clipped else pytest.approx(value - 3.0))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_log_probs_entropy_and_exact_kl(temperature):
    logits, ref = draws(5, 3).requires_grad_(True), draws(5, 3, seed=1)
    assert gradcheck(lambda x: losses.token_logprobs(x, TARGETS, temperature), (logits,))
    assert gradcheck(lambda x: losses.entropy(losses.log_probs(x, temperature)), (logits,))
    assert gradcheck(lambda x: losses.exact_kl(x, ref, temperature), (logits,))


@pytest.mark.parametrize("kind", losses.KL_ESTIMATORS)
def test_each_estimator(kind):
    logprobs, ref = draws(5).requires_grad_(True), draws(5, seed=1)
    assert gradcheck(lambda x: losses.token_kl(x, ref, kind), (logprobs,))


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_kl_loss_with_its_fixed_factors(kind):
    """pi / pi_old is fixed; k3 has k2's slope: -(pi / pi_old) r at each token."""
    logprobs, old, ref = (draws(5, seed=seed, scale=0.5) for seed in range(3))
    point = logprobs.clone().requires_grad_(True)
    (found,) = torch.autograd.grad(losses.token_kl_loss(point, old, ref, kind).sum(), point)
    fixed, h = (logprobs - old).exp(), 1e-6
    numeric = fixed * (((ref - logprobs - h) ** 2 - (ref - logprobs + h) ** 2) / (4 * h))
    torch.testing.assert_close(found, numeric, rtol=1e-6, atol=1e-8)
    r = ref - logprobs
    value = {"k2": r**2 / 2, "k3": r.exp() - 1 - r}[kind]
    torch.testing.assert_close(losses.token_kl_loss(logprobs, old, ref, kind), fixed * value)


def settings(**changes) -> PPOSettings:
    return PPOSettings(total_episodes=64, temperature=0.7, **changes)


def a_judgement(shift: float, kl_coef: float = 0.3):
    """An experience whose ratios are about e^shift, and the point (logits, values) where the models now stand."""
    logits, values = draws(5, 3), draws(5, seed=3, scale=2.0)
    now = losses.token_logprobs(logits, TARGETS, 0.7)
    fields = {
        "logprobs": now - shift - 0.02 * draws(5, seed=4),
        "ref_logprobs": losses.token_logprobs(draws(5, 3, seed=1), TARGETS, 0.7),
        "advantages": draws(5, seed=5),
        "values": values - draws(5, seed=6),
        "returns": draws(5, seed=7, scale=3.0),
    }
    tensors = {}
    for name, flat in fields.items():
        tensors[name] = torch.full(ROWS.response_mask.shape, math.nan, dtype=torch.float64)
        tensors[name][MICRO.response_index] = flat
    return tiny.experience(ROWS, kl_coef, **tensors), logits, values


OBJECTIVES = {
    "plain": {},
    "clips": {"cliprange": 0.1, "cliprange_high": 0.4, "dual_clip": 2.0},
    "entropy": {"entropy_coef": 0.5},
    "full KL": {"kl_in": "loss", "kl_estimator": "full"},
    "all": {"kl_in": "loss", "kl_estimator": "full", "entropy_coef": 0.5, "cliprange_high": 0.4, "dual_clip": 2.0},
}


@pytest.mark.parametrize("changes", OBJECTIVES.values(), ids=OBJECTIVES.keys())
@pytest.mark.parametrize("shift", [-0.6, -0.05, 0.05, 0.3, 0.6, 1.5])
def test_the_whole_loss(changes, shift):
    experience, logits, values = a_judgement(shift)
    chosen, ref = settings(**changes), draws(5, 3, seed=1)
    ref_logits = ref if changes.get("kl_estimator") == "full" else None

    def total(logits, values):
        told = experience.gather(MICRO)
        policy = policy_losses(told, logits, ref_logits, experience.kl_coef, chosen).loss
        return policy.sum() + chosen.vf_coef * value_losses(told, values, chosen)[0].sum()

    assert gradcheck(total, (logits.requires_grad_(True), values.requires_grad_(True)))


@pytest.mark.parametrize("kind", ["k2", "k3"])
@pytest.mark.parametrize("shift", [0.0, 0.4])
def test_the_kl_term_of_the_whole_loss(kind, shift):
    """What kl_in loss adds is kl_coef x ratio x log(pi / ref) x the slope of the log-prob, at each token."""
    experience, logits, _ = a_judgement(shift)
    point, told = logits.requires_grad_(True), experience.gather(MICRO)
    with_kl, without = (
        torch.autograd.grad(policy_losses(told, point, None, experience.kl_coef, chosen).loss.sum(), point)[0]
        for chosen in (settings(kl_in="loss", kl_estimator=kind), settings())
    )
    now = losses.token_logprobs(logits, TARGETS, 0.7).detach()
    log_ratio = now - experience.ref_logprobs[MICRO.response_index]
    chance = torch.softmax(logits.detach() / 0.7, -1)
    slope = (torch.nn.functional.one_hot(TARGETS, 3) - chance) / 0.7  # d logp / d logits
    importance = (now - experience.logprobs[MICRO.response_index]).exp()
    torch.testing.assert_close(with_kl - without, 0.3 * (importance * log_ratio)[:, None] * slope)


def test_what_is_only_measured_carries_no_gradient():
    experience, logits, values = a_judgement(0.1)
    told = experience.gather(MICRO)
    parts = policy_losses(told, logits.requires_grad_(True), None, experience.kl_coef, settings())
    errors, gauges = value_losses(told, values.requires_grad_(True), settings())
    assert parts.loss.requires_grad and errors.requires_grad
    assert not any(gauge.requires_grad for gauge in (parts.metrics | gauges).values())
