"""The losses of N response tokens, from what the models say of them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_cli.ppo import formulas
from rlhf_cli.ppo.records import Told
from rlhf_cli.ppo.settings import PPOSettings

Gauges = dict[str, Tensor]  # metric -> what it is the mean of, (N,)


@dataclass(frozen=True)
class PolicyLosses:
    """Everything at each token, (N,)."""

    loss: Tensor  # the clipped surrogate, the KL term of kl_in loss and the entropy bonus; with gradient
    gauges: Gauges


def policy_losses(
    told: Told, logits: Tensor, ref_logits: Tensor | None, kl_coef: float, settings: PPOSettings
) -> PolicyLosses:
    """`logits` (N, V) of the policy as it is now; the reference's `ref_logits` (N, V) for kl_estimator full."""
    log_probs = formulas.log_probs(logits, settings.temperature)
    logprobs = formulas.picked(log_probs, told.ids)
    surrogate, ratio, clipped = formulas.policy_loss(
        logprobs, told.logprobs, told.advantages, settings.cliprange, settings.cliprange_high, settings.dual_clip
    )
    with torch.set_grad_enabled(settings.entropy_coef > 0 and torch.is_grad_enabled()):
        entropy = formulas.entropy(log_probs)
    loss = surrogate
    if settings.entropy_coef:
        loss = loss - settings.entropy_coef * entropy
    if settings.kl_in == "loss":
        if ref_logits is not None:
            kl = formulas.kl_full(logits, ref_logits, settings.temperature)
        else:
            kl = formulas.kl_loss_tokens(logprobs, told.logprobs, told.ref_logprobs, settings.kl_estimator)
        loss = loss + kl_coef * kl
    gauges = {
        "loss/policy_avg": surrogate,
        "policy/clipfrac_avg": clipped.float(),
        "policy/entropy_avg": entropy,
        "policy/approxkl_avg": formulas.approx_kl(logprobs, told.logprobs),
        "policy/policykl": told.logprobs - logprobs,
        "val/ratio": ratio,
    }
    return PolicyLosses(loss, {name: gauge.detach() for name, gauge in gauges.items()})


def value_losses(told: Told, values: Tensor, settings: PPOSettings) -> tuple[Tensor, Gauges]:
    """The loss (N,), with gradient, of `values` (N,) of the value model as it is now."""
    error, clipped = formulas.value_loss(values, told.values, told.returns, settings.cliprange_value)
    return error, {"loss/value_avg": error.detach(), "val/clipfrac_avg": clipped.float()}
