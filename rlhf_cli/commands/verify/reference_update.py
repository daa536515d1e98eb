"""The loss of a token, and the optimizer steps of an update."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_cli.commands.verify.reference_scores import Judged, whole_kl
from rlhf_cli.commands.verify.reference_state import Adam, Start, Step, log_softmax, response_logits, response_values
from rlhf_cli.config.ppo_options import PPOSettings
from rlhf_cli.data.sampling import derive_seed

# 5. The loss of a token


def token_loss(start: Start, judged: Judged, row: int, t: int, z: Tensor, value: Tensor, ref_z: Tensor | None) -> Any:
    """The loss of response token t of a row, a scalar with gradient, and what it is made of, as numbers.

    `z` and `ref_z` (V,) are the logits before it, `value` its value, as the models are now.
    """
    settings = start.settings
    old, ref = judged.logprobs[row][t], judged.ref_logprobs[row][t]
    logp = log_softmax(z / settings.temperature)
    logprob = logp[start.responses[row][t]]
    ratio = torch.exp(logprob - old)
    surrogate, clipped = clipped_surrogate(settings, ratio, judged.advantages[row][t])
    error, value_clipped = value_error(settings, value, judged.values[row][t], judged.returns[row][t])
    entropy = -(logp.exp() * logp).sum()
    policy = surrogate - settings.entropy_coef * entropy
    if settings.kl_in == "loss":
        policy = policy + start.kl_coef * kl_loss(settings, logp, logprob, old, ref, ref_z)
    loss = settings.vf_coef * error + (policy if start.policy_learns else 0.0)
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
    """-min(ratio A, clip(ratio, 1 - eps, 1 + eps_high) A), and whether a bound holds (Schulman et al. 2017, eq. 7).

    eps_high is cliprange where cliprange_high is not set (Yu et al. 2025, arXiv 2503.14476, section 3.1). With
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
    """max((V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2) / 2, and whether the clipped one is the larger.

    OpenAI baselines, ppo2; Huang et al. 2024 (arXiv 2403.17031), section 7.
    """
    plain = (value - target) ** 2
    bounded = (torch.clamp(value, old - settings.cliprange_value, old + settings.cliprange_value) - target) ** 2
    return (bounded / 2, True) if bounded > plain else (plain / 2, False)


def kl_loss(
    settings: PPOSettings, logp: Tensor, logprob: Tensor, old: float, ref: float, ref_z: Tensor | None
) -> Tensor:
    """The KL penalty of kl_in loss. full: exact. k2, and k3 with k2's gradient, times the importance ratio as a number.

    grad k2 = (log pi - log ref) grad log pi, which is the KL's gradient at a token that the policy drew.
    """
    if ref_z is not None:
        return whole_kl(logp, log_softmax(ref_z / settings.temperature))
    r = ref - logprob
    loss = r * r / 2
    if settings.kl_estimator == "k3":
        loss = loss + (torch.exp(r) - 1 - r).item() - loss.item()
    return math.exp(logprob.item() - old) * loss


# 6. The update: epochs of minibatches, an optimizer step for each


def learn(start: Start, judged: Judged, tick: Callable[[], None]) -> tuple[list[Step], int]:
    """All optimizer steps of the update, and in how many epochs they were made."""
    settings = start.settings
    trainable(start)
    steps: list[Step] = []
    for epoch in range(settings.num_ppo_epochs):
        steps += [optimizer_step(start, judged, rows, epoch, tick) for rows in minibatches(start, epoch)]
        if settings.early_stopping and steps[-1]["policy/policykl"] > 1.5 * settings.target_kl:
            return steps, epoch + 1
    return steps, settings.num_ppo_epochs


def trainable(start: Start) -> None:
    """Everything of policy and value learns, but the embeddings and first layers that num_shared_layers freezes.

    Of a model with adapters beside its layers (LoRA, arXiv 2106.09685) these and a head of its own do, nothing else.
    """
    for model in (start.policy, start.value):
        names = [name for name, _ in model.named_parameters()]
        adapters = any(".lora_A." in name for name in names)
        for name, w in model.named_parameters():
            w.requires_grad_(not adapters or ".lora_" in name or ".modules_to_save." in name)
    if count := start.settings.num_shared_layers:
        layers = start.policy.config.get_text_config().num_hidden_layers
        for module in start.policy.modules():
            if isinstance(module, nn.Embedding):
                module.requires_grad_(False)
            if isinstance(module, nn.ModuleList) and len(module) == layers:
                for layer in module[:count]:
                    layer.requires_grad_(False)


def minibatches(start: Start, epoch: int) -> Iterator[list[int]]:
    """The rows in a random order, cut into num_mini_batches parts of one size."""
    draw = torch.Generator().manual_seed(derive_seed(start.seed, "minibatches", start.update, epoch))
    order = torch.randperm(len(start.prompts), generator=draw).tolist()
    size = len(order) // start.settings.num_mini_batches
    for first in range(0, len(order), size):
        yield order[first : first + size]


