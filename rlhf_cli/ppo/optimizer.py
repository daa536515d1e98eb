"""Default optimizer and learning-rate schedule of PPO, and the average of the weights that it makes."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from rlhf_cli.config.ppo import PPOSettings
from rlhf_cli.models.sharding import is_sharded_tensor


def build_optimizer(models: dict[str, nn.Module], settings: PPOSettings) -> torch.optim.Optimizer:
    """Return one AdamW for all models, by name; no weight decay on biases and norms (one dimension).

    The model named `value` uses value_learning_rate.
    """
    groups: list[dict[str, Any]] = []
    for name, model in models.items():
        groups += _parameter_groups(name, model, settings)

    options: dict[str, Any] = {
        "lr": settings.learning_rate,
        "betas": (settings.adam_beta1, settings.adam_beta2),
        "eps": settings.adam_epsilon,
    }
    if settings.optim == "adamw_8bit":
        return adamw_8bit(groups, models.values(), **options)

    weights = list(chain.from_iterable(group["params"] for group in groups))
    is_sharded = any(map(is_sharded_tensor, weights))
    on_cpu = weights[0].device.type == "cpu"
    fused = settings.optim == "adamw_torch_fused"
    if is_sharded and on_cpu:
        options["foreach"] = False
    elif on_cpu or fused:
        options["fused"] = fused
    else:
        options["foreach"] = True
    adamw = ShardedAdamW if is_sharded else torch.optim.AdamW
    return adamw(groups, **options)


def _parameter_groups(name: str, model: nn.Module, settings: PPOSettings) -> list[dict[str, Any]]:
    """Return a model's trained matrices and, without weight decay, its trained vectors."""
    lr = settings.learning_rate
    if name == "value" and settings.value_learning_rate is not None:
        lr = settings.value_learning_rate

    trained = [weight for weight in model.parameters() if weight.requires_grad]
    matrices = [weight for weight in trained if weight.ndim >= 2]
    vectors = [weight for weight in trained if weight.ndim < 2]

    groups: list[dict[str, Any]] = [
        {"params": matrices, "lr": lr, "weight_decay": settings.weight_decay, "name": name},
        {"params": vectors, "lr": lr, "weight_decay": 0.0, "name": f"{name}/no_decay"},
    ]
    return [group for group in groups if group["params"]]


class ShardedAdamW(torch.optim.AdamW):
    """AdamW whose kernels get tensors of one kind: none of several tensors takes FSDP2's shards with whole ones.

    Its parameter groups, and so its state, are AdamW's, whichever kernel made the state.
    """

    def step(self, closure: Any = None) -> Any:
        """Step with sharded and whole weights in different groups."""
        groups = self.param_groups
        self.param_groups = []

        for group in groups:
            for is_sharded in (True, False):
                weights = [weight for weight in group["params"] if is_sharded_tensor(weight) == is_sharded]
                if weights:
                    self.param_groups.append({**group, "params": weights})

        try:
            return super().step(closure)
        finally:
            self.param_groups = groups

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state, and keep this optimizer's kernel."""
        kernel = {name: self.defaults[name] for name in ("foreach", "fused")}
        groups = [{**group, **kernel} for group in state_dict["param_groups"]]
        super().load_state_dict({**state_dict, "param_groups": groups})


def adamw_8bit(groups: list[dict[str, Any]], models: Iterable[nn.Module], **options: Any) -> torch.optim.Optimizer:
    """Return bitsandbytes' AdamW with 8-bit moments (Dettmers et al. 2021, arXiv 2110.02861).

    The moments of small weights are stored in 32 bits, and as in transformers those of embeddings, whose gradients vary
    too much.
    """
    import bitsandbytes as bnb

    modules = chain.from_iterable(model.modules() for model in models)
    embeddings = {module.weight for module in modules if isinstance(module, nn.Embedding)}

    class AdamW8bit(bnb.optim.AdamW8bit):
        """An override, because bitsandbytes registers exceptions by id for the whole process."""

        def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
            config: dict[str, Any] = super().get_config(gindex, pindex, group)
            if group["params"][pindex] in embeddings:
                config = {**config, "optim_bits": 32}
            return config

    return AdamW8bit(groups, **options)


def build_scheduler(optimizer: torch.optim.Optimizer, settings: PPOSettings, num_updates: int) -> LRScheduler:
    """Return the named schedule of transformers over `num_updates` steps, one per update.

    `value` may have its own warm-up; the policy's schedule starts after value_only_updates.
    """
    factors = [_lr_factor(group, settings, num_updates) for group in optimizer.param_groups]
    return LambdaLR(optimizer, factors)


def _lr_factor(group: dict[str, Any], settings: PPOSettings, num_updates: int) -> Callable[[int], float]:
    """Return the factor of a parameter group's peak learning rate as a function of the update."""
    from transformers import get_scheduler  # imports peft if installed: over a second

    is_value = group.get("name", "").startswith("value")
    start = 0 if is_value else settings.value_only_updates
    steps = num_updates - start
    warmup = settings.num_warmup(steps, value=is_value)

    kind = settings.lr_scheduler_type
    options = None
    if kind == "cosine_with_min_lr":
        options = {"min_lr_rate": 0.1}
    elif kind == "polynomial":
        peak = group["lr"]
        end = 1e-7 / peak if peak > 1e-7 else 0.0  # transformers requires lr_end < peak
        options = {"lr_end": end}

    # transformers gives schedules of an optimizer only: its function of the step is taken out.
    dummy = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = get_scheduler(kind, dummy, warmup, steps, scheduler_specific_kwargs=options)
    (factor,) = schedule.lr_lambdas
    return lambda update: factor(max(update - start, 0))


class WeightAverage:
    """Moving average of a model's trainable weights, in main memory, in float32 (of float64: float64).

    After update u = 1, 2, ... average += step (weights - average), where step = max(1 - decay, 2 / (u + 1)): first the
    mean with weights in proportion to u (Lacoste-Julien, Schmidt and Bach 2012, arXiv 1212.2002), which forgets the
    start at any length, then the exponential one (Ramé et al. 2024, arXiv 2406.16768, section 3.1).

    Tied weights are one.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.values: dict[str, torch.Tensor] = {}
        named = model.named_parameters()
        self.weights = {name: weight for name, weight in named if weight.requires_grad}
        self.load_state_dict(self.weights)

    def update(self, update: int) -> None:
        """Add the weights after update 1, 2, ... An average of equal weights stays as it is, bit for bit."""
        step = max(1 - self.decay, 2 / (update + 1))
        for name, weight in self.weights.items():
            average = self.values[name]
            average.lerp_(weight.detach().to(average), step)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Context manager: the model has the average, in the dtype of its weights; then its own weights again."""
        own = {name: weight.detach().to("cpu", copy=True) for name, weight in self.weights.items()}
        try:
            self._set_weights(self.values)
            yield
        finally:
            self._set_weights(own)

    def _set_weights(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, weight in self.weights.items():
            weight.detach().copy_(values[name])

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the average by parameter name."""
        return self.values

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy an average by parameter name. Raises KeyError if a weight is missing."""
        for name, weight in self.weights.items():
            dtype = torch.promote_types(weight.dtype, torch.float32)
            self.values[name] = state[name].detach().to("cpu", dtype, copy=True)
