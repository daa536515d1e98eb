"""Reference implementation of a PPO update: the losses of a row, the optimizer steps, and the update's metrics."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from statistics import fmean, pstdev, pvariance
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_cli.commands.verify.reference import (
    Adam,
    Quantities,
    ReferenceExperience,
    ReferenceState,
    ended,
    full_kl,
    log_probs,
    make_experience,
    of_tokens,
    response_logits,
    response_values,
)
from rlhf_cli.config.ppo import PPOSettings
from rlhf_cli.data.sampling import derive_seed

Step = dict[str, float]  # metrics of an optimizer step

# 5. Losses of a row


def row_losses(state: ReferenceState, experience: ReferenceExperience, row: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of each response token, (T,) with gradient, and the metrics of each, (T,)."""
    settings = state.settings
    with torch.set_grad_enabled(state.policy_is_trained):
        logp = log_probs(state, state.policy, row)
    logprobs, old = of_tokens(logp, state.responses[row]), experience.logprobs[row]
    ratio = torch.exp(logprobs - old)
    surrogate, clipped = clipped_surrogate(settings, ratio, experience.advantages[row])
    surrogate = rollout_correction(state, experience, row)[0] * surrogate
    entropy = -(logp.exp() * logp).sum(-1)
    policy = surrogate - settings.entropy_coef * entropy
    if settings.kl_in == "loss":
        policy = policy + state.kl_coef * kl_loss(state, row, logp, old, experience.ref_logprobs[row])
    loss = policy if state.policy_is_trained else torch.zeros_like(policy)
    token_metrics = {
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
        token_metrics |= {"loss/value_avg": error, "val/clipfrac_avg": value_clipped}
    return loss, token_metrics


def clipped_surrogate(settings: PPOSettings, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Return -min(ratio A, clip(ratio, 1 - eps, 1 + eps_high) A), and if it is clipped (Schulman et al. 2017, eq. 7).

    eps_high is cliprange unless cliprange_high is set (Yu et al. 2025, arXiv 2503.14476, section 3.1). With
    dual_clip c and A < 0 the objective is at least c A (Ye et al. 2020, arXiv 1912.09729, equation 5).
    """
    high = settings.cliprange if settings.cliprange_high is None else settings.cliprange_high
    objective, bounded = ratio * advantages, torch.clamp(ratio, 1 - settings.cliprange, 1 + high) * advantages
    clipped = bounded < objective
    objective = torch.where(clipped, bounded, objective)
    if settings.dual_clip is not None:
        least = settings.dual_clip * advantages
        too_low = (advantages < 0) & (objective < least)
        objective, clipped = torch.where(too_low, least, objective), clipped | too_low
    return -objective, clipped


def rollout_correction(state: ReferenceState, experience: ReferenceExperience, row: int) -> tuple[Tensor, Tensor]:
    """Return the weight of each token, (T,), and which ratios of policy to engine exceed the cap of rollout_correction.

    token_truncate: min(ratio, cap) (Ionides 2008, "Truncated importance sampling"). sequence_mask: the product of the
    row's ratios, 0 above the cap (TRL 1.16, trl/trainer/grpo_trainer.py).
    """
    if (option := state.settings.rollout_correction) is None:
        return torch.ones(len(state.responses[row])), torch.zeros(1)
    ratios = torch.exp(experience.logprobs[row] - state.drawn_logprobs[row])
    if option.mode == "token_truncate":
        return torch.where(ratios > option.cap, option.cap, ratios), ratios > option.cap
    product = ratios.prod()
    return torch.ones_like(ratios) * (product if product <= option.cap else 0.0), product[None] > option.cap


def value_error(settings: PPOSettings, values: Tensor, old: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return max((V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2) / 2, and if the clipped term is larger.

    OpenAI baselines, ppo2; Huang et al. 2024 (arXiv 2403.17031), section 7.
    """
    unclipped = (values - target) ** 2
    bounded = (torch.clamp(values, old - settings.cliprange_value, old + settings.cliprange_value) - target) ** 2
    return torch.where(bounded > unclipped, bounded, unclipped) / 2, bounded > unclipped


def kl_loss(state: ReferenceState, row: int, logp: Tensor, old: Tensor, ref: Tensor) -> Tensor:
    """Return the KL penalty of kl_in loss: exact for `full`; else k2 or k3, times the detached importance ratio.

    k3 has k2's gradient: grad k2 = (log pi - log ref) grad log pi is the KL's gradient at a sampled token.
    """
    if state.settings.kl_estimator == "full":
        with torch.no_grad():
            ref_logp = log_probs(state, state.ref, row)
        return full_kl(logp, ref_logp)
    logprobs = of_tokens(logp, state.responses[row])
    r = ref - logprobs
    k2, k3 = r * r / 2, torch.exp(r) - 1 - r
    loss = {"k2": k2, "k3": k2 + (k3 - k2).detach()}[state.settings.kl_estimator]
    return torch.exp(logprobs - old).detach() * loss


# 6. Optimizer steps: epochs over minibatches


def run_optimizer_steps(
    state: ReferenceState, experience: ReferenceExperience, tick: Callable[[], None]
) -> tuple[list[Step], int]:
    """Run all optimizer steps of the update; return their metrics and the number of epochs."""
    settings = state.settings
    set_trainable(state)
    steps: list[Step] = []
    for epoch in range(settings.num_ppo_epochs):
        steps += [optimizer_step(state, experience, rows, epoch, tick) for rows in minibatches(state, epoch)]
        if settings.early_stopping and steps[-1]["policy/policykl"] > 1.5 * settings.target_kl:
            return steps, epoch + 1
    return steps, settings.num_ppo_epochs


def set_trainable(state: ReferenceState) -> None:
    """Make all weights of policy and value trainable, except the embeddings and first num_shared_layers layers.

    A model with adapters (LoRA, arXiv 2106.09685) trains only these and its own head.
    """
    for model in state.models.values():
        names = [name for name, _ in model.named_parameters()]
        adapters = any(".lora_A." in name for name in names)
        for name, w in model.named_parameters():
            w.requires_grad_(not adapters or ".lora_" in name or ".modules_to_save." in name)
    if count := state.settings.num_shared_layers:
        layers = state.policy.config.get_text_config().num_hidden_layers
        for module in state.policy.modules():
            if isinstance(module, nn.Embedding):
                module.requires_grad_(False)
            if isinstance(module, nn.ModuleList) and len(module) == layers:
                for layer in module[:count]:
                    layer.requires_grad_(False)


def minibatches(state: ReferenceState, epoch: int) -> Iterator[list[int]]:
    """Yield the rows in random order, in num_mini_batches parts of equal size."""
    generator = torch.Generator().manual_seed(derive_seed(state.seed, "minibatches", state.update, epoch))
    order = torch.randperm(len(state.prompts), generator=generator).tolist()
    size = len(order) // state.settings.num_mini_batches
    for first in range(0, len(order), size):
        yield order[first : first + size]


def optimizer_step(
    state: ReferenceState, experience: ReferenceExperience, rows: list[int], epoch: int, tick: Callable[[], None]
) -> Step:
    """Take a step of AdamW on the mean loss of a minibatch's response tokens; return its metrics.

    The step is skipped if the mean ratio exceeds ratio_threshold.
    """
    settings = state.settings
    for model in state.models.values():
        model.zero_grad(set_to_none=True)
    tokens = sum(len(state.responses[row]) for row in rows)
    means: Step = defaultdict(float)
    first_error = 0.0
    for row in rows:
        losses, token_metrics = row_losses(state, experience, row)
        (losses.sum() / tokens).backward()
        first_error = max(first_error, float((token_metrics["val/ratio"].detach() - 1).abs().max()))
        for name, metric in token_metrics.items():
            means[name] += float(metric.detach().sum()) / tokens
        tick()
    if settings.ptx_coef and state.policy_is_trained:
        means["loss/ptx_avg"] = language_model_loss(state, rows, epoch)
    skipped = settings.ratio_threshold is not None and means["val/ratio"] > settings.ratio_threshold
    if not skipped:
        for name, model in state.models.items():
            means[f"{name}/grad_norm"] = clip(model, settings.max_grad_norm)
            adamw(state, name, model)
    return {**means, "ratio_error": first_error, "skipped": float(skipped)}


def language_model_loss(state: ReferenceState, rows: list[int], epoch: int) -> float:
    """Add the gradient of ptx_coef times the mean of -log p(token) over completions of ptx rows; return that mean.

    Ouyang et al. 2022 (arXiv 2203.02155), equation 2. One ptx row is sampled for each episode of the minibatch.
    """
    draws = [derive_seed(state.seed, "ptx", state.update, epoch, row) for row in rows]
    pairs = [state.ptx[draw % len(state.ptx)] for draw in draws]
    tokens = sum(len(completion) for _, completion in pairs)
    total = 0.0
    for prompt, completion in pairs:
        logp = torch.log_softmax(response_logits(state.policy, prompt, completion), -1)
        loss = -of_tokens(logp, completion).sum() / tokens
        (state.settings.ptx_coef * loss).backward()
        total += loss.item()
    return total


def clip(model: Any, limit: float) -> float:
    """Scale a model's gradient down to the norm `limit` if it is larger; return its norm before.

    g min(1, limit / (|g| + 1e-6)): Pascanu et al. 2013 (arXiv 1211.5063), algorithm 1, with torch's 1e-6.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = math.sqrt(sum(float((g * g).sum()) for g in gradients))
    for gradient in gradients:
        gradient *= min(1.0, limit / (norm + 1e-6))
    return norm


@torch.no_grad()
def adamw(state: ReferenceState, name: str, model: Any) -> None:
    """Take a step of AdamW on each parameter with a gradient (Loshchilov and Hutter 2019, arXiv 1711.05101, alg. 2).

    m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2        m' = m / (1 - b1^t)        v' = v / (1 - b2^t)
    w = w - lr decay w - lr m' / (sqrt(v') + eps); no decay of 1-D parameters (biases, norms).
    """
    settings = state.settings
    lr = learning_rate(state, name)
    b1, b2 = settings.adam_beta1, settings.adam_beta2
    for parameter, w in model.named_parameters():
        if (g := w.grad) is None:
            continue
        moments = state.adam[name].setdefault(parameter, Adam(torch.zeros_like(w), torch.zeros_like(w), 0))
        moments.updates += 1
        moments.first = b1 * moments.first + (1 - b1) * g
        moments.second = b2 * moments.second + (1 - b2) * g * g
        first = moments.first / (1 - b1**moments.updates)
        second = moments.second / (1 - b2**moments.updates)
        decay = settings.weight_decay if w.ndim >= 2 else 0.0
        w.copy_(w - lr * decay * w - lr * first / (second.sqrt() + settings.adam_epsilon))


@torch.no_grad()
def average_policy(state: ReferenceState) -> None:
    """Average the policy's weights: a = d a + (1 - d) w, the decay d being `average` (Polyak and Juditsky 1992)."""
    d = state.settings.average or 0.0
    policy = dict(state.policy.named_parameters())
    for name, value in state.average.items():
        state.average[name] = d * value + (1 - d) * policy[name].cpu()


