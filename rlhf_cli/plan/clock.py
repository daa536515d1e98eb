"""What a piece of code takes of this machine's time, told by running it: in the place of a `Tally`."""

import time
from collections import Counter
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import nn


class Clock:
    """`with Clock(models, vocabulary) as clock: ...`; then `clock.work` has the seconds."""

    device = torch.device("cpu")
    together = 8  # micro-batches: enough for a small model's optimizer to be no more of a step than it is

    def __init__(
        self, models: Iterable[nn.Module], vocabulary: int, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        self.work = 0.0
        self.moments: dict[Any, Counter[str]] = {}  # bytes are not counted

    def __enter__(self) -> "Clock":
        self._began = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.work = time.perf_counter() - self._began

    def mark(self, kind: str, tensors: Iterable[Any]) -> None:
        """Of which kind tensors are changes no time."""
