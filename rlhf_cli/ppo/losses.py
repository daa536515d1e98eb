"""All equations of PPO: log-probs, KL, rewards, advantages, losses. Tensors in, tensors out; no models, no settings.

Shapes: B rows, R response tokens, V vocabulary; a function without masks works on any shape.
Masks are bool, True = counts, and select by `torch.where`: values on padding, NaN included, have no effect.
Log-probs, KL and entropies are in nats (natural logarithm).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rlhf_cli.models.batch import StopTokenId, is_stop


def response_mask(ids: Tensor, stop_token_id: StopTokenId) -> Tensor:
    """Return the mask (B, R) of ids (B, R): True through the first stop token; all True without stop tokens."""
    stops = is_stop(ids, stop_token_id).int()
    return stops.cumsum(1) - stops == 0


def log_probs(logits: Tensor, temperature: float) -> Tensor:
    """Return log softmax(logits / temperature), (..., V), in float32 or the wider dtype of the logits."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.log_softmax(wide if temperature == 1.0 else wide / temperature, -1)


def gather_logprobs(log_probs: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probability (...) of `ids` (...) under log-probs (..., V)."""
    return log_probs.gather(-1, ids[..., None])[..., 0]


def token_logprobs(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """Return z_i - logsumexp(z) with z = logits / temperature: the log-probability (...) of `ids` (...)."""
    return gather_logprobs(log_probs(logits, temperature), ids)


def entropy(log_probs: Tensor) -> Tensor:
    """Return the entropy (...) of log-probs (..., V) in nats: -sum_i p_i log p_i."""
    finite = log_probs.clamp(min=torch.finfo(log_probs.dtype).min)  # 0 log 0 is 0, and so is its gradient
    return -(log_probs.exp() * finite).sum(-1)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the mask, a scalar. The mask must have at least one True."""
    return torch.where(mask, x, 0).sum() / mask.sum()


def masked_var(x: Tensor, mask: Tensor, *, unbiased: bool = True) -> Tensor:
    """Return the variance over the mask, a scalar; `unbiased` divides by n - 1."""
    n = mask.sum()
    squares = torch.where(mask, (x - masked_mean(x, mask)) ** 2, 0).sum()
    return squares / (n - 1).clamp(min=1) if unbiased else squares / n


WHITENING_EPS = 1e-8  # added to the variance


def masked_whiten(x: Tensor, mask: Tensor, *, shift_mean: bool = True) -> Tensor:
    """Return (x - mean) / sqrt(var + WHITENING_EPS) over the mask, 0 elsewhere; `shift_mean=False` adds the mean back.

    `whiten` of lm-human-preferences (Ziegler et al. 2019), with TRL's unbiased variance in place of the biased one.
    """
    mean = masked_mean(x, mask)
    white = (x - mean) * torch.rsqrt(masked_var(x, mask) + WHITENING_EPS)
    return torch.where(mask, white if shift_mean else white + mean, 0)


def whitening_scale(x: Tensor, mask: Tensor) -> float:
    """Return sqrt(var + WHITENING_EPS) over the mask, by which `masked_whiten` divides."""
    return float((masked_var(x, mask) + WHITENING_EPS).sqrt())


# KL(pi || ref) of a token sampled from pi, from r = log ref - log pi alone, (...) -> (...) (Schulman 2020,
# "Approximating KL divergence").
KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda r: -r,
    "k2": lambda r: r**2 / 2,
    "k3": lambda r: torch.expm1(r) - r,
    "abs": lambda r: r.abs(),
}


