"""Worked tables, brute force, and identities. Nothing here recomputes a formula the way the code does."""

import math

import pytest
import torch
from torch.autograd import gradcheck

from rlhf_cli.ppo import losses

NAN = float("nan")


def test_response_mask_table():
    ids = torch.tensor([[5, 2, 7, 2], [2, 5, 5, 5], [5, 6, 7, 8]])
    assert losses.response_mask(ids, 2).tolist() == [
        [True, True, False, False],
        [True, False, False, False],
        [True] * 4,
    ]
    assert losses.response_mask(ids, None).all()


def test_score_lands_on_the_last_real_token():
    mask = torch.tensor([[True, True, False], [True, True, True], [False, True, False]])
    penalty = torch.tensor([[0.1, 0.2, NAN], [0.1, 0.2, 0.3], [NAN, 0.5, NAN]])
    shaped = losses.compute_token_rewards(torch.tensor([1.0, 2.0, 3.0]), penalty, mask)
    torch.testing.assert_close(shaped, torch.tensor([[-0.1, 0.8, 0.0], [-0.1, -0.2, 1.7], [0.0, 2.5, 0.0]]))


def test_whitening_by_hand():
    x, mask = (
        torch.tensor([[1.0, 3.0, NAN], [5.0, NAN, NAN]]),
        torch.tensor([[True, True, False], [True, False, False]]),
    )
    # mean 3, unbiased variance 4
    torch.testing.assert_close(losses.masked_whiten(x, mask), torch.tensor([[-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]))
    torch.testing.assert_close(
        losses.masked_whiten(x, mask, shift_mean=False), torch.tensor([[2.0, 3.0, 0.0], [4.0, 0.0, 0.0]])
    )


def brute_gae(rewards, values, gamma, lam):
    """A_t = sum_l (gamma lam)^l delta_{t+l}, as the double sum it is."""
    steps = len(rewards)
    after = [*values[1:], 0.0]
    delta = [rewards[t] + gamma * after[t] - values[t] for t in range(steps)]
    return [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, steps)) for t in range(steps)]


@pytest.mark.parametrize("gamma,lam", [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.99, 0.0)])
def test_gae_against_the_double_sum(gamma, lam):
    generator = torch.Generator().manual_seed(1)
    rewards, values = (torch.randn(3, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    lengths = [6, 1, 4]
    mask = torch.tensor([[t < n for t in range(6)] for n in lengths])
    rewards, values = rewards.masked_fill(~mask, NAN), values.masked_fill(~mask, NAN)
    advantages, returns = losses.gae(rewards, values, mask, gamma, lam)
    for row, n in enumerate(lengths):
        wanted = brute_gae(rewards[row, :n].tolist(), values[row, :n].tolist(), gamma, lam)
        torch.testing.assert_close(advantages[row, :n], torch.tensor(wanted, dtype=torch.float64))
        torch.testing.assert_close(returns[row, :n], advantages[row, :n] + values[row, :n])
        assert (advantages[row, n:] == 0).all() and (returns[row, n:] == 0).all()


def test_gae_with_a_hole_skips_the_token():
    """A token that does not count (a tool's output, say) is as if it were not there."""
    mask = torch.tensor([[True, False, True]])
    rewards, values = torch.tensor([[1.0, NAN, 2.0]]), torch.tensor([[0.5, NAN, 0.25]])
    advantages, _ = losses.gae(rewards, values, mask, 1.0, 0.5)
    dense, _ = losses.gae(
        torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5, 0.25]]), torch.ones(1, 2, dtype=torch.bool), 1.0, 0.5
    )
    assert advantages[0, [0, 2]].tolist() == dense[0].tolist() and advantages[0, 1] == 0


def test_gae_one_one_is_monte_carlo():
    rewards, mask = torch.tensor([[0.0, 0.5, 2.0]]), torch.ones(1, 3, dtype=torch.bool)
    values = torch.tensor([[0.3, -1.0, 4.0]])
    _, returns = losses.gae(rewards, values, mask, 1.0, 1.0)
    torch.testing.assert_close(returns, torch.tensor([[2.5, 2.5, 2.0]]))


