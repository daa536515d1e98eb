"""Sequence packing: rows of different lengths are concatenated, so that nothing is computed for padding.

Most of a transformer processes each token by itself, and so gets the real tokens only: (1, T, H). Attention reads rows.
On a CUDA GPU in half precision torch's variable-length kernel attends to the concatenated rows as they are. Elsewhere,
and under a mask other than the causal one, the rows are padded to batches (n, L), for transformers' own `sdpa` code and
mask, and concatenated again. On a CPU a batch contains consecutive rows of one length, which needs no padding. On an
accelerator, where a call costs more than padding, all rows form one batch.
"""

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rlhf_cli.models import build, devices
from rlhf_cli.models.parallel import SINGLE_PROCESS, ProcessGroup

ATTN_IMPLEMENTATION = "sdpa_by_row"  # of packed models
ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}  # that `_attend` computes
TOLERANCE = 1e-4  # of the trial, as a share of the norm
TOLERANCE_BF16 = 0.02
MAX_HEAD_SIZE = 256  # of the variable-length kernel; a multiple of 8
WIDTH_MULTIPLE = 256  # of the longest row, for the kernel: fewer numbers for torch.compile to specialise on
GROUPED_HEADS = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}  # torch 2.11


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
        width = max(lengths)
        if min(lengths) == width:
            return cls(lengths, width)
        counts = torch.tensor(lengths)
        starts = counts.cumsum(0) - counts
        columns = torch.arange(width)
        is_real = columns < counts[:, None]  # (n, L)
        source_index = starts[:, None] + columns % counts[:, None]
        cell_index = is_real.flatten().nonzero()[:, 0]
        return cls(lengths, width, source_index.flatten().to(device), cell_index.to(device))

    def pad(self, x: Tensor) -> Tensor:
        """(1, heads, T, D) -> (n, heads, L, D)."""
        tokens = x[0].transpose(0, 1)
        if self.source_index is not None:
            tokens = tokens.index_select(0, self.source_index)
        return tokens.reshape(len(self.lengths), self.width, *tokens.shape[1:]).transpose(1, 2)

    def unpad(self, x: Tensor) -> Tensor:
        """(n, L, heads, D) -> (1, T, heads, D)."""
        tokens = x.flatten(0, 1)
        if self.cell_index is not None:
            tokens = tokens.index_select(0, self.cell_index)
        return tokens[None]


@dataclass(frozen=True)
class PackedRows:
    """Positions of n rows in T concatenated tokens. Passed through a model in place of its attention mask."""

    batches: Sequence[PaddedBatch]
    mask: Tensor | None = None  # (1, 1, L, L) bool of the layer, for the longest row; None for plain causal attention
    ends: Tensor | None = None  # (n + 1,) int32: 0, and the token behind each row; None on a CPU
    max_width: int = 0  # at least the longest row, with `ends`

    @classmethod
    def from_lengths(cls, lengths: list[int], device: torch.device) -> "PackedRows":
        """Return consecutive rows of the given lengths."""
        if device.type != "cpu":
            return cls.on_accelerator(lengths, device)
        return cls([PaddedBatch(list(group), width) for width, group in groupby(lengths) if width])

    @classmethod
    def on_accelerator(cls, lengths: list[int], device: torch.device) -> "PackedRows":
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device)
        max_width = -(-max(lengths) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
        return cls([PaddedBatch.from_lengths(lengths, device)], ends=ends, max_width=max_width)

    @property
    def width(self) -> int:
        return max(batch.width for batch in self.batches)

    def split(self, x: Tensor) -> Iterator[Tensor]:
        """(1, heads, T, D) -> (n, heads, L, D) of each batch."""
        sizes = [sum(batch.lengths) for batch in self.batches]
        for batch, chunk in zip(self.batches, x.split(sizes, dim=2), strict=True):
            yield batch.pad(chunk)


_current: ContextVar[PackedRows | None] = ContextVar("rows", default=None)


def _mask(batch_size: int, q_length: int, kv_length: int, **options: Any) -> Any:
    """Return a layer's attention mask; for a packed batch its `PackedRows`."""
    rows = _current.get()
    if rows is None:
        return sdpa_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length, **options)
    options["attention_mask"] = None  # no real token attends to the padding on its right
    mask = sdpa_mask(batch_size=1, q_length=rows.width, kv_length=rows.width, **options)
    return replace(rows, mask=mask)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of packed rows if the mask is a `PackedRows`, else as transformers' `sdpa` does.

    query (b, heads, Q, D), key and value (b, key heads, K, D) -> (b, Q, heads, D).
    """
    if isinstance(attention_mask, PackedRows):
        if _takes_varlen_kernel(attention_mask, query, key, value, options):
            return _attend_varlen(attention_mask, query, key, value, options), None
        return _attend_padded(module, attention_mask, query, key, value, options), None
    if query.is_cuda and query.shape[2] == 1 and _is_plain(options):
        return _attend_to_cache(query, key, value, attention_mask, options), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


def _is_plain(options: dict[str, Any]) -> bool:
    """Return True if a layer's attention is softmax(scaling * q k) v: no bias and no soft-capping."""
    return options.get("position_bias") is None and options.get("softcap") is None


