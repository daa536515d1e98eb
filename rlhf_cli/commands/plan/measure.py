"""Counters of memory and FLOPs on meta tensors, which have shapes but no data, and a timer.

A `MemoryCounter` sees each tensor that is created and freed: the live bytes are what a GPU's allocator would hold, and
the matrix products are the FLOPs. A meta tensor may have `content`, the values that the code finds if it reads them.
"""

import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from rlhf_cli.commands.plan.meta import cached_op, tensors_of
from rlhf_cli.models.build import META

ATEN = torch.ops.aten
ATTENTION = ATEN._scaled_dot_product_flash_attention_for_cpu
# What a tensor is, at a moment; each byte is counted as one of them.
KINDS = ("weights", "gradients", "optimizer", "cache", "logits", "activations")


class MemoryCounter:
    """Context manager that counts bytes by kind at many `moments`, and `work` in FLOPs.

    Moments are the creation of tensors of a shape by an operation, between two backward passes: the first ones, the
    last ones and the one with the most bytes. The weights of `models`, their gradients and the optimizer's state are
    live from the start. A tensor whose last dimension is `vocabulary` counts as logits.
    """

    device = META
    together = 2  # micro-batches to run; the second one has the gradients of the first

    def __init__(
        self, models: Iterable[nn.Module], vocabulary: int, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        self.vocabulary, self.live = vocabulary, Counter[str]()
        self.work = 0
        self._seen: dict[Any, _Snapshots] = {}
        self._passes = 0
        self._kinds: dict[int, str] = {}
        self._bytes: dict[int, int] = {}
        self._there: dict[int, weakref.ref[Any]] = {}
        self._models, self._optimizer = list(models), optimizer
        self._stack = ExitStack()

    def __enter__(self) -> "MemoryCounter":
        for model in self._models:
            self.mark("weights", [*model.parameters(), *model.buffers()])
            for weight in model.parameters():
                if weight.grad is not None:
                    self.mark("gradients", [weight.grad])
                if weight.requires_grad:
                    hook = weight.register_post_accumulate_grad_hook(lambda w: self.mark("gradients", [w.grad]))
                    self._stack.callback(hook.remove)
        if self._optimizer:
            for state in self._optimizer.state.values():
                self.mark("optimizer", [each for each in state.values() if isinstance(each, Tensor)])
        self.note("beginning")
        for change in _Kernels(self.turn).patches():
            self._stack.enter_context(change)
        self._stack.enter_context(_DispatchCounter(self))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def mark(self, kind: str, tensors: Iterable[Any]) -> None:
        """Count these tensors as `kind` from now on."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._kinds:
                self.live[self._kinds[key]] -= self._bytes[key]
            else:
                self._bytes[key] = storage.nbytes()
                self._there[key] = weakref.ref(storage, partial(self._gone, key))
            self._kinds[key] = kind
            self.live[kind] += self._bytes[key]

    @property
    def moments(self) -> dict[Any, Counter[str]]:
        """Bytes by kind at each."""
        return {(made, when): held for made, seen in self._seen.items() for when, held in seen.told.items()}

    def note(self, made: Any) -> None:
        """Record a moment, named by what was created."""
        self._seen.setdefault((self._passes, made), _Snapshots()).note(self.live)

    def turn(self) -> None:
        """Mark the start or end of a backward pass."""
        self._passes += 1

    def see(self, call: Any, made: list[Tensor]) -> None:
        """Count the tensors that an operation returned, unless they share storage with others."""
        fresh = [each for each in made if each.untyped_storage()._cdata not in self._kinds]
        for each in fresh:
            self.mark("logits" if each.ndim and each.shape[-1] == self.vocabulary else "activations", [each])
        if fresh:
            self.note((call, fresh[0].shape))

    def _gone(self, key: int, _: Any) -> None:
        del self._there[key]
        self.live[self._kinds.pop(key)] -= self._bytes.pop(key)


FEW = 8  # about as many as a layer makes of one shape


class _Snapshots:
    """Live bytes when an operation created tensors of one shape: the first and last few times, and the maximum."""

    def __init__(self) -> None:
        self.first: list[Counter[str]] = []
        self.last: deque[Counter[str]] = deque(maxlen=FEW)
        self.most, self.total = Counter[str](), -1

    def note(self, live: Counter[str]) -> None:
        """Record the live bytes."""
        now, total = live.copy(), live.total()
        self.last.append(now)
        if len(self.first) < FEW:
            self.first.append(now)
        if total > self.total:
            self.most, self.total = now, total

    @property
    def told(self) -> dict[Any, Counter[str]]:
        """Records by time."""
        told = {("first", number): held for number, held in enumerate(self.first)}
        told |= {("last", number): held for number, held in enumerate(reversed(self.last))}
        return {**told, "most": self.most}


class _DispatchCounter(TorchDispatchMode):
    """Passes each operation to a counter, and returns values where the code reads meta tensors.

    The values are those of a run without errors: numbers are 1, `all` is true and `any` is false.
    """

    def __init__(self, tally: MemoryCounter) -> None:
        super().__init__()
        self.tally = tally

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if call is ATEN._local_scalar_dense.default and args[0].device == META:
            return getattr(args[0], "content", 1)
        if call is ATEN.equal.default:
            return True
        kwargs = kwargs or {}
        given = tensors_of((args, kwargs))
        made = _known(call, args, kwargs, given)
        if made is None:
            made = cached_op(call, args, kwargs, given)
        if call.overloadpacket is ATEN.any:
            made.content = 0
        if count := COSTS.get(call.overloadpacket):
            self.tally.work += count(*args, **kwargs, out_val=made)
        self.tally.see(call, tensors_of(made))
        return made


class _Kernels:
    """Patches for what meta tensors do differently: attention without L x L weights, autocast, `tolist`."""

    def __init__(self, turn: Callable[[], None]) -> None:
        self.turn = turn
        self.bf16 = self.was_bf16 = False
        self.copies: dict[int, Tensor] = {}

    def patches(self) -> Iterator[AbstractContextManager]:
        """Yield the patches of torch; a torch mode would not apply in the backward pass."""
        yield patch.object(torch, "autocast", self.autocast)
        yield patch.object(nn.functional, "scaled_dot_product_attention", self._product(_attention))
        for owner, name in PRODUCTS:
            yield patch.object(owner, name, self._product(getattr(owner, name)))
        yield patch.object(Tensor, "tolist", _listed(Tensor.tolist))
        yield patch.object(Tensor, "backward", self._backward(Tensor.backward))

    @contextmanager
    def autocast(self, device: str, dtype: Any = None, enabled: bool = True, **_: Any) -> Iterator[None]:
        """Run matrix products in bfloat16, on copies of float32 weights."""
        before, self.bf16 = self.bf16, enabled
        self.was_bf16 |= enabled
        try:
            yield
        finally:
            self.bf16 = before
            if not before:
                self.copies.clear()

    def _product(self, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def product(*args: Any, **kwargs: Any) -> Tensor:
            if self.bf16:
                args = tuple(self._short(each) if isinstance(each, Tensor) else each for each in args)
            return plain(*args, **kwargs)

        return product

    def _backward(self, plain: Callable[..., None]) -> Callable[..., None]:
        def backward(*args: Any, **kwargs: Any) -> None:  # layers that are computed cached_op find what they had before
            self.turn()
            with self.autocast(META.type, enabled=self.was_bf16):
                plain(*args, **kwargs)
            self.turn()

        return backward

    def _short(self, tensor: Tensor) -> Tensor:
        """Cast to bfloat16, caching the copies of weights as autocast does."""
        if tensor.dtype != torch.float32:
            return tensor
        if not (tensor.is_leaf and tensor.requires_grad):
            return tensor.bfloat16()
        if id(tensor) not in self.copies:
            self.copies[id(tensor)] = tensor.bfloat16()
        return self.copies[id(tensor)]


PRODUCTS: list[tuple[Any, str]] = [(nn.functional, "linear"), (torch, "addmm"), (torch, "bmm"), (torch, "matmul")]
PRODUCTS += [(Tensor, "matmul"), (Tensor, "__matmul__")]


def _listed(plain: Callable[[Tensor], list[Any]]) -> Callable[[Tensor], list[Any]]:
    def listed(tensor: Any) -> list[Any]:
        if tensor.device != META:
            return plain(tensor)
        return _content(tensor)

    return listed


def _content(tensor: Any) -> list[Any]:
    """Return a tensor's content, by default 0, 1, 2, ..."""
    return tensor.content if hasattr(tensor, "content") else list(range(len(tensor)))


def _known(call: Any, args: Any, kwargs: dict[str, Any], given: list[Any]) -> Any:
    """Return the result of an operation on tensors with content, such as row lengths; else None."""
    if call is ATEN.repeat_interleave.Tensor and not hasattr(given[0], "content"):
        return given[0].new_empty(sum(_content(given[0])))
    if not given or not all(hasattr(each, "content") for each in given):
        return None

    def real(each: Any) -> Any:
        known = any(each is tensor for tensor in given)
        return torch.tensor(each.content, dtype=each.dtype) if known else each

    kwargs = {name: torch.device("cpu") if name == "device" and value else value for name, value in kwargs.items()}
    found = call(*tree_map(real, args), **kwargs)
    if not isinstance(found, Tensor):
        return None
    made: Any = found.to(META)
    made.content = found.tolist()
    return made


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    return ATTENTION(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


def _attention_flops(query: Tensor, key: Tensor, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """Count two products of (L, D) and (D, K) per head."""
    return 4 * query.shape[:3].numel() * key.shape[2] * query.shape[3]


def _attention_backward_flops(grad: Tensor, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> int:
    """Count five products: the weights again, and the gradients of value, weights, query, key."""
    return 10 * query.shape[:3].numel() * key.shape[2] * query.shape[3]


COSTS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    ATEN.addmm_: flop_registry[ATEN.addmm],
    ATTENTION: _attention_flops,
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}


class StepTimer:
    """Context manager that measures `work` in seconds."""

    device = torch.device("cpu")
    together = 8  # micro-batches to run, so that the optimizer's share of the time is realistic

    def __init__(
        self, models: Iterable[nn.Module], vocabulary: int, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        self.work = 0.0
        self.moments: dict[Any, Counter[str]] = {}  # bytes are not counted

    def __enter__(self) -> "StepTimer":
        self._began = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.work = time.perf_counter() - self._began

    def mark(self, kind: str, tensors: Iterable[Any]) -> None:
        """Do nothing; kinds do not matter for time."""