def optimizer_step(start: Start, judged: Judged, rows: list[int], epoch: int, tick: Callable[[], None]) -> Step:
    """One minibatch: the mean loss of its response tokens, its gradient, one step of AdamW.

    None is made where the mean ratio passes ratio_threshold.
    """
    settings = start.settings
    start.policy.zero_grad(set_to_none=True)
    start.value.zero_grad(set_to_none=True)
    tokens = sum(len(start.responses[row]) for row in rows)
    means: Step = defaultdict(float)
    first_error = 0.0
    for row in rows:
        parts = row_losses(start, judged, row)
        (sum(loss for loss, _ in parts) / tokens).backward()
        for _, facts in parts:
            first_error = max(first_error, abs(facts["val/ratio"] - 1))
            for name, number in facts.items():
                means[name] += number / tokens
        tick()
    if settings.ptx_coef and start.policy_learns:
        means["loss/ptx_avg"] = language_model_loss(start, rows, epoch)
    skipped = settings.ratio_threshold is not None and means["val/ratio"] > settings.ratio_threshold
    if not skipped:
        for name, model in (("policy", start.policy), ("value", start.value)):
            means[f"{name}/grad_norm"] = clip(model, settings.max_grad_norm)
            adamw(start, name, model)
    return {**means, "ratio_error": first_error, "skipped": float(skipped)}


def row_losses(start: Start, judged: Judged, row: int) -> list[Any]:
    """(loss, its parts) of each response token of a row."""
    settings = start.settings
    with torch.set_grad_enabled(start.policy_learns):
        logits = response_logits(start, start.policy, row)
    values = response_values(start, row)
    ref_logits = None
    if settings.kl_in == "loss" and settings.kl_estimator == "full":
        with torch.no_grad():
            ref_logits = response_logits(start, start.ref, row)
    return [
        token_loss(start, judged, row, t, logits[t], values[t], None if ref_logits is None else ref_logits[t])
        for t in range(len(start.responses[row]))
    ]


def language_model_loss(start: Start, rows: list[int], epoch: int) -> float:
    """Adds the gradient of ptx_coef times the mean of -log p(token) over the completions of ptx rows.

    Ouyang et al. 2022 (arXiv 2203.02155), equation 2. A row of ptx is drawn for each episode of the minibatch.
    """
    chosen = [start.ptx[derive_seed(start.seed, "ptx", start.update, epoch, row) % len(start.ptx)] for row in rows]
    tokens = sum(len(completion) for _, completion in chosen)
    total = 0.0
    for prompt, completion in chosen:
        ids = torch.tensor([prompt + completion], device=start.policy.device)
        logits = start.policy(input_ids=ids, use_cache=False).logits[0]
        surprise: Any = 0.0
        for t, token in enumerate(completion):
            surprise = surprise - log_softmax(logits[len(prompt) - 1 + t])[token] / tokens
        (start.settings.ptx_coef * surprise).backward()
        total += surprise.item()
    return total


def clip(model: Any, limit: float) -> float:
    """Scales a model's gradient down to the norm `limit` where it is longer; returns its norm before.

    g min(1, limit / (|g| + 1e-6)): Pascanu et al. 2013 (arXiv 1211.5063), algorithm 1, with torch's 1e-6.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = math.sqrt(sum(float((g * g).sum()) for g in gradients))
    for gradient in gradients:
        gradient *= min(1.0, limit / (norm + 1e-6))
    return norm


@torch.no_grad()
def adamw(start: Start, name: str, model: Any) -> None:
    """One step of AdamW on each parameter that has a gradient (Loshchilov and Hutter 2019, arXiv 1711.05101, alg. 2).

    m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2        m' = m / (1 - b1^t)        v' = v / (1 - b2^t)
    w = w - lr decay w - lr m' / (sqrt(v') + eps); biases and norms, which have one dimension, do not decay.
    """
    settings, lr = start.settings, learning_rate(start, name)
    b1, b2 = settings.adam_beta1, settings.adam_beta2
    for parameter, w in model.named_parameters():
        if (g := w.grad) is None:
            continue
        memory = start.adam[name].setdefault(parameter, Adam(torch.zeros_like(w), torch.zeros_like(w), 0))
        memory.updates += 1
        memory.first = b1 * memory.first + (1 - b1) * g
        memory.second = b2 * memory.second + (1 - b2) * g * g
        first = memory.first / (1 - b1**memory.updates)
        second = memory.second / (1 - b2**memory.updates)
        decay = settings.weight_decay if w.ndim >= 2 else 0.0
        w.copy_(w - lr * decay * w - lr * first / (second.sqrt() + settings.adam_epsilon))


def learning_rate(start: Start, name: str) -> float:
    """The rate of this update, of `policy` or `value`: its peak times the share that the named schedule has now.

    k updates were made of n, w of them warm-up, over which the share rises from 0 to 1 (transformers, optimization.py).
    The policy's schedule begins after the updates that train the value model alone.
    """
    settings = start.settings
    own = settings.value_learning_rate if name == "value" else None
    peak = settings.learning_rate if own is None else own
    alone = settings.value_only_updates if name == "policy" else 0
    k, n = max(start.update - alone, 0), start.updates - alone
    w = settings.warmup_steps if settings.warmup_steps is not None else math.ceil((settings.warmup_ratio or 0.0) * n)
    if name == "value" and settings.value_warmup_steps is not None:
        w = settings.value_warmup_steps
    if settings.lr_scheduler_type == "constant":
        return peak
    if k < w:
        return peak * k / w
    done = (k - w) / max(1, n - w)
    cosine = (1 + math.cos(math.pi * done)) / 2
    end = 1e-7 if peak > 1e-7 else 0.0  # of the polynomial one
    return {
        "constant_with_warmup": peak,
        "linear": peak * max(0.0, 1 - done),
        "cosine": peak * cosine,
        "cosine_with_min_lr": peak * (0.1 + 0.9 * cosine),
        "polynomial": (peak - end) * (1 - done) + end,
        "inverse_sqrt": peak / math.sqrt((k - w + (w or 10_000)) / (w or 10_000)),
    }[settings.lr_scheduler_type]