@pytest.mark.parametrize(
    "ratio,advantage,loss,clipped,slope",
    [  # cliprange 0.2; slope = d loss / d logprob
        (1.5, 2.0, -2.4, True, 0.0),  # went too far up on a good token: clipped, no gradient
        (1.5, -2.0, 3.0, False, 3.0),  # up on a bad token: full force back
        (0.5, 2.0, -1.0, False, -1.0),  # down on a good token: full force back
        (0.5, -2.0, 1.6, True, 0.0),  # down enough on a bad token: clipped
        (1.0, 2.0, -2.0, False, -2.0),
    ],
)
def test_policy_loss_quadrants(ratio, advantage, loss, clipped, slope):
    logprob = torch.tensor([math.log(ratio) - 1.0], requires_grad=True)
    got, got_ratio, got_clipped = losses.policy_loss(logprob, torch.tensor([-1.0]), torch.tensor([advantage]), 0.2)
    got.sum().backward()
    assert got.item() == pytest.approx(loss, abs=1e-6)
    assert got_ratio.item() == pytest.approx(ratio, abs=1e-6)
    assert got_clipped.item() is clipped
    assert logprob.grad.item() == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize(
    "value,old,target,loss,clipped",
    [
        (1.0, 0.9, 2.0, 0.5, False),  # inside the range
        (2.0, 0.0, 3.0, 0.5 * 2.8**2, True),  # moved too far towards the target: judged at 0.2
        (2.0, 0.0, -1.0, 0.5 * 9.0, False),  # moved away from it: judged where it is
    ],
)
def test_value_loss_by_hand(value, old, target, loss, clipped):
    got, got_clipped = losses.value_loss(torch.tensor([value]), torch.tensor([old]), torch.tensor([target]), 0.2)
    assert got.item() == pytest.approx(loss, rel=1e-6) and got_clipped.item() is clipped


def test_losses_have_their_numerical_gradients():
    generator = torch.Generator().manual_seed(0)
    new, old, advantages = (torch.randn(7, generator=generator, dtype=torch.float64) * 0.3 for _ in range(3))
    new.requires_grad_(True)
    assert gradcheck(lambda x: losses.policy_loss(x, old, advantages, 0.2)[0], (new,))
    assert gradcheck(lambda x: losses.value_loss(x, old, advantages * 3, 0.2)[0], (new,))
    logits = torch.randn(4, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([0, 2, 1, 1])
    assert gradcheck(lambda x: losses.token_logprobs(x, ids, 0.7), (logits,))
    ref = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    assert gradcheck(lambda x: losses.exact_kl(x, ref, 0.7), (logits,))


# A world of three tokens, where everything about KL can be summed exactly.
PI, REF = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64), torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
EXACT = float((PI * (PI / REF).log()).sum())


def exact_gradient():
    logits = PI.log().clone().requires_grad_(True)
    logp = torch.log_softmax(logits, -1)
    return torch.autograd.grad((logp.exp() * (logp - REF.log())).sum(), logits)[0]


@pytest.mark.parametrize("kind,unbiased", [("k1", True), ("k3", True), ("k2", False), ("abs", False)])
def test_kl_estimators_in_expectation(kind, unbiased):
    expected = float((PI * losses.token_kl(PI.log(), REF.log(), kind)).sum())
    assert (abs(expected - EXACT) < 1e-12) is unbiased
    assert float(losses.exact_kl(PI.log()[None], REF.log()[None], 1.0)) == pytest.approx(EXACT, abs=1e-6)


def test_estimators_by_hand():
    r = math.log(0.5 / 0.1)  # token 2: ref .5, pi .1
    wanted = {"k1": -r, "k2": r * r / 2, "k3": 5.0 - 1.0 - r, "abs": r}
    for kind, value in wanted.items():
        assert float(losses.token_kl(PI.log()[2], REF.log()[2], kind)) == pytest.approx(value)


def policy_gradient(kind: str) -> torch.Tensor:
    """Expected gradient of the penalty in the reward: sum_x pi(x) kl(x) grad log pi(x)."""
    logits = PI.log().clone().requires_grad_(True)
    logp = torch.log_softmax(logits, -1)
    penalty = losses.token_kl(PI.log(), REF.log(), kind)
    return torch.autograd.grad((PI * penalty * logp).sum(), logits)[0]


