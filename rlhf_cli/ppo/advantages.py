"""Advantage estimators: (rewards, values, mask, gamma, lam) -> (advantages, returns), all (B, R)."""

import torch
from torch import Tensor


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438, equations 11, 12 and 16).

    Index t is a response token: values[t] is the value before it, rewards[t] comes with it, and after the last real
    token the value is 0.

        delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lam A_{t+1}        returns_t = A_t + V_t

    Tokens outside the mask take no part: the step after token t is the next token that counts. Outputs are 0 there.
    """
    advantages = torch.zeros_like(values)
    following = torch.zeros_like(values[:, 0])
    next_value = torch.zeros_like(following)
    for t in reversed(range(values.shape[1])):
        counts = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        following = torch.where(counts, delta + gamma * lam * following, following)
        next_value = torch.where(counts, values[:, t], next_value)
        advantages[:, t] = torch.where(counts, following, 0)
    return advantages, torch.where(mask, advantages + values, 0)
