"""A world without float32: code that asks for it gets float64."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@contextmanager
def everything() -> Iterator[None]:
    """Within, whatever would make or cast to float32 makes float64: transformers' norms, rotary angles and softmax, and
    scores, which PPO keeps in float32. Two ways of calculating then differ by some 1e-13 where both are right.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64():
            yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def suspended() -> Iterator[None]:
    """Within, inside `everything`, float32 is float32 again: for code of the user's, whose models are in it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch._C.DisableTorchFunction():
            yield
    finally:
        torch.set_default_dtype(before)


class _Float64(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.Tensor.float:
            return args[0].double()
        wide = {name: _wide(value) for name, value in (kwargs or {}).items()}
        return function(*map(_wide, args), **wide)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