def test_only_k1_in_the_reward_has_the_kl_gradient():
    torch.testing.assert_close(policy_gradient("k1"), exact_gradient())
    for kind in ("k2", "k3", "abs"):
        assert (policy_gradient(kind) - exact_gradient()).abs().max() > 0.1
    assert (
        policy_gradient("k3")[1].sign() != exact_gradient()[1].sign()
        or policy_gradient("k3")[2].sign() != exact_gradient()[2].sign()
    )


@pytest.mark.parametrize("kind", ["k2", "k3"])
@pytest.mark.parametrize("old", [PI, torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)])
def test_kl_loss_has_the_kl_gradient_on_and_off_policy(kind, old):
    """Samples come from `old`.

    The importance ratio makes the expected gradient that of KL(pi || ref), and k3 also its value.
    """
    logits = PI.log().clone().requires_grad_(True)
    logp = torch.log_softmax(logits, -1)
    loss = (old * losses.token_kl_loss(logp, old.log(), REF.log(), kind)).sum()
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], exact_gradient())
    if kind == "k3":
        assert loss.item() == pytest.approx(EXACT)


def test_full_kl_at_a_temperature_by_hand():
    """logits / T is what is compared: at T = 0.5 they count twice, and a token that neither gives counts nothing."""
    one, other = torch.tensor([[1.0, 0.0, -math.inf]]), torch.tensor([[0.0, 0.0, -math.inf]])
    p = 1 / (1 + math.exp(-2.0))
    wanted = p * math.log(p / 0.5) + (1 - p) * math.log((1 - p) / 0.5)
    assert float(losses.exact_kl(one, other, 0.5)) == pytest.approx(wanted, abs=1e-6)


def test_half_precision_logits_are_widened():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    ids = torch.tensor([1, 2, 3, 4])
    wanted = torch.log_softmax(logits.double() / 0.7, -1).gather(-1, ids[:, None])[:, 0]
    got = losses.token_logprobs(logits, ids, 0.7)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), wanted, atol=1e-5, rtol=1e-5)


def test_full_kl_loss_has_the_kl_gradient():
    logits = PI.log().float().requires_grad_(True)
    loss = losses.exact_kl(logits[None], REF.log().float()[None], 1.0).sum()
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0].double(), exact_gradient(), atol=1e-6, rtol=1e-5)


def test_token_logprobs_and_entropy():
    logits = torch.tensor([[0.0, 0.0, 0.0], [2.0, 0.0, -math.inf], [1000.0, 0.0, -1000.0]])
    logprobs = losses.token_logprobs(logits, torch.tensor([1, 0, 0]), temperature=2.0)
    entropy = losses.entropy(losses.log_probs(logits, temperature=2.0))
    p = 1 / (1 + math.exp(-1.0))
    assert logprobs.tolist() == pytest.approx([-math.log(3), math.log(p), 0.0], abs=1e-6)
    assert entropy.tolist() == pytest.approx([math.log(3), -p * math.log(p) - (1 - p) * math.log(1 - p), 0.0], abs=1e-6)
    assert (entropy >= 0).all()


def test_masked_numbers_ignore_junk():
    x, mask = torch.tensor([[1.0, NAN], [3.0, float("inf")]]), torch.tensor([[True, False], [True, False]])
    assert losses.masked_mean(x, mask) == 2.0
    assert losses.masked_var(x, mask) == 2.0 and losses.masked_var(x, mask, unbiased=False) == 1.0


def test_explained_variance():
    returns, mask = torch.tensor([[1.0, 2.0, 3.0, NAN]]), torch.tensor([[True, True, True, False]])
    assert losses.explained_variance(returns, returns, mask) == 1.0
    assert losses.explained_variance(torch.full_like(returns, 2.0), returns, mask) == 0.0
    assert losses.explained_variance(torch.tensor([[3.0, 2.0, 1.0, 0.0]]), returns, mask) == pytest.approx(-3.0)
    assert losses.explained_variance(returns, torch.ones_like(returns), mask) == 0.0
    rounded = 3.0 + torch.tensor([[0.0, 2.4e-7, 0.0, 2.4e-7]])  # equal but for the last bit of float32
    assert rounded.unique().numel() == 2 and losses.explained_variance(returns, rounded, mask) == 0.0


def test_approx_kl_is_half_the_square():
    assert losses.approx_kl(torch.tensor([1.0]), torch.tensor([0.6])).item() == pytest.approx(0.08)
