"""What stands for a stage's rows and models where only shapes matter."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

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
    def usual(self) -> "Lengths":
        """Of the rows on average, parted like the longest."""
        share = self.mean / self.row if self.mean else 1
        return Lengths(*(max(1, round(share * tokens)) for tokens in (self.prompt, self.response)))


def rollout(rows: int, lengths: Lengths, device: torch.device) -> Rollout:
    """So many rows, all as long as the longest; on the meta device without content."""
    mask = torch.ones(rows, lengths.row, dtype=torch.bool, device=device)
    ids = torch.zeros(rows, lengths.row, dtype=torch.int64, device=device)
    kind = Ghosts if device == META else Rollout
    return kind(ids, mask, mask[:, lengths.prompt :].clone(), mask[:, 0].clone())


@dataclass(frozen=True)
class Ghosts(Rollout):
    """Rows without content, all of one length."""

    def to(self, device: torch.device) -> "Ghosts":
        return self

    @property
    def lengths(self) -> Tensor:
        return self._alike(len(self))

    @cached_property
    def repetition(self) -> Tensor:
        """Nobody reads what was not written; a real one takes a few bytes a row."""
        return torch.zeros(len(self), device=META)

    def micro_batch(self, rows: Tensor) -> MicroBatch:
        tokens = torch.zeros(len(rows) * self.response_mask.shape[1], dtype=torch.int64, device=META)
        return MicroBatch(rows, self.ids[: len(rows)], self._alike(len(rows)), tokens, tokens, tokens, tokens)

    def _alike(self, rows: int) -> Tensor:
        found: Any = torch.zeros(rows, dtype=torch.int64, device=META)
        found.content = [self.ids.shape[1]] * rows
        return found


def prime(optimizer: torch.optim.Optimizer, *, gradients: bool) -> None:
    """Give an optimizer what it has after its first step, and if asked the weights their gradients.

    One of 8 bits makes its own, and no steps from then on: they are one kernel, that holds nothing else.
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
