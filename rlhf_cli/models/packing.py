"""Sequence packing: rows of different lengths are concatenated, so that nothing is computed for padding.

Most of a transformer processes each token by itself, and so gets the real tokens only: (1, T, H). In attention the rows
are padded to batches (n, L), for transformers' own `sdpa` code and mask, and concatenated again. On a CPU a batch
contains consecutive rows of one length, which needs no padding. On an accelerator, where a call costs more than
padding, all rows form one batch.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rlhf_cli.models import build
from rlhf_cli.models.parallel import SINGLE_PROCESS, ProcessGroup

ATTN_IMPLEMENTATION = "sdpa_by_row"  # of packed models
ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}  # that `_attend` computes
TOLERANCE, TOLERANCE_BF16 = 1e-4, 0.02  # of the trial, as a share of the norm


@dataclass(frozen=True)
class PaddedBatch:
    """Rows that are attended to together, padded to one length."""

    lengths: Sequence[int]  # of its n consecutive rows
    width: int  # L, the longest of them
    source_index: Tensor | None = None  # (n L,) int64: token of each cell; None without padding
    cell_index: Tensor | None = None  # (T,) int64: cell of each token; None without padding

    @classmethod
    def from_lengths(cls, lengths: list[int], device: torch.device) -> "PaddedBatch":
        """Return the batch of rows of these lengths, none of them 0. A row's padding repeats its own tokens.

        With one token for all padding, the backward pass would add the zeros of all these cells at one address.
        """
        width, counts = max(lengths), torch.tensor(lengths)
        if min(lengths) == width:
            return cls(lengths, width)
        columns = torch.arange(width)
        real = columns < counts[:, None]
        source_index = ((counts.cumsum(0) - counts)[:, None] + columns % counts[:, None]).flatten()
        return cls(lengths, width, source_index.to(device), real.flatten().nonzero()[:, 0].to(device))

    def pad(self, x: Tensor) -> Tensor:
        """(1, heads, T, D) -> (n, heads, L, D)."""
        tokens = x[0].transpose(0, 1)
        if self.source_index is not None:
            tokens = tokens.index_select(0, self.source_index)
        return tokens.reshape(len(self.lengths), self.width, *tokens.shape[1:]).transpose(1, 2)

    def unpad(self, x: Tensor) -> Tensor:
        """(n, L, heads, D) -> (1, T, heads, D)."""
        tokens = x.flatten(0, 1)
        return (tokens if self.cell_index is None else tokens.index_select(0, self.cell_index))[None]


@dataclass(frozen=True)
class PackedRows:
    """Positions of n rows in T concatenated tokens. Passed through a model in place of its attention mask."""

    batches: Sequence[PaddedBatch]
    mask: Tensor | None = None  # (1, 1, L, L) bool of the layer, for the longest row; None for plain causal attention

    @classmethod
    def from_lengths(cls, lengths: list[int], device: torch.device) -> "PackedRows":
        """Return consecutive rows of the given lengths."""
        if device.type != "cpu":
            return cls([PaddedBatch.from_lengths(lengths, device)])
        return cls([PaddedBatch(list(group), width) for width, group in groupby(lengths) if width])

    @property
    def width(self) -> int:
        return max(batch.width for batch in self.batches)

    def split(self, x: Tensor) -> Iterator[Tensor]:
        """(1, heads, T, D) -> (n, heads, L, D) of each batch."""
        chunks = x.split([sum(batch.lengths) for batch in self.batches], dim=2)
        return (batch.pad(chunk) for batch, chunk in zip(self.batches, chunks, strict=True))


_current: ContextVar[PackedRows | None] = ContextVar("rows", default=None)


def _mask(batch_size: int, q_length: int, kv_length: int, **options: Any) -> Any:
    """Return a layer's attention mask; for a packed batch its `PackedRows`."""
    rows = _current.get()
    if rows is None:
        return sdpa_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length, **options)
    options["attention_mask"] = None  # no real token attends to the padding on its right
    return replace(rows, mask=sdpa_mask(batch_size=1, q_length=rows.width, kv_length=rows.width, **options))


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Compute attention by padded batches if the mask is a `PackedRows`, else with transformers' `sdpa`."""
    if not isinstance(attention_mask, PackedRows):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    rows, outputs = attention_mask, []
    for batch, *qkv in zip(rows.batches, *map(rows.split, (query, key, value)), strict=True):
        mask = None if rows.mask is None else rows.mask[..., : batch.width, : batch.width]
        outputs.append(batch.unpad(sdpa_attention_forward(module, *qkv, mask, **options)[0]))
    return torch.cat(outputs, dim=1), None


