"""Rows of unlike length laid end to end, so that nothing is computed for padding.

Nearly all of a transformer works on each token by itself, and so sees real tokens alone: (1, T, H). Only attention has
to know which row a token is of. There, and nowhere else, the rows are laid out as rectangles (n, L), attended to by
transformers' own `sdpa` code under the mask that it makes for such a rectangle, and laid end to end again. On a CPU a
rectangle holds neighbours of one length, which costs no copy and no padding; on an accelerator, where a call costs more
than padding does, all rows share one.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "sdpa_by_row"  # what packed models have as their attn_implementation


@dataclass(frozen=True)
class Rectangle:
    """Rows that are attended to together."""

    lengths: Sequence[int]  # of its n rows, which lie one after the other
    width: int  # L, the longest of them
    source: Tensor | None = None  # (n L,) int64: the token at each place, any real one on padding; none: no padding
    places: Tensor | None = None  # (T,) int64: the place of each token

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> "Rectangle":
        """The rectangle of rows of these lengths."""
        width, counts = max(lengths), torch.tensor(lengths)
        if min(lengths) == width:
            return cls(lengths, width)
        columns = torch.arange(width)
        real = columns < counts[:, None]
        source = torch.where(real, (counts.cumsum(0) - counts)[:, None] + columns, 0).flatten()
        return cls(lengths, width, source.to(device), real.flatten().nonzero()[:, 0].to(device))

    def unpack(self, x: Tensor) -> Tensor:
        """(1, heads, T, D) -> (n, heads, L, D)."""
        tokens = x[0].transpose(0, 1)
        if self.source is not None:
            tokens = tokens.index_select(0, self.source)
        return tokens.reshape(len(self.lengths), self.width, *tokens.shape[1:]).transpose(1, 2)

    def pack(self, x: Tensor) -> Tensor:
        """(n, L, heads, D) -> (1, T, heads, D)."""
        tokens = x.flatten(0, 1)
        return (tokens if self.places is None else tokens.index_select(0, self.places))[None]


@dataclass(frozen=True)
class Rows:
    """Where the T tokens of n rows lie. Goes through a model in the place of its attention mask."""

    rectangles: Sequence[Rectangle]
    mask: Tensor | None = None  # (1, 1, L, L) bool of the layer, for the longest row; none: plain causal

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> "Rows":
        """Rows of the given lengths, one after the other."""
        if device.type != "cpu":
            return cls([Rectangle.of(lengths, device)])
        return cls([Rectangle(list(alike), width) for width, alike in groupby(lengths) if width])

    @property
    def width(self) -> int:
        return max(rectangle.width for rectangle in self.rectangles)

    def split(self, x: Tensor) -> Iterator[Tensor]:
        """(1, heads, T, D) -> each rectangle's (n, heads, L, D)."""
        parts = x.split([sum(rectangle.lengths) for rectangle in self.rectangles], dim=2)
        return (rectangle.unpack(part) for rectangle, part in zip(self.rectangles, parts, strict=True))


_current: ContextVar[Rows | None] = ContextVar("rows", default=None)


def _mask(batch_size: int, q_length: int, kv_length: int, **how: Any) -> Any:
    """What a layer's attention gets as its mask: while a packed batch goes in, its `Rows`."""
    rows = _current.get()
    if rows is None:
        return sdpa_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length, **how)
    how["attention_mask"] = None  # what stands right of a real token cannot reach it
    return replace(rows, mask=sdpa_mask(batch_size=1, q_length=rows.width, kv_length=rows.width, **how))


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **how: Any
) -> tuple[Tensor, None]:
    """Attention of a packed batch where its `Rows` come as the mask, else transformers' `sdpa`."""
    if not isinstance(attention_mask, Rows):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **how)
    rows, found = attention_mask, []
    for rectangle, *parts in zip(rows.rectangles, *map(rows.split, (query, key, value)), strict=True):
        mask = None if rows.mask is None else rows.mask[..., : rectangle.width, : rectangle.width]
        found.append(rectangle.pack(sdpa_attention_forward(module, *parts, mask, **how)[0]))
    return torch.cat(found, dim=1), None


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
    row = torch.tensor([0, 0, 0, 0, 0, 1, 1, 2, 2, 2, 2], device=model.device)
    column = torch.tensor([0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3], device=model.device)
    ids = (torch.arange(15, device=model.device) % model.config.get_text_config().vocab_size).reshape(3, 5)
    return hidden_at(model.base_model, ids, lengths, row, column)


def _alike(found: Tensor, wanted: Tensor) -> bool:
    """Apart by rounding alone; a token that saw another row's would be far off."""
    return bool((found - wanted).float().norm() <= 0.02 * wanted.float().norm())


def hidden_at(body: Any, ids: Tensor, lengths: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Last hidden states (N, H) of a causal body at (row, column) of ids (n, L), of `lengths` (n,), padded right."""
    if not packs(body):  # a causal model needs no mask for what stands right of the real tokens
        return body(input_ids=ids[:, : int(lengths.max())], use_cache=False).last_hidden_state[row, column]
    starts, rows = lengths.cumsum(0) - lengths, torch.repeat_interleave(lengths)
    columns = torch.arange(len(rows), device=ids.device) - starts[rows]
    flat, token = ids[rows, columns][None], _current.set(Rows.of(lengths.tolist(), ids.device))
    try:  # a mask of ones keeps transformers from making its own out of the positions
        output = body(input_ids=flat, attention_mask=torch.ones_like(flat), position_ids=columns[None], use_cache=False)
    finally:
        _current.reset(token)
    return output.last_hidden_state[0, starts[row] + column]
