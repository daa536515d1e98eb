"""Losses of a row's response tokens."""

import torch
from torch import Tensor

from rlhf_cli.config.ppo import PPOSettings
from tests.reference.advantages import Experience, full_kl
from tests.reference.outputs import log_probs, of_tokens, response_values
from tests.reference.state import State


def row_losses(state: State, experience: Experience, row: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of each response token, (T,) with gradient, and the metrics of each, (T,)."""
    settings = state.settings
    with torch.set_grad_enabled(state.policy_is_trained):
        logp = log_probs(state, state.policy, row)
    logprobs = of_tokens(logp, state.responses[row])
    old = experience.logprobs[row]
    ratio = torch.exp(logprobs - old)

    surrogate, clipped = clipped_surrogate(settings, ratio, experience.advantages[row])
    weights, _ = rollout_correction(state, experience, row)
    surrogate = weights * surrogate
    entropy = -(logp.exp() * logp).sum(-1)
    policy_loss = surrogate - settings.entropy_coef * entropy
    if settings.kl_in == "loss":
        policy_loss = policy_loss + state.kl_coef * kl_loss(state, experience, row, logp)
    if settings.kl_in == "both":  # in the unit of the advantages, as the KL of later tokens in them
        policy_loss = policy_loss + state.kl_coef / experience.scale * kl_loss(state, experience, row, logp)

    loss = policy_loss if state.policy_is_trained else torch.zeros_like(policy_loss)
    metrics = {
        "loss/policy_avg": surrogate,
        "policy/clipfrac_avg": clipped,
        "policy/entropy_avg": entropy,
        "policy/approxkl_avg": (logprobs - old) ** 2 / 2,
        "policy/policykl": old - logprobs,
        "val/ratio": ratio,
    }
    if state.value is not None:
        values = response_values(state, row)
        error, value_clipped = value_error(settings, values, experience.values[row], experience.returns[row])
        loss = loss + settings.vf_coef * error
        metrics["loss/value_avg"] = error
        metrics["val/clipfrac_avg"] = value_clipped
    return loss, metrics


def clipped_surrogate(settings: PPOSettings, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Return -min(ratio A, clip(ratio, 1 - eps, 1 + eps_high) A), and if it is clipped (Schulman et al. 2017, eq. 7).

    eps_high is cliprange unless cliprange_high is set (Yu et al. 2025, arXiv 2503.14476, section 3.1). With
    dual_clip c and A < 0 the objective is at least c A (Ye et al. 2020, arXiv 1912.09729, equation 5).
    """
    low = settings.cliprange
    high = settings.cliprange if settings.cliprange_high is None else settings.cliprange_high
    objective = ratio * advantages
    bounded = torch.clamp(ratio, 1 - low, 1 + high) * advantages
    clipped = bounded < objective
    objective = torch.where(clipped, bounded, objective)

    if settings.dual_clip is not None:
        least = settings.dual_clip * advantages
        too_low = (advantages < 0) & (objective < least)
        objective = torch.where(too_low, least, objective)
        clipped = clipped | too_low
    return -objective, clipped


def rollout_correction(state: State, experience: Experience, row: int) -> tuple[Tensor, Tensor]:
    """Return the weight of each token, (T,), and which ratios of policy to engine exceed the cap of rollout_correction.

    token_truncate: min(ratio, cap) (Ionides 2008, "Truncated importance sampling"). sequence_mask: the product of the
    row's ratios, 0 above the cap (TRL 1.16, trl/trainer/grpo_trainer.py).
    """
    option = state.settings.rollout_correction
    if option is None:
        return torch.ones(len(state.responses[row])), torch.zeros(1)
    ratios = torch.exp(experience.logprobs[row] - state.drawn_logprobs[row])
    if option.mode == "token_truncate":
        return torch.clamp(ratios, max=option.cap), ratios > option.cap
    product = ratios.prod()
    weight = product if product <= option.cap else 0.0
    return torch.ones_like(ratios) * weight, product[None] > option.cap


def value_error(settings: PPOSettings, values: Tensor, old: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return max((V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2) / 2, and if the clipped term is larger.

    OpenAI baselines, ppo2; Huang et al. 2024 (arXiv 2403.17031), section 7.
    """
    near_old = torch.clamp(values, old - settings.cliprange_value, old + settings.cliprange_value)
    unclipped = (values - target) ** 2
    bounded = (near_old - target) ** 2
    clipped = bounded > unclipped
    return torch.where(clipped, bounded, unclipped) / 2, clipped


def kl_loss(state: State, experience: Experience, row: int, logp: Tensor) -> Tensor:
    """Return the KL penalty in the loss: exact for `full`; else k2 or k3, times the detached importance ratio.

    k3 has k2's gradient: grad k2 = (log pi - log ref) grad log pi is the KL's gradient at a sampled token.
    """
    if state.settings.kl_estimator == "full":
        with torch.no_grad():
            ref_logp = log_probs(state, state.ref, row)
        return full_kl(logp, ref_logp)

    logprobs = of_tokens(logp, state.responses[row])
    r = experience.ref_logprobs[row] - logprobs
    k2 = r * r / 2
    k3 = torch.exp(r) - 1 - r
    losses = {"k2": k2, "k3": k2 + (k3 - k2).detach()}
    importance = torch.exp(logprobs - experience.logprobs[row]).detach()
    return importance * losses[state.settings.kl_estimator]