def token_kl(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimate KL(pi || ref) at each token (...) in nats, for samples of pi; `estimator` is a key of KL_ESTIMATORS."""
    return KL_ESTIMATORS[estimator](ref_logprobs - logprobs)


def exact_kl(logits: Tensor, ref_logits: Tensor, temperature: float) -> Tensor:
    """Return KL(pi || ref) = sum_v pi(v) (log pi(v) - log ref(v)) at each position in nats; (..., V) -> (...)."""
    logp = log_probs(logits, temperature)
    ref = log_probs(ref_logits, temperature)
    # 0 log 0 is 0; masked before the product, or the gradient would be 0 * inf
    return (logp.exp() * torch.where(logp > -torch.inf, logp - ref, 0)).sum(-1)


# The loss of kl_in loss, from k2 and k3, (...) -> (...). k2 has the KL's gradient at the sampled token:
# grad (r^2 / 2) = -r grad logp = log(pi / ref) grad logp. k3 is unbiased, so a straight-through estimator
# combines them.
KL_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k2": lambda k2, k3: k2,
    "k3": lambda k2, k3: k2 + (k3 - k2).detach(),
}


def token_kl_loss(logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Return the KL penalty as a loss at each token (...), for samples of the old policy.

    `estimator` is a key of KL_LOSSES. The importance ratio pi / pi_old has no gradient; it is 1 on the first step.
    """
    k2 = token_kl(logprobs, ref_logprobs, "k2")
    k3 = token_kl(logprobs, ref_logprobs, "k3")
    ratio = torch.exp(logprobs - old_logprobs).detach()
    return ratio * KL_LOSSES[estimator](k2, k3)


def compute_token_rewards(scores: Tensor, penalty: Tensor, mask: Tensor) -> Tensor:
    """Return rewards (B, R): `-penalty` (B, R) at each token, plus the row's score (B,) at its last real token.

    Ziegler et al. 2019, section 2.1: R(x, y) = r(x, y) - beta log(pi(y|x) / rho(y|x)).
    """
    index = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, index, -1).amax(1, keepdim=True)
    return torch.where(mask, -penalty, 0) + torch.where(index == last, scores[:, None], 0)


def overlong_fraction(lengths: Tensor, limit: int, tokens: int) -> Tensor:
    """Return max(0, length - (limit - tokens)) / tokens, (B,), 0 to 1: use of the last `tokens` before the limit.

    Yu et al. 2025 (DAPO, arXiv 2503.14476), equation 13.
    """
    return (lengths - (limit - tokens)).clamp(min=0) / tokens


def adapt_kl_coef(kl_coef: float, kl: float, *, target: float, episodes: int, horizon: int) -> float:
    """Return the next KL coefficient, kl_coef (1 + clip(kl / target - 1, -0.2, 0.2) episodes / horizon).

    `kl` and `target` are in nats per response; `episodes` is the number in the last update.

    Ziegler et al. 2019, section 2.2; TRL 0.11's AdaptiveKLController.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * episodes / horizon)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return advantages and returns, each (B, R), by generalised advantage estimation; 0 outside the mask.

    Schulman et al. 2016 (arXiv 1506.02438), equations 11, 12 and 16. Index t is a response token: values[t] is the
    value before it, rewards[t] its reward, and the value after the last real token is 0.

        delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lam A_{t+1}        returns_t = A_t + V_t

    Tokens outside the mask are skipped: t + 1 is the next token in the mask.
    """
    advantages = torch.zeros_like(values)
    advantage = torch.zeros_like(values[:, 0])
    next_value = torch.zeros_like(advantage)
    for t in reversed(range(values.shape[1])):
        counts = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = torch.where(counts, delta + gamma * lam * advantage, advantage)
        next_value = torch.where(counts, values[:, t], next_value)
        advantages[:, t] = torch.where(counts, advantage, 0)
    return advantages, torch.where(mask, advantages + values, 0)


# Advantages and returns with a value model: (rewards, values, mask, gamma, lam) -> both (B, R).
VALUE_ADVANTAGES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"gae": gae}


def rloo(returns: Tensor) -> Tensor:
    """Return each response's return minus the mean of the others to the same prompt, (prompts, k) -> (prompts, k).

    REINFORCE leave-one-out (Kool et al. 2019; for language models Ahmadian et al. 2024, arXiv 2402.14740):

        A_i = R_i - sum_{j != i} R_j / (k - 1) = sum_j (R_i - R_j) / (k - 1)

    The differences of equal returns are exactly 0.
    """
    return (returns[:, :, None] - returns[:, None, :]).sum(2) / (returns.shape[1] - 1)


def grpo(returns: Tensor) -> Tensor:
    """Return (R_i - mean) / (std + 1e-4) over the k responses to a prompt, (prompts, k) -> (prompts, k).

    Outcome supervision of GRPO (Shao et al. 2024, arXiv 2402.03300, section 4.1.2). The standard deviation is unbiased,
    and its 1e-4 that of TRL 1.16, trl/trainer/grpo_trainer.py. Equal returns give exactly 0.
    """
    centred = (returns[:, :, None] - returns[:, None, :]).mean(2)
    return centred / (returns.std(1, keepdim=True) + 1e-4)


