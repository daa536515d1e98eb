"""ppo.rollout_correction: weights by hand, exact gradients in a world of three tokens, and what is not weighted."""

import math
from dataclasses import replace
from itertools import chain, product

import pytest
import tiny
import torch

from rlhf_cli.config.ppo_algorithm import RolloutCorrection
from rlhf_cli.models.batch import Rollout
from rlhf_cli.ppo.forward_backward import policy_loss_and_metrics

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


@MODES
def test_with_equal_log_probs_the_update_is_that_without_the_option(mode):
    (_, plain, expected), (_, ours, found) = updated(0.0), updated(0.0, rollout_correction={"mode": mode})
    assert {**expected, "rollout/correction_mean": 1.0, "rollout/correction_capped": 0.0} == found
    assert torch.equal(tiny.weights(plain.policy), tiny.weights(ours.policy))


def test_only_the_surrogate_is_weighted():
    """All rows are masked: the policy does not move without other terms; the value model learns as ever."""
    masked = {"rollout_correction": {"mode": "sequence_mask", "cap": 1.1}}
    (_, plain, _), (before, ours, stats) = updated(0.0), updated(1.0, **masked)
    assert stats["rollout/correction_capped"] == 1.0 and stats["loss/policy_avg"] == 0.0 < stats["loss/value_avg"]
    assert torch.equal(tiny.weights(ours.policy), before) and not torch.equal(tiny.weights(plain.policy), before)
    assert torch.equal(tiny.weights(ours.value), tiny.weights(plain.value))
    for term in ({"kl_in": "loss", "kl_estimator": "full"}, {"entropy_coef": 0.1}):
        assert not torch.equal(tiny.weights(updated(1.0, **masked, **term)[1].policy), before)
