"""Reference implementation of a PPO update: the losses of a token, the optimizer steps, and the update's metrics."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_cli.commands.verify.reference import (
    Adam,
    Experience,
    Quantities,
    ReferenceState,
    Step,
    ended,
    full_kl,
    log_softmax,
    make_experience,
    response_logits,
    response_values,
    variance,
)
from rlhf_cli.config.ppo_options import PPOSettings
from rlhf_cli.data.sampling import derive_seed

# 5. Losses of a token


def token_loss(
    state: ReferenceState, experience: Experience, row: int, t: int, z: Tensor, value: Tensor, ref_z: Tensor | None
) -> Any:
    """Return the loss of response token t of a row, a scalar with gradient, and its metrics.

    `z` and `ref_z` (V,) are the current logits before the token, `value` its current value.
    """
    settings = state.settings
    old, ref = experience.logprobs[row][t], experience.ref_logprobs[row][t]
    logp = log_softmax(z / settings.temperature)
    logprob = logp[state.responses[row][t]]
    ratio = torch.exp(logprob - old)
    surrogate, clipped = clipped_surrogate(settings, ratio, experience.advantages[row][t])
    error, value_clipped = value_error(settings, value, experience.values[row][t], experience.returns[row][t])
    entropy = -(logp.exp() * logp).sum()
    policy = surrogate - settings.entropy_coef * entropy
    if settings.kl_in == "loss":
        policy = policy + state.kl_coef * kl_loss(settings, logp, logprob, old, ref, ref_z)
    loss = settings.vf_coef * error + (policy if state.policy_is_trained else 0.0)
    return loss, {
        "loss/policy_avg": surrogate.item(),
        "loss/value_avg": error.item(),
        "policy/clipfrac_avg": float(clipped),
        "policy/entropy_avg": entropy.item(),
        "policy/approxkl_avg": (logprob.item() - old) ** 2 / 2,
        "policy/policykl": old - logprob.item(),
        "val/ratio": ratio.item(),
        "val/clipfrac_avg": float(value_clipped),
    }


def clipped_surrogate(settings: PPOSettings, ratio: Tensor, advantage: float) -> tuple[Tensor, bool]:
    """Return -min(ratio A, clip(ratio, 1 - eps, 1 + eps_high) A), and if it is clipped (Schulman et al. 2017, eq. 7).

    eps_high is cliprange unless cliprange_high is set (Yu et al. 2025, arXiv 2503.14476, section 3.1). With
    dual_clip c and A < 0 the objective is at least c A (Ye et al. 2020, arXiv 1912.09729, equation 5).
    """
    high = settings.cliprange if settings.cliprange_high is None else settings.cliprange_high
    objective, clipped = ratio * advantage, False
    bounded = torch.clamp(ratio, 1 - settings.cliprange, 1 + high) * advantage
    if bounded < objective:
        objective, clipped = bounded, True
    if settings.dual_clip is not None and advantage < 0 and objective < settings.dual_clip * advantage:
        objective, clipped = 0 * ratio + settings.dual_clip * advantage, True
    return -objective, clipped


def value_error(settings: PPOSettings, value: Tensor, old: float, target: float) -> tuple[Tensor, bool]:
    """Return max((V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2) / 2, and if the clipped term is larger.

    OpenAI baselines, ppo2; Huang et al. 2024 (arXiv 2403.17031), section 7.
    """
    unclipped = (value - target) ** 2
    bounded = (torch.clamp(value, old - settings.cliprange_value, old + settings.cliprange_value) - target) ** 2
    return (bounded / 2, True) if bounded > unclipped else (unclipped / 2, False)


def kl_loss(
    settings: PPOSettings, logp: Tensor, logprob: Tensor, old: float, ref: float, ref_z: Tensor | None
) -> Tensor:
    """Return the KL penalty of kl_in loss: exact for `full`; else k2 or k3, times the detached importance ratio.

    k3 has k2's gradient: grad k2 = (log pi - log ref) grad log pi is the KL's gradient at a sampled token.
    """
    if ref_z is not None:
        return full_kl(logp, log_softmax(ref_z / settings.temperature))
    r = ref - logprob
    loss = r * r / 2
    if settings.kl_estimator == "k3":
        loss = loss + (torch.exp(r) - 1 - r).item() - loss.item()
    return math.exp(logprob.item() - old) * loss


# 6. Optimizer steps: epochs over minibatches


def run_optimizer_steps(
    state: ReferenceState, experience: Experience, tick: Callable[[], None]
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
    for model in (state.policy, state.value):
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
    state: ReferenceState, experience: Experience, rows: list[int], epoch: int, tick: Callable[[], None]
) -> Step:
    """Take a step of AdamW on the mean loss of a minibatch's response tokens; return its metrics.

    The step is skipped if the mean ratio exceeds ratio_threshold.
    """
    settings = state.settings
    state.policy.zero_grad(set_to_none=True)
    state.value.zero_grad(set_to_none=True)
    tokens = sum(len(state.responses[row]) for row in rows)
    means: Step = defaultdict(float)
    first_error = 0.0
    for row in rows:
        parts = row_losses(state, experience, row)
        (sum(loss for loss, _ in parts) / tokens).backward()
        for _, token_metrics in parts:
            first_error = max(first_error, abs(token_metrics["val/ratio"] - 1))
            for name, metric in token_metrics.items():
                means[name] += metric / tokens
        tick()
    if settings.ptx_coef and state.policy_is_trained:
        means["loss/ptx_avg"] = language_model_loss(state, rows, epoch)
    skipped = settings.ratio_threshold is not None and means["val/ratio"] > settings.ratio_threshold
    if not skipped:
        for name, model in (("policy", state.policy), ("value", state.value)):
            means[f"{name}/grad_norm"] = clip(model, settings.max_grad_norm)
            adamw(state, name, model)
    return {**means, "ratio_error": first_error, "skipped": float(skipped)}


def row_losses(state: ReferenceState, experience: Experience, row: int) -> list[Any]:
    """Return (loss, metrics) of each response token of a row."""
    settings = state.settings
    with torch.set_grad_enabled(state.policy_is_trained):
        logits = response_logits(state, state.policy, row)
    values = response_values(state, row)
    ref_logits = None
    if settings.kl_in == "loss" and settings.kl_estimator == "full":
        with torch.no_grad():
            ref_logits = response_logits(state, state.ref, row)
    return [
        token_loss(state, experience, row, t, logits[t], values[t], None if ref_logits is None else ref_logits[t])
        for t in range(len(state.responses[row]))
    ]


def language_model_loss(state: ReferenceState, rows: list[int], epoch: int) -> float:
    """Add the gradient of ptx_coef times the mean of -log p(token) over completions of ptx rows; return that mean.

    Ouyang et al. 2022 (arXiv 2203.02155), equation 2. One ptx row is sampled for each episode of the minibatch.
    """
    pairs = [state.ptx[derive_seed(state.seed, "ptx", state.update, epoch, row) % len(state.ptx)] for row in rows]
    tokens = sum(len(completion) for _, completion in pairs)
    total = 0.0
    for prompt, completion in pairs:
        ids = torch.tensor([prompt + completion], device=state.policy.device)
        logits = state.policy(input_ids=ids, use_cache=False).logits[0]
        loss: Any = 0.0
        for t, token in enumerate(completion):
            loss = loss - log_softmax(logits[len(prompt) - 1 + t])[token] / tokens
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
    settings, lr = state.settings, learning_rate(state, name)
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


def learning_rate(state: ReferenceState, name: str) -> float:
    """Return the learning rate of `policy` or `value` in this update.

    k is the update's index, n the number of updates, w of which are linear warm-up (transformers, optimization.py).
    The policy's schedule starts after value_only_updates.
    """
    settings = state.settings
    value_rate = settings.value_learning_rate if name == "value" else None
    peak = settings.learning_rate if value_rate is None else value_rate
    offset = settings.value_only_updates if name == "policy" else 0
    k, n = max(state.update - offset, 0), state.updates - offset
    w = settings.warmup_steps if settings.warmup_steps is not None else math.ceil((settings.warmup_ratio or 0.0) * n)
    if name == "value" and settings.value_warmup_steps is not None:
        w = settings.value_warmup_steps
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


def metrics(state: ReferenceState, experience: Experience, steps: list[Step], epochs: int) -> Quantities:
    """Return the metrics: sums over a response's tokens, means over rows and over the optimizer steps."""
    settings, rows = state.settings, len(state.prompts)
    kl, score = mean_sum(experience.kl), sum(experience.scores) / rows
    kl_penalty = -state.kl_coef * kl if settings.kl_in == "reward" else 0.0
    pairs = zip(experience.logprobs, experience.ref_logprobs, strict=True)
    log_ratios = [[p - q for p, q in zip(*pair, strict=True)] for pair in pairs]
    ends = sum(ended(state, response) for response in state.responses)
    lengths = [len(response) for response in state.responses]
    values = {
        "episode": float((state.update + 1) * rows),
        "objective/kl": kl,
        "objective/kl_k1": mean_sum(log_ratios),
        "objective/entropy": -mean_sum(experience.logprobs),
        "objective/non_score_reward": kl_penalty,
        "objective/rlhf_reward": kl_penalty + score,
        "objective/scores": score,
        **{f"objective/score/{name}": sum(raw) / rows for name, raw in experience.raw.items()},
        **disagreements(state, experience),
        "objective/kl_coef": state.kl_coef,
        "objective/response_length": sum(lengths) / rows,
        "objective/eos_fraction": ends / rows,
        "objective/repetition": sum(repetition(response) for response in state.responses) / rows,
        "val/num_eos_tokens": float(ends),
        "val/explained_variance": explained_variance(experience),
        "tokens/real": float(sum(lengths) + sum(len(prompt) for prompt in state.prompts)),
        **mean_metrics(steps),
        "policy/epochs": float(epochs),
        "lr": learning_rate(state, "policy"),
        "value/lr": learning_rate(state, "value"),
        "next kl_coef": next_kl_coef(state, kl),
    }
    return {name: [value] for name, value in values.items()}


def disagreements(state: ReferenceState, experience: Experience) -> dict[str, float]:
    """Return the mean score of each ensemble member, and the mean over rows of the deviation between members."""
    values: dict[str, float] = {}
    for name, members in experience.member_scores.items():
        if state.sources[name].combine is not None:
            values |= {f"objective/score/{name}/{member}": sum(raw) / len(raw) for member, raw in members.items()}
            deviations = [math.sqrt(variance([raw[row] for raw in members.values()])) for row in state.rows]
            values[f"objective/disagreement/{name}"] = sum(deviations) / len(deviations)
    return values


def repetition(response: list[int]) -> float:
    """Return the share of trigrams that occurred earlier in the response."""
    trigrams = [tuple(response[i : i + 3]) for i in range(len(response) - 2)]
    return sum(trigram in trigrams[:i] for i, trigram in enumerate(trigrams)) / len(trigrams) if trigrams else 0.0


def mean_sum(rows: list[list[float]]) -> float:
    return sum(sum(row) for row in rows) / len(rows)


def mean_metrics(steps: list[Step]) -> Step:
    """Return the means over the steps, without those skipped by ratio_threshold unless all were skipped."""
    counted = [step for step in steps if not step["skipped"]] or steps
    means = {name: sum(step[name] for step in counted) / len(counted) for name in counted[0]}
    if all(step["skipped"] for step in steps):
        means |= {"policy/grad_norm": 0.0, "value/grad_norm": 0.0}
    means["val/ratio_var"] = sum((step["val/ratio"] - means["val/ratio"]) ** 2 for step in counted) / len(counted)
    means["policy/skipped_minibatches"] = sum(step["skipped"] for step in steps)
    means["policy/first_ratio_error"] = steps[0]["ratio_error"]
    return {name: value for name, value in means.items() if name not in ("ratio_error", "skipped")}


def explained_variance(experience: Experience) -> float:
    """Return 1 - Var(R - V) / Var(R) over all tokens; 0 if the returns do not vary."""
    returns = [x for row in experience.returns for x in row]
    values = [x for row in experience.values for x in row]
    spread = variance(returns)
    return 1 - variance([r - v for r, v in zip(returns, values, strict=True)]) / spread if spread else 0.0


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
    return (
        experience.quantities()
        | {f"{name}, each step": [step[name] for step in steps if name in step] for name in steps[0]}
        | metrics(state, experience, steps, epochs)
    )
