"""The loss of a micro-batch, from what the models say of its N response tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_cli.ppo import formulas
from rlhf_cli.ppo.records import Experience, MicroBatch
from rlhf_cli.ppo.settings import PPOSettings


@dataclass(frozen=True)
class Losses:
    """Everything at each token, (N,)."""

    policy: Tensor  # the clipped surrogate, the KL term of kl_in loss and the entropy bonus; with gradient
    value: Tensor  # with gradient
    ratio: Tensor
    gauges: dict[str, Tensor]  # metric -> what it is the mean of


def losses(
    experience: Experience,
    micro: MicroBatch,
    logits: Tensor,
    values: Tensor,
    ref_logits: Tensor | None,
    settings: PPOSettings,
) -> Losses:
    """`logits` (N, V) and `values` (N,) of the models as they are now; `ref_logits` (N, V) for kl_estimator full."""
    old, ref, advantages, old_values, returns = (
        x[micro.cells]
        for x in (
            experience.logprobs,
            experience.ref_logprobs,
            experience.advantages,
            experience.values,
            experience.returns,
        )
    )
    logprobs = formulas.token_logprobs(logits, micro.targets, settings.temperature)
    surrogate, ratio, clipped = formulas.policy_loss(
        logprobs, old, advantages, settings.cliprange, settings.cliprange_high, settings.dual_clip
    )
    error, value_clipped = formulas.value_loss(values, old_values, returns, settings.cliprange_value)
    with torch.set_grad_enabled(settings.entropy_coef > 0 and torch.is_grad_enabled()):
        entropy = formulas.token_entropy(logits, settings.temperature)
    policy = surrogate
    if settings.entropy_coef:
        policy = policy - settings.entropy_coef * entropy
    if settings.kl_in == "loss":
        if ref_logits is not None:
            kl = formulas.kl_full(logits, ref_logits, settings.temperature)
        else:
            kl = formulas.kl_loss_tokens(logprobs, old, ref, settings.kl_estimator)
        policy = policy + experience.kl_coef * kl
    gauges = {
        "loss/policy_avg": surrogate,
        "loss/value_avg": error,
        "policy/clipfrac_avg": clipped.float(),
        "policy/entropy_avg": entropy,
        "policy/approxkl_avg": formulas.approx_kl(logprobs, old),
        "policy/policykl": old - logprobs,
        "val/ratio": ratio,
        "val/clipfrac_avg": value_clipped.float(),
    }
    return Losses(policy, error, ratio.detach(), {name: gauge.detach() for name, gauge in gauges.items()})