# Advantages without a value model, from the returns of k > 1 responses to each prompt, (prompts, k) -> (prompts, k).
GROUP_ADVANTAGES: dict[str, Callable[[Tensor], Tensor]] = {"rloo": rloo, "grpo": grpo}


def group_advantages(rewards: Tensor, mask: Tensor, samples: int, estimator: str) -> Tensor:
    """Return advantages (B, R) of rewards (B, R): each row's, at all its tokens in the mask, and 0 outside.

    Rows are groups of `samples` adjacent responses to a prompt; a response's return is the sum of its token rewards.
    `estimator` is a key of GROUP_ADVANTAGES.
    """
    returns = torch.where(mask, rewards, 0).sum(1).view(-1, samples)
    advantages = GROUP_ADVANTAGES[estimator](returns).flatten()
    return torch.where(mask, advantages[:, None], 0)


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    cliprange: float,
    cliprange_high: float | None = None,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return PPO's clipped surrogate loss at each token, as (loss, ratio, clipped), each (...).

    -min(ratio A, clip(ratio, 1 - eps, 1 + eps_high) A), ratio = pi / pi_old (Schulman et al. 2017, equation 7). With
    `dual_clip` c the loss of a negative advantage is at most -c A (Ye et al. 2020, arXiv 1912.09729, equation 5).
    `clipped` is True where a bound is active.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    unclipped_loss = -advantages * ratio
    upper = cliprange if cliprange_high is None else cliprange_high
    clipped_loss = -advantages * ratio.clamp(1 - cliprange, 1 + upper)
    loss = torch.max(unclipped_loss, clipped_loss)
    clipped = clipped_loss > unclipped_loss
    if dual_clip is not None:
        ceiling = torch.where(advantages < 0, -dual_clip * advantages, torch.inf)
        clipped = clipped | (loss > ceiling)
        loss = torch.min(loss, ceiling)
    return loss, ratio, clipped


def correction_weights(log_ratio: Tensor, mask: Tensor, mode: str, cap: float) -> tuple[Tensor, Tensor]:
    """Return the weights (B, R) of the surrogate loss, 0 outside the mask, and which ratios exceed `cap`.

    The ratios w = pi_old / mu are exp(log_ratio), (B, R); the engine draws from mu. token_truncate: min(w, cap), which
    of the response tokens, (T,) (Ionides 2008, "Truncated importance sampling"; Yao et al. 2025, "Your efficient RL
    framework secretly brings you off-policy RL training"). sequence_mask: at each token the product of the row's
    ratios, or 0 if it exceeds the cap, which rows, (B,). As TRL 1.16, grpo_trainer.py, vllm_importance_sampling_mode:
    the weights are constants and multiply the clipped surrogate, but neither the KL in the loss nor the entropy bonus.
    """
    log_ratio = torch.where(mask, log_ratio, 0)
    if mode == "token_truncate":
        ratio = log_ratio.exp()
        return torch.where(mask, ratio.clamp(max=cap), 0), (ratio > cap)[mask]
    ratio = log_ratio.sum(1, keepdim=True).exp()
    return torch.where(mask & (ratio <= cap), ratio, 0), (ratio > cap)[:, 0]


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, cliprange_value: float) -> tuple[Tensor, Tensor]:
    """Return the clipped value loss at each token, as (loss, clipped), each (...).

    max((v - R)^2, (clip(v, v_old - eps, v_old + eps) - R)^2) / 2. OpenAI baselines, ppo2/model.py; Huang et al. 2024
    (arXiv 2403.17031), section 7.
    """
    clipped_values = torch.clamp(values, old_values - cliprange_value, old_values + cliprange_value)
    unclipped_error = (values - returns) ** 2
    clipped_error = (clipped_values - returns) ** 2
    return torch.max(unclipped_error, clipped_error) / 2, clipped_error > unclipped_error


def approx_kl(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return (logp - logp_old)^2 / 2 at each token: TRL's measure of the policy change in an update."""
    return (logprobs - old_logprobs) ** 2 / 2


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Return 1 - Var(returns - values) / Var(returns) over the mask, a scalar.

    1 is perfect, 0 no better than a constant. Returns that differ only by rounding give 0.
    """
    variance = masked_var(returns, mask, unbiased=False)
    unexplained = masked_var(returns - values, mask, unbiased=False) / variance
    return torch.where(variance > 1e-12 * masked_mean(returns**2, mask), 1 - unexplained, 0)