def learning_rate(state: ReferenceState, name: str) -> float:
    """Return the learning rate of `policy` or `value` in this update.

    k is the update's index, n the number of updates, w of which are linear warm-up (transformers, optimization.py).
    The policy's schedule starts after value_only_updates.
    """
    settings = state.settings
    value_rate = settings.value_learning_rate if name == "value" else None
    peak = settings.learning_rate if value_rate is None else value_rate
    offset = settings.value_only_updates if name == "policy" else 0
    k = max(state.update - offset, 0)
    n = state.updates - offset

    if name == "value" and settings.value_warmup_steps is not None:
        w = settings.value_warmup_steps
    elif settings.warmup_steps is not None:
        w = settings.warmup_steps
    else:
        w = math.ceil((settings.warmup_ratio or 0.0) * n)

    if settings.lr_scheduler_type == "constant":
        return peak
    if k < w:
        return peak * k / w
    progress = (k - w) / max(1, n - w)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    end = 1e-7 if peak > 1e-7 else 0.0  # of the polynomial schedule
    return {
        "constant_with_warmup": peak,
        "linear": peak * max(0.0, 1 - progress),
        "cosine": peak * cosine,
        "cosine_with_min_lr": peak * (0.1 + 0.9 * cosine),
        "polynomial": (peak - end) * (1 - progress) + end,
        "inverse_sqrt": peak / math.sqrt((k - w + (w or 10_000)) / (w or 10_000)),
    }[settings.lr_scheduler_type]


