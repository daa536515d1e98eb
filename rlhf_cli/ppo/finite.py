"""Numbers are finite or the run stops: R01, with the step and, where there is one, the row."""

from collections.abc import Mapping

import torch
from torch import Tensor

from rlhf_cli.errors import RLHFError
from rlhf_cli.ppo.records import MicroBatch


class NotFinite(RLHFError):
    """R01. `row` is the row of the rollout where it was found, None where no row is to blame."""

    def __init__(self, step: int, what: str, row: int | None, hint: str) -> None:
        at = "" if row is None else f" in row {row}"
        super().__init__("R01", f"step {step}: {what} is not finite{at}; training stops here", hint=hint)
        self.row = row


def check(numbers: Mapping[str, Tensor], step: int) -> None:
    """Raises NotFinite for the first of the tensors, (B, ...) or scalars, that holds nan or inf."""
    for name, tensor in numbers.items():
        bad = ~torch.isfinite(tensor)
        if bad.any():
            row = int(bad.nonzero()[0, 0]) if tensor.ndim else None
            blame = "look at the reward of that row" if "score" in name else "lower ppo.learning_rate"
            raise NotFinite(step, name, row, blame)


def check_loss(loss: Tensor, micro: MicroBatch, step: int) -> None:
    """Raises NotFinite where the loss (N,) of a micro-batch is not finite at some token."""
    bad = ~torch.isfinite(loss)
    if bad.any():
        row = int(micro.rows[micro.row[bad.nonzero()[0, 0]]])
        raise NotFinite(step, "loss", row, "lower ppo.learning_rate")


def check_weights(norms: Mapping[str, Tensor], step: int) -> None:
    """Raises NotFinite for a model, by the norm of its weights, that an optimizer step has blown up: never saved."""
    for name, norm in norms.items():
        if not torch.isfinite(norm):
            raise NotFinite(step, f"a weight of the {name} model", None, "lower ppo.learning_rate")
