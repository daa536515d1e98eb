"""All the arithmetic of PPO. Tensors in, tensors out; no models, no settings.

Shapes: B rows, R response steps, V vocabulary; a function without masks works on any shape.
Masks are bool, True = counts, and select by `torch.where`: whatever stands on padding, NaN included, cannot leak.
Log-ratios are r = logp_ref - logp with samples from the policy, natural logarithms, nats.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def response_mask(ids: Tensor, stop_token_id: int | None) -> Tensor:
    """Response tokens (B, R) that count: through the first stop token; all of them where there is no stop token."""
    if stop_token_id is None:
        return torch.ones_like(ids, dtype=torch.bool)
    stops = (ids == stop_token_id).int()
    return stops.cumsum(1) - stops == 0


def scaled(logits: Tensor, temperature: float) -> Tensor:
    """logits / temperature, (..., V), in float32, or wider where the logits are."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide if temperature == 1.0 else wide / temperature


def log_probs(logits: Tensor, temperature: float) -> Tensor:
    """Log of the full softmax of logits (..., V) / temperature."""
    return torch.log_softmax(scaled(logits, temperature), -1)


def picked(log_probs: Tensor, ids: Tensor) -> Tensor:
    """Log-probability (...) of `ids` (...) under log-probs (..., V)."""
    return log_probs.gather(-1, ids[..., None])[..., 0]


def token_logprobs(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """Log-probability (...) of `ids` (...) under the full softmax of z = logits / temperature: z_i - logsumexp(z)."""
    return picked(log_probs(logits, temperature), ids)


def entropy(log_probs: Tensor) -> Tensor:
    """Entropy (...) of log-probs (..., V) in nats: -sum_i p_i log p_i."""
    finite = log_probs.clamp(min=torch.finfo(log_probs.dtype).min)  # 0 log 0 is 0, and so is its slope
    return -(log_probs.exp() * finite).sum(-1)


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, x, 0).sum()


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over the mask, a scalar. The mask must hold at least one True."""
    return masked_sum(x, mask) / mask.sum()


def masked_var(x: Tensor, mask: Tensor, *, unbiased: bool = True) -> Tensor:
    """Variance over the mask, a scalar; `unbiased` divides by n - 1."""
    n = mask.sum()
    squares = torch.where(mask, (x - masked_mean(x, mask)) ** 2, 0).sum()
    return squares / (n - 1).clamp(min=1) if unbiased else squares / n


def masked_whiten(x: Tensor, mask: Tensor, *, shift_mean: bool = True, eps: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(var + eps) over the mask, unbiased variance; 0 outside. Unless `shift_mean` the mean is kept.

    `whiten` of lm-human-preferences (Ziegler et al. 2019), with TRL's unbiased variance in place of the biased one.
    """
    mean = masked_mean(x, mask)
    white = (x - mean) * torch.rsqrt(masked_var(x, mask) + eps)
    return torch.where(mask, white if shift_mean else white + mean, 0)


# KL(pi || ref) of a token from its log-probs alone (Schulman 2020, "Approximating KL divergence"), each (...) -> (...).
KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda r: -r,
    "k2": lambda r: r**2 / 2,
    "k3": lambda r: torch.expm1(r) - r,
    "abs": lambda r: r.abs(),
}


