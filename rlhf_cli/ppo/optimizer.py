"""The default optimizer and schedule of a PPO run."""

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from rlhf_cli.ppo.settings import PPOSettings


def adamw(models: dict[str, nn.Module], settings: PPOSettings) -> torch.optim.AdamW:
    """One AdamW over all models; biases and norms (fewer than two dimensions) do not decay."""
    groups = []
    for name, model in models.items():
        trained = [p for p in model.parameters() if p.requires_grad]
        for suffix, decay in (("", settings.weight_decay), ("/no_decay", 0.0)):
            params = [p for p in trained if (p.ndim < 2) == bool(suffix)]
            if params:
                groups.append({"params": params, "weight_decay": decay, "name": name + suffix})
    betas = (settings.adam_beta1, settings.adam_beta2)
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=betas, eps=settings.adam_epsilon)


def schedule(optimizer: torch.optim.Optimizer, settings: PPOSettings, updates: int) -> LRScheduler:
    """The named schedule of transformers over `updates` steps, one an update."""
    extra = {"min_lr_rate": 0.1} if settings.lr_scheduler_type == "cosine_with_min_lr" else None
    return get_scheduler(
        settings.lr_scheduler_type, optimizer, settings.num_warmup(updates), updates, scheduler_specific_kwargs=extra
    )