# 7. Metrics of an update (metrics.jsonl)


def metrics(state: ReferenceState, experience: ReferenceExperience, steps: list[Step], epochs: int) -> Quantities:
    """Return the metrics: sums over a response's tokens, means over rows and over the optimizer steps."""
    rows = len(state.prompts)
    kl = mean_sum(experience.kl)
    score = fmean(experience.scores)
    kl_penalty = -state.kl_coef * kl if state.settings.kl_in == "reward" else 0.0
    entropy = -mean_sum(experience.logprobs)
    ends = sum(ended(state, response) for response in state.responses)
    lengths = [len(response) for response in state.responses]
    raw_means = {name: fmean(raw) for name, raw in experience.scored.items() if raw}
    unscored = {name: 1 - len(raw) / rows for name, raw in experience.scored.items() if len(raw) < rows}
    values = {
        "episode": float((state.update + 1) * rows),
        "objective/kl": kl,
        "objective/kl_k1": -entropy - mean_sum(experience.ref_logprobs),
        "objective/entropy": entropy,
        "objective/non_score_reward": kl_penalty,
        "objective/rlhf_reward": kl_penalty + score,
        "objective/scores": score,
        **{f"objective/score/{name}": mean for name, mean in raw_means.items()},
        **{f"objective/unscored/{name}": share for name, share in unscored.items()},
        **disagreements(state, experience),
        **engine_metrics(state, experience),
        "objective/kl_coef": state.kl_coef,
        "objective/response_length": sum(lengths) / rows,
        "objective/eos_fraction": ends / rows,
        "objective/repetition": fmean(map(repetition, state.responses)),
        "val/num_eos_tokens": float(ends),
        **({"val/explained_variance": explained_variance(experience)} if experience.returns else {}),
        "tokens/real": float(sum(lengths) + sum(len(prompt) for prompt in state.prompts)),
        **mean_metrics(steps),
        "policy/epochs": float(epochs),
        **{"lr" if name == "policy" else f"{name}/lr": learning_rate(state, name) for name in state.models},
        "next kl_coef": next_kl_coef(state, kl),
    }
    return {name: [value] for name, value in values.items()}


