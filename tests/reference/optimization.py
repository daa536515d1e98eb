"""Optimizer steps: epochs over minibatches, AdamW and its learning rate, and the average of the policies."""

import math
from collections import defaultdict
from typing import Any

import torch
from torch import nn

from rlhf_cli.data.sampling import derive_seed
from tests.reference.advantages import Experience
from tests.reference.losses import row_losses
from tests.reference.outputs import of_tokens, response_logits
from tests.reference.state import Adam, State

Step = dict[str, float]  # metrics of an optimizer step


def run_optimizer_steps(state: State, experience: Experience) -> tuple[list[Step], int]:
    """Run all optimizer steps of the update; return their metrics and the number of epochs."""
    settings = state.settings
    set_trainable(state)
    steps: list[Step] = []
    for epoch in range(settings.num_ppo_epochs):
        for rows in minibatches(state, epoch):
            steps.append(optimizer_step(state, experience, rows, epoch))
        if settings.early_stopping and steps[-1]["policy/policykl"] > 1.5 * settings.target_kl:
            return steps, epoch + 1
    return steps, settings.num_ppo_epochs


def set_trainable(state: State) -> None:
    """Make all weights of policy and value trainable, except the embeddings and first num_shared_layers layers.

    A model with adapters (LoRA, arXiv 2106.09685) trains only these and its own head.
    """
    for model in state.models.values():
        names = [name for name, _ in model.named_parameters()]
        has_adapters = any(".lora_A." in name for name in names)
        for name, w in model.named_parameters():
            w.requires_grad_(not has_adapters or ".lora_" in name or ".modules_to_save." in name)

    num_shared = state.settings.num_shared_layers
    if not num_shared:
        return
    num_layers = state.policy.config.get_text_config().num_hidden_layers
    for module in state.policy.modules():
        if isinstance(module, nn.Embedding):
            module.requires_grad_(False)
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            module[:num_shared].requires_grad_(False)


def minibatches(state: State, epoch: int) -> list[list[int]]:
    """Return the rows in random order, in num_mini_batches parts of equal size."""
    generator = torch.Generator()
    generator.manual_seed(derive_seed(state.seed, "minibatches", state.update, epoch))
    order = torch.randperm(len(state.rows), generator=generator).tolist()
    size = len(order) // state.settings.num_mini_batches
    return [order[first : first + size] for first in range(0, len(order), size)]


def optimizer_step(state: State, experience: Experience, rows: list[int], epoch: int) -> Step:
    """Take a step of AdamW on the mean loss of a minibatch's response tokens; return its metrics.

    The step is skipped if the mean ratio exceeds ratio_threshold.
    """
    settings = state.settings
    for model in state.models.values():
        model.zero_grad(set_to_none=True)
    num_tokens = sum(len(state.responses[row]) for row in rows)
    means: Step = defaultdict(float)
    ratio_error = 0.0
    for row in rows:
        losses, token_metrics = row_losses(state, experience, row)
        (losses.sum() / num_tokens).backward()
        for name, metric in token_metrics.items():
            means[name] += float(metric.detach().sum()) / num_tokens
        errors = (token_metrics["val/ratio"].detach() - 1).abs()
        ratio_error = max(ratio_error, float(errors.max()))
    if settings.ptx_coef and state.policy_is_trained:
        means["loss/ptx_avg"] = language_model_loss(state, rows, epoch)

    skipped = settings.ratio_threshold is not None and means["val/ratio"] > settings.ratio_threshold
    if not skipped:
        for name, model in state.models.items():
            means[f"{name}/grad_norm"] = clip_gradient(model, settings.max_grad_norm)
            adamw(state, name, model)
    return {**means, "ratio_error": ratio_error, "skipped": float(skipped)}


