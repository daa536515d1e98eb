"""Models as adapters would have them: small matrices learn, beside weights that are frozen."""

from collections.abc import Collection, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from rlhf_cli.config.adapters import Adapters, LoRA
from rlhf_cli.models import lora
from rlhf_cli.models.build import META

Mode = Literal["full", "lora", "qlora", "one-base"]
MODES: tuple[str, ...] = get_args(Mode)
STANDARD: LoRA = Adapters(kind="lora")


class Adapted(nn.Module):
    """A linear layer whose frozen weight has two small matrices beside it, which learn (LoRA, arXiv 2106.09685)."""

    def __init__(self, base: nn.Module, width: int, height: int, rank: int, device: torch.device) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(width, rank, bias=False, device=device)
        self.up = nn.Linear(rank, height, bias=False, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Packed(nn.Module):
    """A frozen linear layer in 4 bits, opened for each product (QLoRA, arXiv 2305.14314)."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        count = shape[0] * shape[1]
        self.packed = nn.Buffer(torch.empty(-(-count // 2), dtype=torch.uint8, device=META))
        self.scales = nn.Buffer(torch.empty(-(-count // lora.BLOCK_SIZE), device=META))
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = _Opened.apply(x, self.shape)
        return made


class _Opened(torch.autograd.Function):
    """x W with a W that is made when it is needed, in the backward pass again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, int]) -> Tensor:
        ctx.shape = shape
        return x @ x.new_empty(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ grad.new_empty(ctx.shape).T, None


def prepare(
    policy: Any,
    ref: Any,
    value: nn.Module,
    rewards: Mapping[str, Any],
    mode: str,
    ours: LoRA = STANDARD,
    whole: Collection[str] = (),
    beside: str | None = None,
) -> None:
    """Four models as `mode` would hold them. The reference is the policy without its adapters.

    lora: value and reward models have weights of their own; qlora: theirs too are packed; one-base: they are adapters
    on the policy's weights, but those named in `whole`: a reward model has no adapters then, and "value" has its own
    `beside` the weights of that reward model; None: beside its own weights.
    """
    borne = {name: model for name, model in rewards.items() if mode == "one-base" and name not in whole}
    if mode == "one-base":
        for model in borne.values():
            on_one_base(model, policy)
        on_one_base(value, policy if "value" not in whole else rewards[beside] if beside else value)
    for model in (policy, value, *(rewards.values() if mode == "qlora" else borne.values())):
        adapt(model, mode, ours)
    for model in rewards.values():
        model.requires_grad_(False)
    on_one_base(ref, policy)


def adapt(model: Any, mode: str, ours: LoRA = STANDARD) -> None:
    """Put adapters beside linear layers of the body, and let nothing else learn but a one-label head.

    `qlora`: all of its linear layers are packed that can be.
    """
    layers = list(lora.linear_layers(model)) if hasattr(model, "base_model") else []  # a head alone has none
    targets = lora.target_modules(model, ours) if layers else []
    for owner, name, layer in layers:
        width, height = (layer.nx, layer.nf) if hasattr(layer, "nf") else (layer.in_features, layer.out_features)
        base = Packed((width, height)) if mode == "qlora" and lora.can_quantize(layer) else layer
        beside = Adapted(base, width, height, ours.r, layer.weight.device)
        setattr(owner, name, beside if name in targets else base)
    freeze(model)


def freeze(model: nn.Module) -> None:
    """Only adapters and a one-label head learn."""
    for name, weight in model.named_parameters():
        weight.requires_grad_(".down." in name or ".up." in name or name.startswith("score."))


def on_one_base(model: nn.Module, base: nn.Module) -> None:
    """Let a model use the weights of another in place of its own wherever the two have the same; adapters stay out.

    So does a head, of which each model has its own.
    """
    theirs = {name: module for name, module in base.named_modules() if name != "score"}
    for name, module in list(model.named_modules()):
        other = theirs.get(name)
        if isinstance(other, Adapted):
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, other.base)
            continue
        for key, weight in list(module._parameters.items()):
            same = other and other._parameters.get(key)
            if weight is not None and same is not None and same.shape == weight.shape:
                module._parameters[key] = same
