"""Frozen models that wait in the CPU's memory, and come onto an accelerator while they are read."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor


def wait_on_cpu(model: Any) -> None:
    """Move a model into the CPU's memory: into pages that cannot be swapped out, which an accelerator copies fast."""
    model.to("cpu")
    if torch.accelerator.is_available():
        for tensor in _tensors(model):
            tensor.data = tensor.data.pin_memory()


@contextmanager
def visiting(model: Any, device: torch.device) -> Iterator[None]:
    """Within, a copy of a frozen model's tensors on the device stands for them; nobody may change it, it is dropped."""
    home = [(tensor, tensor.data) for tensor in _tensors(model)]
    for tensor, waiting in home:
        tensor.data = torch.empty_like(waiting, device=device).copy_(waiting, non_blocking=True)
    try:
        yield
    finally:
        for tensor, waiting in home:
            tensor.data = waiting


def _tensors(model: Any) -> list[Tensor]:
    """Weights and buffers, what is tied once."""
    return list(chain(model.parameters(), model.buffers()))