def _takes_varlen_kernel(
    rows: PackedRows,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: dict[str, Any],
) -> bool:
    """Return True if torch's variable-length kernel computes this attention."""
    if not query.is_cuda or rows.mask is not None or not _is_plain(options):
        return False
    size = query.shape[3]
    if key.shape[3] != size or value.shape[3] != size:
        return False
    if size > MAX_HEAD_SIZE or size % 8:
        return False
    return _attention_dtype(query) in (torch.bfloat16, torch.float16)


def _attention_dtype(query: Tensor) -> torch.dtype:
    """Return the dtype in which `sdpa` would compute: autocast's, or the query's."""
    device = query.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return query.dtype


def _attend_varlen(
    rows: PackedRows,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: dict[str, Any],
) -> Tensor:
    """Attend from each token to its row, without padding: (1, heads, T, D) -> (1, T, heads, D)."""
    dtype = _attention_dtype(query)
    q, k, v = (each[0].transpose(0, 1).to(dtype) for each in (query, key, value))  # (T, heads, D) each
    ends = rows.ends
    width = rows.max_width
    assert ends is not None
    causal: Any = {"window_size": (-1, 0), "scale": options.get("scaling"), **GROUPED_HEADS}
    output: Any = varlen_attn(q, k, v, ends, ends, width, width, **causal)
    return output[None]


@torch.compiler.disable  # its batches differ in number and width each time
def _attend_padded(
    module: Any,
    rows: PackedRows,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: dict[str, Any],
) -> Tensor:
    """Attend within each padded batch of rows: (1, heads, T, D) -> (1, T, heads, D)."""
    outputs = []
    for batch, q, k, v in zip(rows.batches, rows.split(query), rows.split(key), rows.split(value), strict=True):
        mask = rows.mask
        if mask is not None:
            mask = mask[..., : batch.width, : batch.width]
        output, _ = sdpa_attention_forward(module, q, k, v, mask, **options)
        outputs.append(batch.unpad(output))
    return torch.cat(outputs, dim=1)


def _attend_to_cache(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
    """Attend from one token of each row to its cache, (b, 1, heads, D), with no copy of a key for each query head.

    The query heads of a key head are a column of queries: the mask is the same for all. transformers copies keys where
    it is compiled: 0.94 ms in place of 0.04 for 512 rows of 384 positions on an H200.
    """
    of_key_heads = query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])
    output = F.scaled_dot_product_attention(of_key_heads, key, value, mask, scale=options.get("scaling"))
    return output.reshape(query.shape).transpose(1, 2)


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
    if packed:
        _set_attention(models, ATTN_IMPLEMENTATION)
    return packed


