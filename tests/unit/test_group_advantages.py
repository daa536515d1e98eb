"""ppo.advantage rloo and grpo: advantages by hand, exact gradients in a world of three tokens, and no value model."""

import math
from dataclasses import replace
from itertools import product
from statistics import fmean

import pytest
import tiny
import torch

from rlhf_cli.models.batch import Prompts
from rlhf_cli.ppo import losses

GROUPS = pytest.mark.parametrize("estimator", losses.GROUP_ADVANTAGES)
PROMPTS = Prompts.from_lists([[5, 6], [7], [8, 9, 4], [6, 6]])  # two responses each


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
    """In shuffled minibatches, by a loop over the rows that have the same prompt."""
    trainer = tiny.trainer(
        seed=2, policy_seed=3, num_samples_per_prompt=2, advantage=estimator, advantage_norm="none", num_mini_batches=4
    )
    experience = trainer.make_experience(trainer.generate(PROMPTS))
    rollout, returns = experience.rollout, experience.rewards.double().sum(1).tolist()
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


@GROUPS
def test_a_policy_learns_without_a_value_model(estimator):
    """To end at once; no number, weight or optimizer state is of a value model."""
    options = {"num_samples_per_prompt": 4, "kl_coef": 0.0, "ratio_threshold": None, **tiny.batch(16, 16)}
    rewards = {"short": lambda rollout: -rollout.response_lengths.float()}
    trainer = tiny.trainer(rewards=rewards, advantage=estimator, **options)
    history = [trainer.step(PROMPTS) for _ in range(12)]
    lengths = [stats["objective/response_length"] for stats in history]
    assert fmean(lengths[-3:]) < 0.5 * lengths[0]
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