AttentionInterface.register(ATTN_IMPLEMENTATION, _attend)
AttentionMaskInterface.register(ATTN_IMPLEMENTATION, _mask)


def is_enabled(model: Any) -> bool:
    """Return True if a model packs its rows."""
    return model.config._attn_implementation == ATTN_IMPLEMENTATION


def enable(models: Sequence[Any], process_group: ProcessGroup = SINGLE_PROCESS) -> bool:
    """Make all models pack their rows; if one of them cannot, change nothing and return False.

    A model cannot if its attention is not transformers' `sdpa`, if it has convolutions or recurrent layers, or if
    packing changes its hidden states in a trial. Of a process group only the main process tries: the others' models may
    be empty.
    """
    packed = process_group.run_on_main(lambda: _enable_after_trial(models))
    for model in models if packed else ():
        if not is_enabled(model):
            model.set_attn_implementation(ATTN_IMPLEMENTATION)
    return packed


def _enable_after_trial(models: Sequence[Any]) -> bool:
    unpacked = [model for model in models if not is_enabled(model)]
    for model in unpacked:
        accepts_positions = "position_ids" in inspect.signature(build.backbone(model).forward).parameters
        if model.config._attn_implementation != "sdpa" or not accepts_positions or not _attends_only(model):
            return False
    expected = [_trial(model) for model in unpacked]
    for model in unpacked:
        model.set_attn_implementation(ATTN_IMPLEMENTATION)
    pairs = zip(unpacked, expected, strict=True)
    if all(is_enabled(model) and _packs_right(model, states) for model, states in pairs):
        return True
    for model in filter(is_enabled, unpacked):
        model.set_attn_implementation("sdpa")
    return False


def _attends_only(model: Any) -> bool:
    """Return True if only attention reads other tokens. Convolutions and recurrences would read the previous row."""
    layer_types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    convolves = any(isinstance(module, nn.Conv1d) for module in build.backbone(model).modules())
    return ATTENTION_LAYERS.issuperset(layer_types) and not convolves


@torch.no_grad()
def _trial(model: Any) -> Tensor:
    lengths = torch.tensor([5, 2, 4], device=model.device)
    row = torch.tensor([0, 0, 0, 0, 0, 1, 1, 2, 2, 2, 2], device=model.device)
    column = torch.tensor([0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3], device=model.device)
    ids = (torch.arange(15, device=model.device) % model.config.get_text_config().vocab_size).reshape(3, 5)
    stored_for_autocast = any(weight.dtype == torch.bfloat16 for weight in model.parameters())  # lora.autocast_matrices
    with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=stored_for_autocast):
        return hidden_states_at(build.backbone(model), ids, lengths, row, column)


def _packs_right(model: Any, expected: Tensor) -> bool:
    """Return True if states differ by rounding only. A token that attends to another row would differ far more."""
    try:
        states = _trial(model)
    except (AttributeError, TypeError):  # attention that computes with its mask, such as Doge's
        return False
    exact = all(weight.dtype in (torch.float32, torch.float64) for weight in model.parameters())  # none of 4 bits
    tolerance = TOLERANCE if exact else TOLERANCE_BF16
    return bool((states - expected).float().norm() <= tolerance * expected.float().norm())


def hidden_states_at(backbone: Any, ids: Tensor, lengths: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Return a causal backbone's last hidden states (N, H) at (row, column) of `ids` (n, L), padded on the right.

    `lengths` (n,) are the rows' tokens, `row` and `column` (N,) the indices.
    """
    if not is_enabled(backbone):  # a causal model needs no mask for padding on the right
        return backbone(input_ids=ids[:, : int(lengths.max())], use_cache=False).last_hidden_state[row, column]
    starts, rows = lengths.cumsum(0) - lengths, torch.repeat_interleave(lengths)
    columns = torch.arange(len(rows), device=ids.device) - starts[rows]
    flat, token = ids[rows, columns][None], _current.set(PackedRows.from_lengths(lengths.tolist(), ids.device))
    try:  # with a mask of ones transformers does not derive one from the positions
        output = backbone(
            input_ids=flat, attention_mask=torch.ones_like(flat), position_ids=columns[None], use_cache=False
        )
    finally:
        _current.reset(token)
    return output.last_hidden_state[0, starts[row] + column]