def disagreements(state: ReferenceState, experience: ReferenceExperience) -> dict[str, float]:
    """Return the mean score of each ensemble member, and the mean over rows of the deviation between members."""
    values: dict[str, float] = {}
    for name, members in experience.member_scores.items():
        if state.sources[name].combine is not None:
            for member, raw in members.items():
                values[f"objective/score/{name}/{member}"] = fmean(raw)
            deviations = [pstdev(row) for row in zip(*members.values(), strict=True)]
            values[f"objective/disagreement/{name}"] = fmean(deviations)
    return values


def engine_metrics(state: ReferenceState, experience: ReferenceExperience) -> dict[str, float]:
    """Return the distance of the engine's log-probs from the policy's, and the means of rollout_correction."""
    gap = (torch.cat(experience.logprobs) - torch.cat(state.drawn_logprobs)).abs()
    index_p99 = math.ceil(0.99 * len(gap)) - 1
    values = {
        "rollout/logprob_gap": float(gap.mean()),
        "rollout/logprob_gap_p99": float(gap.sort().values[index_p99]),
    }
    if state.settings.rollout_correction is not None:
        corrections = [rollout_correction(state, experience, row) for row in range(len(state.responses))]
        weights = torch.cat([weight for weight, _ in corrections])
        capped = torch.cat([is_capped for _, is_capped in corrections])
        values["rollout/correction_mean"] = float(weights.mean())
        values["rollout/correction_capped"] = float(capped.double().mean())
    return values


def repetition(response: list[int]) -> float:
    """Return the share of trigrams that occurred earlier in the response."""
    trigrams = [tuple(response[i : i + 3]) for i in range(len(response) - 2)]
    if not trigrams:
        return 0.0
    repeated = [trigram in trigrams[:i] for i, trigram in enumerate(trigrams)]
    return sum(repeated) / len(trigrams)


def mean_sum(rows: list[Tensor]) -> float:
    return fmean(float(row.sum()) for row in rows)


def mean_metrics(steps: list[Step]) -> Step:
    """Return the means over the steps, without those skipped by ratio_threshold unless all were skipped."""
    counted = [step for step in steps if not step["skipped"]] or steps
    means = {name: fmean(step[name] for step in counted) for name in counted[0]}
    if all(step["skipped"] for step in steps):
        means["policy/grad_norm"] = 0.0
        if "loss/value_avg" in means:
            means["value/grad_norm"] = 0.0
    means["val/ratio_var"] = pvariance(step["val/ratio"] for step in counted)
    means["policy/skipped_minibatches"] = sum(step["skipped"] for step in steps)
    means["policy/first_ratio_error"] = steps[0]["ratio_error"]
    return {name: value for name, value in means.items() if name not in ("ratio_error", "skipped")}


def explained_variance(experience: ReferenceExperience) -> float:
    """Return 1 - Var(R - V) / Var(R) over all tokens; 0 if the returns do not vary."""
    returns = torch.cat(experience.returns)
    values = torch.cat(experience.values)
    spread = returns.var(correction=0)
    if not spread:
        return 0.0
    return float(1 - (returns - values).var(correction=0) / spread)


def next_kl_coef(state: ReferenceState, kl: float) -> float:
    """Return kl_coef (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon), with n the update's episodes.

    Ziegler et al. 2019, section 2.2. The coefficient is constant while the policy is not trained.
    """
    settings = state.settings
    if not settings.adap_kl_ctrl or not state.policy_is_trained:
        return state.kl_coef
    error = min(max(kl / settings.target - 1, -0.2), 0.2)
    return state.kl_coef * (1 + error * len(state.prompts) / settings.horizon)


def update(state: ReferenceState, tick: Callable[[], None] = lambda: None) -> Quantities:
    """Run the update on given responses; return its quantities. `tick` is called after each row."""
    experience = make_experience(state, tick)
    steps, epochs = run_optimizer_steps(state, experience, tick)
    average_policy(state)
    return (
        experience.quantities()
        | {f"{name}, each step": [step[name] for step in steps if name in step] for name in steps[0]}
        | metrics(state, experience, steps, epochs)
    )
