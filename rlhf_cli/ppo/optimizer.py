"""The default optimizer and schedule of a PPO run."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from rlhf_cli.models.sharding import is_sharded_tensor
from rlhf_cli.ppo.settings import PPOSettings


def adamw(models: dict[str, nn.Module], settings: PPOSettings) -> torch.optim.Optimizer:
    """One AdamW over all models, `value` at value_learning_rate; biases and norms (one dimension) do not decay."""
    groups: list[dict[str, Any]] = []
    for name, model in models.items():
        own = settings.value_learning_rate if name == "value" else None
        lr = settings.learning_rate if own is None else own
        trained = [p for p in model.parameters() if p.requires_grad]
        for suffix, decay in (("", settings.weight_decay), ("/no_decay", 0.0)):
            params = [p for p in trained if (p.ndim < 2) == bool(suffix)]
            if params:
                groups.append({"params": params, "lr": lr, "weight_decay": decay, "name": name + suffix})
    same: dict[str, Any] = {
        "lr": settings.learning_rate,
        "betas": (settings.adam_beta1, settings.adam_beta2),
        "eps": settings.adam_epsilon,
    }
    if settings.optim == "adamw_8bit":
        return adamw_8bit(groups, full_precision=embedding_weights(models.values()), **same)
    if any(is_sharded_tensor(weight) for group in groups for weight in group["params"]):
        # No kernel takes whole weights and parts (FSDP2) at once.
        return torch.optim.AdamW(groups, foreach=False, **same)
    return torch.optim.AdamW(groups, fused=settings.optim == "adamw_torch_fused", **same)


def embedding_weights(models: Iterable[nn.Module]) -> set[torch.Tensor]:
    """Return the embedding weights, whose moments stay in 32 bits as in transformers: their gradients vary too much."""
    return {module.weight for model in models for module in model.modules() if isinstance(module, nn.Embedding)}


def adamw_8bit(
    groups: list[dict[str, Any]], *, full_precision: set[torch.Tensor], **options: Any
) -> torch.optim.Optimizer:
    """Return bitsandbytes' AdamW with 8-bit moments (Dettmers et al. 2021, arXiv 2110.02861).

    The moments of `full_precision` weights, and of small ones, are stored in 32 bits.
    """
    import bitsandbytes as bnb

    class AdamW8bit(bnb.optim.AdamW8bit):
        """bitsandbytes registers exceptions by id, for the whole process and for good; this override needs none."""

        def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
            override = {"optim_bits": 32} if group["params"][pindex] in full_precision else {}
            return {**super().get_config(gindex, pindex, group), **override}

    return AdamW8bit(groups, **options)


def schedule(optimizer: torch.optim.Optimizer, settings: PPOSettings, updates: int) -> LRScheduler:
    """The named schedule of transformers over `updates` steps, one an update.

    `value` may have a warm-up of its own; all others begin after the updates that train the value model alone.
    """
    factors = [_factor(group, settings, updates) for group in optimizer.param_groups]
    return LambdaLR(optimizer, factors)


def _factor(group: dict[str, Any], settings: PPOSettings, updates: int) -> Callable[[int], float]:
    """The share of its learning rate that a parameter group has at each update."""
    from transformers import get_scheduler  # with it comes peft where that is installed: over a second

    value, peak = group.get("name", "").startswith("value"), group["lr"]
    start = 0 if value else settings.value_only_updates
    extra = {
        "cosine_with_min_lr": {"min_lr_rate": 0.1},
        "polynomial": {"lr_end": 1e-7 / peak if peak > 1e-7 else 0.0},  # transformers refuses to start below its 1e-7
    }.get(settings.lr_scheduler_type)
    alone = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    named = get_scheduler(
        settings.lr_scheduler_type,
        alone,
        settings.num_warmup(updates - start, value=value),
        updates - start,
        scheduler_specific_kwargs=extra,
    )
    factor = named.lr_lambdas[0]
    return lambda update: factor(max(update - start, 0))
