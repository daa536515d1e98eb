"""Fused log-probs have the values and gradients of the plain ones."""

import pytest
import tiny
import torch

from rlhf_cli.ppo import fused_logprobs
from rlhf_cli.ppo.forward_backward import logprobs_and_entropy


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_fused_log_probs_have_the_values_and_gradients_of_the_plain_ones(temperature, monkeypatch):
    """Also for a word that is masked out, whose logit is minus infinity."""
    monkeypatch.setattr(fused_logprobs, "compiled", lambda function: function)
    torch.manual_seed(0)
    logits, ids = 5 * torch.randn(6, 11, dtype=torch.float64), torch.tensor([0, 3, 10, 7, 7, 2])
    logits[2, 5] = -torch.inf
    weights, results = 0.1 * torch.randn(2, 6, dtype=torch.float64), []
    settings = tiny.settings(temperature=temperature, entropy_coef=0.1)
    for each in (logprobs_and_entropy, fused_logprobs.fused_logprobs_and_entropy):
        leaf = logits.clone().requires_grad_()
        values = each(leaf, ids, settings if each is logprobs_and_entropy else temperature)
        (weights[0] * values[0] + weights[1] * values[1]).sum().backward()
        results.append([*values, leaf.grad])
    for plain, fused in zip(*results, strict=True):
        assert torch.allclose(plain, fused, atol=1e-12) and fused.isfinite().all()
