"""Everything computed before the optimizer steps: KL, rewards, advantages and returns of the response tokens."""

import math
from dataclasses import dataclass
from statistics import fmean, stdev

import torch
from torch import Tensor

from tests.reference.outputs import log_probs, of_tokens, response_values
from tests.reference.scores import Scores, score_responses
from tests.reference.state import State


@dataclass
class Experience:
    """What an update trains on. Quantities of tokens are tensors (T,), one for each row."""

    logprobs: list[Tensor]
    ref_logprobs: list[Tensor]
    kl: list[Tensor]  # by kl_estimator
    values: list[Tensor]  # empty without a value model
    scores: Scores
    rewards: list[Tensor]
    advantages: list[Tensor]
    returns: list[Tensor]  # empty without a value model
    scale: float  # that the advantages were divided by


@torch.no_grad()
def make_experience(state: State) -> Experience:
    """Compute log-probs, values and scores; then rewards, advantages and returns."""
    settings = state.settings
    logprobs, ref_logprobs, kl = [], [], []
    for row in state.rows:
        logp = log_probs(state, state.policy, row)
        ref_logp = log_probs(state, state.ref, row)
        logprobs.append(of_tokens(logp, state.responses[row]))
        ref_logprobs.append(of_tokens(ref_logp, state.responses[row]))
        if settings.kl_estimator == "full":
            kl.append(full_kl(logp, ref_logp))
        else:
            kl.append(token_kl(logprobs[row], ref_logprobs[row], settings.kl_estimator))

    scores = score_responses(state)
    rewards = [token_rewards(state, kl[row], scores.final[row]) for row in state.rows]
    if settings.whiten_rewards:
        rewards = whitened(rewards, keep_mean=True)

    values, returns = [], []
    if state.value is None:
        advantages = group_advantages(state, rewards)
    else:
        values = [response_values(state, row) for row in state.rows]
        advantages = [gae(rewards[row], values[row], settings.gamma, settings.lam) for row in state.rows]
        returns = [advantages[row] + values[row] for row in state.rows]
    scale = 1.0
    if settings.advantage_norm == "batch":
        scale = math.sqrt(torch.cat(advantages).var() + 1e-8)
        advantages = whitened(advantages, keep_mean=False)
    return Experience(logprobs, ref_logprobs, kl, values, scores, rewards, advantages, returns, scale)


def token_kl(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """Estimate KL(policy || reference) at tokens sampled from the policy, from two log-probs: r = ref - policy.

    k1 = -r, k2 = r^2 / 2, k3 = exp(r) - 1 - r (Schulman 2020, "Approximating KL divergence"), abs = |r|.
    """
    r = ref_logprobs - logprobs
    estimates = {"k1": -r, "k2": r * r / 2, "k3": torch.exp(r) - 1 - r, "abs": abs(r)}
    return estimates[kind]


def full_kl(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """Return the exact KL(policy || reference) of each next token: sum_v p_v (log p_v - log q_v)."""
    return (logp.exp() * (logp - ref_logp)).sum(-1)


def token_rewards(state: State, kl: Tensor, score: float) -> Tensor:
    """Return r_t = -kl_coef KL_t, plus the score at the last token (Ziegler et al. 2019, arXiv 1909.08593, 2.1).

    With kl_in loss the reward has no KL term.
    """
    coefficient = 0.0 if state.settings.kl_in == "loss" else state.kl_coef
    rewards = -coefficient * kl
    rewards[-1] += score
    return rewards


def whitened(rows: list[Tensor], *, keep_mean: bool) -> list[Tensor]:
    """Return (x - mean) / sqrt(variance + 1e-8) over all tokens, unbiased variance; plus the mean with keep_mean.

    Ziegler et al. 2019's code, lm-human-preferences, `whiten`; Huang et al. 2024 (arXiv 2403.17031), section 7.
    """
    tokens = torch.cat(rows)
    mean = tokens.mean()
    variance = ((tokens - mean) ** 2).sum() / max(len(tokens) - 1, 1)
    shift = mean if keep_mean else 0.0
    return [(x - mean) / torch.sqrt(variance + 1e-8) + shift for x in rows]


def gae(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    """Return A_t = sum_l (gamma lam)^l delta_{t+l}, delta_t = r_t + gamma V_{t+1} - V_t, V = 0 after the last token.

    Schulman et al. 2016 (arXiv 1506.02438), equations 11 and 16, as a double sum.
    """
    following = torch.cat([values[1:], torch.zeros(1)])
    delta = (rewards + gamma * following - values).tolist()
    advantages = []
    for t in range(len(delta)):
        terms = [(gamma * lam) ** steps * later for steps, later in enumerate(delta[t:])]
        advantages.append(sum(terms))
    return torch.tensor(advantages)


def group_advantages(state: State, rewards: list[Tensor]) -> list[Tensor]:
    """Return the advantage of each response, at all its tokens, by the returns of the responses to its prompt.

    rloo: the return minus the mean of the others (Ahmadian et al. 2024, arXiv 2402.14740). grpo: (return - mean) / (std
    + 1e-4) with the unbiased standard deviation (Shao et al. 2024, arXiv 2402.03300, section 4.1.2; TRL's 1e-4).
    """
    samples = state.settings.num_samples_per_prompt
    returns = [float(row.sum()) for row in rewards]
    advantages = []
    for row, own in enumerate(returns):
        first = row - row % samples
        group = returns[first : first + samples]
        if state.settings.advantage == "rloo":
            others = returns[first:row] + returns[row + 1 : first + samples]
            advantage = own - fmean(others)
        else:
            advantage = (own - fmean(group)) / (stdev(group) + 1e-4)
        advantages.append(torch.full_like(rewards[row], advantage))
    return advantages
