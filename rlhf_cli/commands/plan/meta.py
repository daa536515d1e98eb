"""Stand-ins on the meta device for rollouts, optimizer states, LoRA and 4-bit layers, and a cache of operations."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from rlhf_cli.config.adapters import Adapters, LoRA
from rlhf_cli.models import lora
from rlhf_cli.models.batch import MicroBatch, Rollout
from rlhf_cli.models.build import META


@dataclass(frozen=True)
class Lengths:
    """Tokens of the longest rows: `prompt` and `response` where a stage writes, the two together where it reads.

    `mean`: of a row, where rows were read that differ.
    """

    prompt: int
    response: int
    mean: float = 0

    @property
    def row(self) -> int:
        return self.prompt + self.response

    @property
    def average(self) -> "Lengths":
        """Lengths of an average row, with the prompt's share of the longest."""
        share = self.mean / self.row if self.mean else 1
        return Lengths(*(max(1, round(share * tokens)) for tokens in (self.prompt, self.response)))


def fake_rollout(rows: int, lengths: Lengths, device: torch.device) -> Rollout:
    """Return a rollout whose rows are all as long as the longest."""
    mask = torch.ones(rows, lengths.row, dtype=torch.bool, device=device)
    ids = torch.zeros(rows, lengths.row, dtype=torch.int64, device=device)
    kind = FakeRollout if device == META else Rollout
    return kind(ids, mask, mask[:, lengths.prompt :].clone(), mask[:, 0].clone())


@dataclass(frozen=True)
class FakeRollout(Rollout):
    """Rollout on the meta device, with rows of one length."""

    def to(self, device: torch.device) -> "FakeRollout":
        return self

    @property
    def lengths(self) -> Tensor:
        return self._alike(len(self))

    @cached_property
    def repetition(self) -> Tensor:
        """Zeros; the real tensor takes a few bytes per row."""
        return torch.zeros(len(self), device=META)

    def micro_batch(self, rows: Tensor) -> MicroBatch:
        tokens = torch.zeros(len(rows) * self.response_mask.shape[1], dtype=torch.int64, device=META)
        return MicroBatch(rows, self.ids[: len(rows)], self._alike(len(rows)), tokens, tokens, tokens, tokens)

    def _alike(self, rows: int) -> Tensor:
        found: Any = torch.zeros(rows, dtype=torch.int64, device=META)
        found.content = [self.ids.shape[1]] * rows
        return found


def init_optimizer_state(optimizer: torch.optim.Optimizer, *, gradients: bool) -> None:
    """Give an optimizer its state after the first step, and optionally the weights their gradients.

    An 8-bit optimizer creates its own state; its `step`, one kernel without other memory, is disabled.
    """
    for at, group in enumerate(optimizer.param_groups):
        for index, weight in enumerate(group["params"]):
            weight.grad = torch.zeros_like(weight) if gradients else None
            if isinstance(optimizer, torch.optim.AdamW):
                averages = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
                optimizer.state[weight] = {"step": torch.zeros(()), **averages}
            else:
                optimizer.init_state(group, weight, at, index)  # type: ignore[attr-defined]
    if not isinstance(optimizer, torch.optim.AdamW):
        optimizer.step = lambda *_: None  # type: ignore[assignment,method-assign]


Mode = Literal["full", "lora", "qlora", "one-base"]
MODES: tuple[str, ...] = get_args(Mode)
STANDARD: LoRA = Adapters(kind="lora")


