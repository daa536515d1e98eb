"""Passes of a frozen model over held-out rows, shared among the processes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from rlhf_cli.models import build, forward
from rlhf_cli.models.batch import IGNORE_INDEX, right_pad
from rlhf_cli.models.parallel import ProcessGroup

T = TypeVar("T")


def batches_by_length(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Return the indices of rows with these lengths, in batches of `size` rows of similar length."""
    order = sorted(range(len(lengths)), key=lambda row: lengths[row])
    return [order[first : first + size] for first in range(0, len(order), size)]


def gather_rows(process_group: ProcessGroup, rank_values: Mapping[int, T]) -> list[T]:
    """Return the values of all rows, in order, on all ranks; `rank_values` are this rank's, by the row's index."""
    return in_row_order(process_group.all_gather_object(rank_values))


def in_row_order(parts: Iterable[Mapping[int, T]]) -> list[T]:
    """Return the values of all rows, in order, from parts by the row's index."""
    values: dict[int, T] = {}
    for part in parts:
        values.update(part)
    return [values[row] for row in range(len(values))]


def hidden_at_labels(
    model: Any,
    ids: Sequence[list[int]],
    labels: Sequence[list[int]],
    pad_id: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the hidden states that predict the labelled tokens, (N, H), these tokens (N,), and the row of each (N,).

    A label is the token at its position, or IGNORE_INDEX; nothing predicts the first token.
    """
    device = model.device
    input_ids, mask = right_pad(ids, pad_id)
    padded_labels, _ = right_pad(labels, IGNORE_INDEX)
    next_labels = padded_labels[:, 1:].to(device)
    row, column = (next_labels != IGNORE_INDEX).nonzero(as_tuple=True)

    output = build.decoder(model)(
        input_ids=input_ids.to(device),
        attention_mask=mask.long().to(device),
        use_cache=False,
    )
    return output.last_hidden_state[row, column], next_labels[row, column], row


def logprobs_in_parts(model: Any, hidden: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield the log-probs (n, V) float32 of some of the hidden states (N, H) at a time, and which: it saves memory."""
    for part in forward.logit_chunks(model, len(hidden)):
        logits = forward.lm_head_logits(model, hidden[part])
        yield part, logits.float().log_softmax(-1)
