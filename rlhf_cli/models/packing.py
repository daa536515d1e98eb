"""Rows of unlike length laid end to end, so that nothing is computed for padding.

Nearly all of a transformer works on each token by itself, and so sees real tokens alone: (1, T, H). Only attention has
to know which row a token is of. There, and nowhere else, the rows are laid out as the rectangle (n, L) of a plain
batch, attended to by transformers' own `sdpa` code under the mask that it makes for that rectangle, and packed again.
"""

import inspect
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "sdpa_by_row"  # what packed models have as their attn_implementation


@dataclass(frozen=True)
class Rows:
    """Where the T tokens of n rows lie. Goes through a model in the place of its attention mask."""

    row: Tensor  # (T,) int64: the row of each token, in order
    column: Tensor  # (T,) int64: its place in the row
    count: int  # n
    width: int  # L, the longest row's length
    mask: Tensor | None = None  # (n, 1, L, L) bool of the layer; none: plain causal

    @classmethod
    def of(cls, lengths: Tensor) -> "Rows":
        """Rows of the given lengths (n,), one after the other."""
        row = torch.repeat_interleave(lengths)
        starts = lengths.cumsum(0) - lengths
        column = torch.arange(len(row), device=lengths.device) - starts[row]
        return cls(row, column, len(lengths), int(lengths.max()))

    def unpack(self, x: Tensor) -> Tensor:
        """(1, heads, T, D) -> (n, heads, L, D), zeros on padding."""
        rectangle = x.new_zeros(self.count, self.width, x.shape[1], x.shape[3])
        return rectangle.index_put((self.row, self.column), x[0].transpose(0, 1)).transpose(1, 2)

    def pack(self, x: Tensor) -> Tensor:
        """(n, L, ...) -> (1, T, ...)."""
        return x[self.row, self.column][None]


_current: ContextVar[Rows | None] = ContextVar("rows", default=None)


def _mask(batch_size: int, q_length: int, kv_length: int, **how: Any) -> Any:
    """What a layer's attention gets as its mask: while a packed batch goes in, its `Rows`."""
    rows = _current.get()
    if rows is None:
        return sdpa_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length, **how)
    how["attention_mask"] = None  # what stands right of a real token cannot reach it
    return replace(rows, mask=sdpa_mask(batch_size=rows.count, q_length=rows.width, kv_length=rows.width, **how))


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **how: Any
) -> tuple[Tensor, None]:
    """Attention of a packed batch where its `Rows` come as the mask, else transformers' `sdpa`."""
    if not isinstance(attention_mask, Rows):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **how)
    rows = attention_mask
    parts = (rows.unpack(x) for x in (query, key, value))
    return rows.pack(sdpa_attention_forward(module, *parts, rows.mask, **how)[0]), None


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _mask)


def packs(model: Any) -> bool:
    """Whether a model's rows are laid end to end."""
    return model.config._attn_implementation == NAME


def enable(models: Sequence[Any]) -> bool:
    """Let all of `models` pack their rows; False, and nothing changes, where one of them cannot.

    That is a model whose attention is not transformers' `sdpa`, and one for which a trial finds other numbers than
    those of the padded batch.
    """
    plain = [model for model in models if not packs(model)]
    if all(model.config._attn_implementation == "sdpa" and _takes_positions(model.base_model) for model in plain):
        padded = [_trial(model) for model in plain]
        for model in plain:
            model.set_attn_implementation(NAME)
        if all(packs(model) and _alike(_trial(model), wanted) for model, wanted in zip(plain, padded, strict=True)):
            return True
    for model in plain:
        if packs(model):
            model.set_attn_implementation("sdpa")
    return False


def _takes_positions(body: Any) -> bool:
    return "position_ids" in inspect.signature(body.forward).parameters


@torch.no_grad()
def _trial(model: Any) -> Tensor:
    """Last hidden states (T, H) of three short rows."""
    lengths = torch.tensor([5, 2, 4], device=model.device)
    rows = Rows.of(lengths)
    ids = (torch.arange(15, device=model.device) % model.config.get_text_config().vocab_size).reshape(3, 5)
    return hidden_at(model.base_model, ids, lengths, rows.row, rows.column)


def _alike(found: Tensor, wanted: Tensor) -> bool:
    """Apart by rounding alone; a token that saw another row's would be far off."""
    return bool((found - wanted).float().norm() <= 0.02 * wanted.float().norm())


def hidden_at(body: Any, ids: Tensor, lengths: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Last hidden states (N, H) of a causal body at (row, column) of ids (n, L), of `lengths` (n,), padded right."""
    if not packs(body):  # a causal model needs no mask for what stands right of the real tokens
        return body(input_ids=ids[:, : int(lengths.max())], use_cache=False).last_hidden_state[row, column]
    rows = Rows.of(lengths)
    flat, token = ids[rows.row, rows.column][None], _current.set(rows)
    try:  # a mask of ones keeps transformers from making its own out of the positions
        output = body(
            input_ids=flat, attention_mask=torch.ones_like(flat), position_ids=rows.column[None], use_cache=False
        )
    finally:
        _current.reset(token)
    return output.last_hidden_state[0, (lengths.cumsum(0) - lengths)[row] + column]