def language_model_loss(state: State, rows: list[int], epoch: int) -> float:
    """Add the gradient of ptx_coef times the mean of -log p(token) over completions of ptx rows; return that mean.

    Ouyang et al. 2022 (arXiv 2203.02155), equation 2. One ptx row is sampled for each episode of the minibatch.
    """
    draws = [derive_seed(state.seed, "ptx", state.update, epoch, row) for row in rows]
    pairs = [state.ptx[draw % len(state.ptx)] for draw in draws]
    num_tokens = sum(len(completion) for _, completion in pairs)
    total = 0.0
    for prompt, completion in pairs:
        logp = torch.log_softmax(response_logits(state.policy, prompt, completion), -1)
        loss = -of_tokens(logp, completion).sum() / num_tokens
        (state.settings.ptx_coef * loss).backward()
        total += loss.item()
    return total


def clip_gradient(model: Any, limit: float) -> float:
    """Scale a model's gradient down to the norm `limit` if it is larger; return its norm before.

    g min(1, limit / (|g| + 1e-6)): Pascanu et al. 2013 (arXiv 1211.5063), algorithm 1, with torch's 1e-6.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    squares = [float((g * g).sum()) for g in gradients]
    norm = math.sqrt(sum(squares))
    for gradient in gradients:
        gradient *= min(1.0, limit / (norm + 1e-6))
    return norm


@torch.no_grad()
def adamw(state: State, name: str, model: Any) -> None:
    """Take a step of AdamW on each parameter with a gradient (Loshchilov and Hutter 2019, arXiv 1711.05101, alg. 2).

    m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2        m' = m / (1 - b1^t)        v' = v / (1 - b2^t)
    w = w - lr decay w - lr m' / (sqrt(v') + eps); no decay of 1-D parameters (biases, norms).
    """
    settings = state.settings
    lr = learning_rate(state, name)
    b1, b2 = settings.adam_beta1, settings.adam_beta2
    for parameter, w in model.named_parameters():
        g = w.grad
        if g is None:
            continue
        moments = state.adam[name].setdefault(parameter, Adam(torch.zeros_like(w), torch.zeros_like(w), 0))
        moments.updates += 1
        moments.first = b1 * moments.first + (1 - b1) * g
        moments.second = b2 * moments.second + (1 - b2) * g * g
        first = moments.first / (1 - b1**moments.updates)
        second = moments.second / (1 - b2**moments.updates)

        decay = settings.weight_decay if w.ndim >= 2 else 0.0
        w.copy_(w - lr * decay * w - lr * first / (second.sqrt() + settings.adam_epsilon))


def learning_rate(state: State, name: str) -> float:
    """Return the learning rate of `policy` or `value` in this update.

    k is the update's index, n the number of updates, w of which are linear warm-up (transformers, optimization.py).
    The policy's schedule starts after value_only_updates.
    """
    settings = state.settings
    is_value = name == "value"
    has_own_rate = is_value and settings.value_learning_rate is not None
    peak = settings.value_learning_rate if has_own_rate else settings.learning_rate
    offset = 0 if is_value else settings.value_only_updates
    k = max(state.update - offset, 0)
    n = state.updates - offset

    if is_value and settings.value_warmup_steps is not None:
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
    timescale = w or 10_000
    schedules = {
        "constant_with_warmup": peak,
        "linear": peak * max(0.0, 1 - progress),
        "cosine": peak * cosine,
        "cosine_with_min_lr": peak * (0.1 + 0.9 * cosine),
        "polynomial": (peak - end) * (1 - progress) + end,
        "inverse_sqrt": peak / math.sqrt((k - w + timescale) / timescale),
    }
    return schedules[settings.lr_scheduler_type]


@torch.no_grad()
def average_policy(state: State) -> None:
    """Average the policy's weights: a = (1 - s) a + s w after update u, where s = max(1 - `average`, 2 / (u + 1))."""
    u = state.update + 1
    s = max(1 - (state.settings.average or 0.0), 2 / (u + 1))
    policy = dict(state.policy.named_parameters())
    for name, value in state.average.items():
        state.average[name] = (1 - s) * value + s * policy[name].cpu()