def _set_attention(models: Iterable[Any], name: str) -> None:
    for model in models:
        if model.config._attn_implementation != name:
            model.set_attn_implementation(name)


def _enable_after_trial(models: Sequence[Any]) -> bool:
    """Make all models pack if each can, and gives the same hidden states; return if they do."""
    unpacked = [model for model in models if not is_enabled(model)]
    if not all(map(_may_pack, unpacked)):
        return False

    expected = [_trial(model) for model in unpacked]
    _set_attention(unpacked, ATTN_IMPLEMENTATION)
    if all(map(_packs_right, unpacked, expected)):
        return True
    _set_attention(unpacked, "sdpa")
    return False


def _may_pack(model: Any) -> bool:
    """Return True if a model's architecture allows a trial."""
    parameters = inspect.signature(build.backbone(model).forward).parameters
    if model.config._attn_implementation != "sdpa" or "position_ids" not in parameters:
        return False
    return _attends_only(model)


def _attends_only(model: Any) -> bool:
    """Return True if only attention reads other tokens. Convolutions and recurrences would read the previous row."""
    layer_types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    if not ATTENTION_LAYERS.issuperset(layer_types):
        return False
    return not any(isinstance(module, nn.Conv1d) for module in build.backbone(model).modules())


@torch.no_grad()
def _trial(model: Any) -> Tensor:
    """Return the hidden states (11, H) of rows of 5, 2 and 4 tokens, padded to a batch."""
    backbone = build.backbone(model)
    device = model.device
    lengths = torch.tensor([5, 2, 4], device=device)
    is_real = torch.arange(5, device=device) < lengths[:, None]
    row, column = is_real.nonzero(as_tuple=True)
    vocab_size = model.config.get_text_config().vocab_size
    ids = torch.arange(15, device=device).reshape(3, 5) % vocab_size

    stored_for_autocast = any(weight.dtype == torch.bfloat16 for weight in model.parameters())  # lora.autocast_matrices
    with devices.autocast(bf16=stored_for_autocast, on=device):
        return hidden_states_at(backbone, ids, lengths, row, column)


def _packs_right(model: Any, expected: Tensor) -> bool:
    """Return True if states differ by rounding only. A token that attends to another row would differ far more."""
    if not is_enabled(model):
        return False
    try:
        states = _trial(model)
    except (AttributeError, TypeError):  # attention that computes with its mask, such as Doge's
        return False
    exact = all(weight.dtype in (torch.float32, torch.float64) for weight in model.parameters())  # none of 4 bits
    tolerance = TOLERANCE if exact else TOLERANCE_BF16
    difference = (states - expected).float().norm()
    return bool(difference <= tolerance * expected.float().norm())


def hidden_states_at(backbone: Any, ids: Tensor, lengths: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Return a causal backbone's last hidden states (N, H) at (row, column) of `ids` (n, L), padded on the right.

    `lengths` (n,) are the rows' tokens, `row` and `column` (N,) the indices.
    """
    if not is_enabled(backbone):  # a causal model needs no mask for padding on the right
        width = int(lengths.max())
        return backbone(input_ids=ids[:, :width], use_cache=False).last_hidden_state[row, column]

    starts = lengths.cumsum(0) - lengths
    rows = torch.repeat_interleave(lengths)  # row of each token, (T,)
    columns = torch.arange(len(rows), device=ids.device) - starts[rows]
    tokens = ids[rows, columns][None]
    packed = PackedRows.from_lengths(lengths.tolist(), ids.device)
    reset_token = _current.set(packed)
    try:
        output = backbone(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),  # without it transformers derives one from the positions
            position_ids=columns[None],
            use_cache=False,
        )
    finally:
        _current.reset(reset_token)
    return output.last_hidden_state[0, starts[row] + column]