class LoRALinearStub(nn.Module):
    """Linear layer with a frozen weight and two trained low-rank matrices (LoRA, arXiv 2106.09685)."""

    def __init__(self, base: nn.Module, width: int, height: int, rank: int, device: torch.device) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(width, rank, bias=False, device=device)
        self.up = nn.Linear(rank, height, bias=False, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Linear4bitStub(nn.Module):
    """Frozen 4-bit linear layer, dequantized for each product (QLoRA, arXiv 2305.14314)."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        count = shape[0] * shape[1]
        self.packed = nn.Buffer(torch.empty(-(-count // 2), dtype=torch.uint8, device=META))
        self.scales = nn.Buffer(torch.empty(-(-count // lora.BLOCK_SIZE), device=META))
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = _Dequantize.apply(x, self.shape)
        return made


class _Dequantize(torch.autograd.Function):
    """x W, with W dequantized in the forward pass and again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, int]) -> Tensor:
        ctx.shape = shape
        return x @ x.new_empty(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ grad.new_empty(ctx.shape).T, None


def apply_mode(
    policy: Any,
    ref: Any,
    value: nn.Module,
    rewards: Mapping[str, Any],
    mode: str,
    lora_config: LoRA = STANDARD,
    whole: Collection[str] = (),
    beside: str | None = None,
) -> None:
    """Convert four models to `mode`. The reference is the policy without its adapters.

    lora: value and reward models have weights of their own; qlora: theirs too are packed; one-base: they are adapters
    on the policy's weights, but those named in `whole`: a reward model has no adapters then, and "value" has its own
    `beside` the weights of that reward model; None: beside its own weights.
    """
    borne = {name: model for name, model in rewards.items() if mode == "one-base" and name not in whole}
    if mode == "one-base":
        for model in borne.values():
            share_weights(model, policy)
        share_weights(value, policy if "value" not in whole else rewards[beside] if beside else value)
    for model in (policy, value, *(rewards.values() if mode == "qlora" else borne.values())):
        add_adapters(model, mode, lora_config)
    for model in rewards.values():
        model.requires_grad_(False)
    share_weights(ref, policy)


def add_adapters(model: Any, mode: str, lora_config: LoRA = STANDARD) -> None:
    """Add adapters to the backbone's linear layers; train only these and a one-label head.

    With `qlora`, all linear layers that can be are quantized.
    """
    layers = list(lora.linear_layers(model)) if hasattr(model, "base_model") else []  # a head alone has none
    targets = lora.target_modules(model, lora_config) if layers else []
    for owner, name, layer in layers:
        width, height = (layer.nx, layer.nf) if hasattr(layer, "nf") else (layer.in_features, layer.out_features)
        base = Linear4bitStub((width, height)) if mode == "qlora" and lora.can_quantize(layer) else layer
        beside = LoRALinearStub(base, width, height, lora_config.r, layer.weight.device)
        setattr(owner, name, beside if name in targets else base)
    freeze(model)


def freeze(model: nn.Module) -> None:
    """Freeze all but adapters and a one-label head."""
    for name, weight in model.named_parameters():
        weight.requires_grad_(".down." in name or ".up." in name or name.startswith("score."))


def share_weights(model: nn.Module, base: nn.Module) -> None:
    """Replace a model's weights by those of `base` of the same name and shape, except adapters and heads."""
    theirs = {name: module for name, module in base.named_modules() if name != "score"}
    for name, module in list(model.named_modules()):
        other = theirs.get(name)
        if isinstance(other, LoRALinearStub):
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, other.base)
            continue
        for key, weight in list(module._parameters.items()):
            same = other and other._parameters.get(key)
            if weight is not None and same is not None and same.shape == weight.shape:
                module._parameters[key] = same


class _Shape(NamedTuple):
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


_made: dict[Any, Any] = {}  # an operation and what it was given, shapes for tensors -> what it made, or None


def cached_op(call: Any, args: Any, kwargs: dict[str, Any], given: list[Tensor]) -> Any:
    """Run an operation, or return empty tensors of the shapes that it returned for the same input shapes.

    Layers and loop steps repeat, and torch computes most meta shapes in slow Python code.
    """
    key = call, _shapes(args), _shapes(tuple(kwargs.items()))
    if shapes := _made.get(key):
        return _empty(shapes)
    made = call(*args, **kwargs)
    if key not in _made:
        _made[key] = _shapes(made) if _is_new(call, made, given) else None
    return made


def _is_new(call: Any, made: Any, given: list[Tensor]) -> bool:
    """Return True if an operation only creates tensors with storage of their own."""
    if any(each.alias_info for each in call._schema.arguments):
        return False
    found = list(made) if isinstance(made, tuple | list) else [made]
    if not all(isinstance(each, Tensor) and each.device == META for each in (*found, *given)):
        return False
    theirs = {each.untyped_storage()._cdata for each in given}
    return all(each.untyped_storage()._cdata not in theirs for each in found)


def _shapes(each: Any) -> Any:
    """Return a hashable tree with shapes for tensors, and types with values so that 1 is not 1.0."""
    if isinstance(each, Tensor):
        return _Shape(each.shape, each.stride(), each.dtype, each.device)
    if isinstance(each, tuple | list):
        return tuple(map(_shapes, each))
    return type(each), each


def _empty(shapes: Any) -> Any:
    if isinstance(shapes, _Shape):
        return torch.empty_strided(shapes.size, shapes.stride, dtype=shapes.dtype, device=META)
    return tuple(map(_empty, shapes))


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dicts; torch's tree_iter is slower than the operations."""
    if isinstance(tree, Tensor):
        return [tree]
    within = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, tuple | list) else ()
    return [tensor for each in within for tensor in tensors_of(each)]