def kl_tokens(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """Estimate of KL(pi || ref) at each token (...), nats, for samples of pi; `kind` is a key of KL_ESTIMATORS."""
    return KL_ESTIMATORS[kind](ref_logprobs - logprobs)


def kl_full(logits: Tensor, ref_logits: Tensor, temperature: float) -> Tensor:
    """Exact KL(pi || ref) = sum_v pi(v) (log pi(v) - log ref(v)) at each position; logits (..., V) -> (...)."""
    logp, ref = log_probs(logits, temperature), log_probs(ref_logits, temperature)
    # 0 log 0 is 0; picked before the product, or the gradient would be 0 * inf
    return (logp.exp() * torch.where(logp > -torch.inf, logp - ref, 0)).sum(-1)


def kl_loss_tokens(logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """The KL penalty as a loss at each token (...), for samples of the old policy.

    k2 has the KL's gradient at the sampled token: grad (r^2 / 2) = -r grad logp = log(pi / ref) grad logp. k3 has the
    better value, so it is taken straight through: k2 + (k3 - k2).detach(). The importance ratio pi / pi_old carries no
    gradient; it is 1 on the first step.
    """
    k2, k3 = (kl_tokens(logprobs, ref_logprobs, name) for name in ("k2", "k3"))
    loss = k2 if kind == "k2" else k2 + (k3 - k2).detach()
    return torch.exp(logprobs - old_logprobs).detach() * loss


def shape_rewards(scores: Tensor, penalty: Tensor, mask: Tensor) -> Tensor:
    """Token rewards (B, R): `-penalty` (B, R) at each token, and the row's score (B,) on top at its last real token.

    Ziegler et al. 2019, section 2.1: R(x, y) = r(x, y) - beta log(pi(y|x) / rho(y|x)).
    """
    steps = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, steps, -1).amax(1, keepdim=True)
    return torch.where(mask, -penalty, 0) + torch.where(steps == last, scores[:, None], 0)


def overlong(lengths: Tensor, limit: int, tokens: int) -> Tensor:
    """How far each response reaches into the last `tokens` before its limit, (B,): max(0, l - (limit - n)) / n, 0 to 1.

    Yu et al. 2025 (DAPO, arXiv 2503.14476), equation 13.
    """
    return (lengths - (limit - tokens)).clamp(min=0) / tokens


def adapted_kl_coef(kl_coef: float, kl: float, *, target: float, episodes: int, horizon: int) -> float:
    """The next KL coefficient: kl_coef (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon), n episodes just seen.

    Ziegler et al. 2019, section 2.2; TRL 0.11's AdaptiveKLController.
    """
    return kl_coef * (1 + min(max(kl / target - 1, -0.2), 0.2) * episodes / horizon)


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    cliprange: float,
    cliprange_high: float | None = None,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Clipped surrogate at each token, to be minimised; returns (loss, ratio, clipped), each (...).

    -min(ratio A, clip(ratio, 1 - eps, 1 + eps_high) A), ratio = pi / pi_old (Schulman et al. 2017, equation 7). With
    `dual_clip` c the loss of a negative advantage is at most -c A (Ye et al. 2020, arXiv 1912.09729, equation 5).
    `clipped` is where a bound is the active branch.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - cliprange, 1 + (cliprange if cliprange_high is None else cliprange_high))
    loss, clipped = torch.max(plain, bounded), bounded > plain
    if dual_clip is not None:
        ceiling = torch.where(advantages < 0, -dual_clip * advantages, torch.inf)
        loss, clipped = torch.min(loss, ceiling), clipped | (loss > ceiling)
    return loss, ratio, clipped


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, cliprange_value: float) -> tuple[Tensor, Tensor]:
    """Clipped value loss at each token; returns (loss, clipped), each (...).

    max((v - R)^2, (clip(v, v_old - eps, v_old + eps) - R)^2) / 2. OpenAI baselines, ppo2/model.py; Huang et al. 2024
    (arXiv 2403.17031), section 7.
    """
    bounded = torch.clamp(values, old_values - cliprange_value, old_values + cliprange_value)
    plain_error, bounded_error = (values - returns) ** 2, (bounded - returns) ** 2
    return torch.max(plain_error, bounded_error) / 2, bounded_error > plain_error


def approx_kl(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """TRL's gauge of how far an update went: (logp - logp_old)^2 / 2 at each token."""
    return (logprobs - old_logprobs) ** 2 / 2


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """1 - Var(returns - values) / Var(returns) over the mask.

    1 is perfect, 0 no better than a constant. 0 where returns do not vary by more than rounding.
    """
    spread = masked_var(returns, mask, unbiased=False)
    share = masked_var(returns - values, mask, unbiased=False) / spread
    return torch.where(spread > 1e-12 * masked_mean(returns**2, mask), 1 - share, 0)
