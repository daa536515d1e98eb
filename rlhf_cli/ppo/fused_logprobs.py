"""Log-probs and entropies of logits without a tensor of log-probs: one pass over the logits each way, if compiled.

On a vocabulary of 150,000 words each of the plain path's ten operations reads or writes 0.6 MB for every token.
"""

from typing import Any

import torch
from torch import Tensor

from rlhf_cli.models.compiled import compiled


def fused_logprobs_and_entropy(logits: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log p(id) (N,) and the entropy (N,) of p = softmax(logits / temperature), logits (N, V) float32.

    The values and gradients are those of losses.token_logprobs and losses.entropy, up to rounding. Scoring and training
    run the same compiled function, so the first ratio is exactly 1.
    """
    torch._dynamo.mark_static(logits, 1)  # kernels for this vocabulary, not for one that a cache on disk remembers
    logprobs, entropy = _FusedLogprobs.apply(logits, ids, temperature)
    return logprobs, entropy


class _FusedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        compute = compiled(logprobs_and_entropy)
        logprobs, entropy, log_normalizer = compute(logits, ids, temperature)
        ctx.save_for_backward(logits, ids, log_normalizer, entropy)
        ctx.temperature = temperature
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, to_logprobs: Tensor, to_entropy: Tensor) -> tuple[Tensor, None, None]:
        compute_gradient = compiled(logits_gradient)
        gradient = compute_gradient(*ctx.saved_tensors, ctx.temperature, to_logprobs, to_entropy)
        return gradient, None, None


def logprobs_and_entropy(logits: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return log p(id), the entropy H = log Z - sum_v p_v z_v and log Z, (N,) each, with z = logits / temperature."""
    z = logits / temperature
    log_normalizer = z.logsumexp(-1)

    p = torch.exp(z - log_normalizer[:, None])
    expected_z = torch.where(p > 0, p * z, 0.0).sum(-1)  # 0 log 0 is 0
    z_of_id = z.gather(-1, ids[:, None])[:, 0]

    logprobs = z_of_id - log_normalizer
    entropy = log_normalizer - expected_z
    return logprobs, entropy, log_normalizer


def logits_gradient(
    logits: Tensor,
    ids: Tensor,
    log_normalizer: Tensor,
    entropy: Tensor,
    temperature: float,
    to_logprobs: Tensor,
    to_entropy: Tensor,
) -> Tensor:
    """Return the gradient (N, V) of the logits from those of log p(id) and of the entropy, (N,) each.

    d log p_i / d z_v = [v = i] - p_v, and d H / d z_v = -p_v (log p_v + H).
    """
    log_p = logits / temperature - log_normalizer[:, None]
    p = torch.exp(log_p)

    vocabulary = torch.arange(logits.shape[1], device=logits.device)
    at_id = vocabulary == ids[:, None]
    logprob_gradient = at_id.float() - p

    entropy_gradient = torch.where(p > 0, -p * (log_p + entropy[:, None]), 0.0)

    of_logprob = to_logprobs[:, None] * logprob_gradient
    of_entropy = to_entropy[:, None] * entropy_gradient
    return (of_logprob + of_entropy) / temperature
