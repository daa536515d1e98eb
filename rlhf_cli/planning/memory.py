"""Memory of language models in closed form: for `rlhf plan`, the check before a run and `rlhf init preferences`.

In bytes of float32, for W weights of which T are trained, n rows of L tokens, N response tokens, hidden size H and V
words in the vocabulary:

    weights      4 W
    gradients    4 T, until the optimizer's step
    optimizer    8 T: AdamW's moments; with 8-bit AdamW 2 T, but 8 for embeddings and small weights
    activations  what autograd keeps for a backward pass, counted in a forward pass of tensors without content. Of a
                 Llama's layer 4 n L (8 H + 2 H K / A + 4 I), for A heads of which K are key-value heads and I
                 intermediate numbers. With gradient checkpointing: 4 n L H for each layer, and one layer.
    logits       4 N V for each copy
    cache        8 H K / A for each token and layer: keys and values; half of it under autocast

The layer that is being computed needs working memory: a share of what it keeps, similar for all families. Adapters put
r (in + out) numbers beside a matrix, and these are T. With qlora a matrix takes half a byte per number, and its scales.
"""

import copy
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rlhf_cli.config.sections import LoRA
from rlhf_cli.models import build, lora, sharding

WEIGHT_BYTES, MOMENT_BYTES = 4, 8  # per parameter in float32
WORKING, WORKING_WITH_ADAPTERS, WORKING_BACKWARD = 0.67, 0.8, 0.35  # shares of what a layer keeps
LENGTH_STEP = 8  # lengths are rounded up to a multiple: similar ones are counted once
COUNTED_LAYERS = (1, 2)  # of a deeper model whose layers are alike; what the others keep follows
MIN_8BIT_NUMBERS, BLOCK_8BIT = 4096, 256  # of bitsandbytes: smaller weights have moments of 32 bits; numbers per scale


def size_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of distinct tensors."""
    return sum({id(tensor): tensor.nbytes for tensor in tensors}.values())


def layer_bytes(model: Any) -> int:
    """Return the bytes of a model's decoder layers."""
    return size_bytes(sharding.decoder_layers(model).parameters())


def vocabulary_bytes(model: Any) -> int:
    """Return the bytes of a model's embeddings and output head."""
    return size_bytes(weight for weight, _ in sharding.vocabulary_weights(model))


@dataclass(frozen=True)
class Lengths:
    """Tokens of the longest rows: `prompt` and `response` where a stage generates, the two together where it reads.

    `mean`: tokens of an average row, `prompt_mean` and `response_mean` of an average prompt and of its response; 0 if
    not known.
    """

    prompt: int
    response: int
    mean: float = 0
    prompt_mean: float = 0
    response_mean: float = 0

    @property
    def row(self) -> int:
        return self.prompt + self.response

    @property
    def average(self) -> "Lengths":
        """Lengths of an average row, with the prompt's share of the longest, or of an average prompt."""
        if self.prompt_mean:
            return Lengths(max(1, round(self.prompt_mean)), round(self.response_mean) or self.response)
        share = self.mean / self.row if self.mean else 1
        return Lengths(*(max(1, round(share * tokens)) for tokens in (self.prompt, self.response)))


class LoRALinear(nn.Module):
    """A linear layer, and two trained low-rank matrices beside it (LoRA, arXiv 2106.09685)."""

    def __init__(self, base: nn.Module, rank: int) -> None:
        super().__init__()
        layer: Any = base  # a linear layer or Conv1D
        width, height = (layer.nx, layer.nf) if hasattr(layer, "nf") else (layer.in_features, layer.out_features)
        self.base = base
        self.down = nn.Linear(width, rank, bias=False, device=base.weight.device)
        self.up = nn.Linear(rank, height, bias=False, device=base.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def add_adapters(model: Any, adapters: LoRA) -> None:
    """Add adapters to a model without content; train only these and a one-label head."""
    targets = lora.target_modules(model, adapters)
    for owner, name, layer in list(lora.linear_layers(model)):
        if name in targets:
            setattr(owner, name, LoRALinear(layer, adapters.r))
    for name, weight in model.named_parameters():
        weight.requires_grad_(".down." in name or ".up." in name or name.startswith("score."))


def bytes_saved_by_4_bits(model: Any) -> int:
    """Return how many bytes fewer a model's linear layers take in 4 bits, with a scale for each block."""
    layers = [layer for _, name, layer in lora.linear_layers(model) if name not in ("down", "up")]
    numbers = [layer.weight for layer in layers if lora.can_quantize(layer)]
    return sum(w.nbytes - -(-w.numel() // 2) - WEIGHT_BYTES * -(-w.numel() // lora.BLOCK_SIZE) for w in numbers)


def bytes_saved_by_bf16(model: Any, *, all_weights: bool = False) -> int:
    """Return how many bytes fewer the frozen matrices, or all, of a float32 model's layers take in bfloat16."""
    weights = {layer.weight for _, _, layer in lora.linear_layers(model)}
    chosen = [w for w in weights if w.dtype == torch.float32 and (all_weights or not w.requires_grad)]
    return sum(2 * w.numel() for w in chosen)


def optimizer_bytes(weights: Iterable[Tensor], full_precision: set[Tensor], *, eight_bits: bool) -> int:
    """Return the bytes of AdamW's two moments of weights; those of `full_precision` are never stored in 8 bits."""
    total = 0
    for weight in weights:
        numbers = weight.numel()
        if not eight_bits:
            total += 2 * weight.nbytes
        elif numbers < MIN_8BIT_NUMBERS or weight in full_precision:
            total += MOMENT_BYTES * numbers
        else:
            total += 2 * (numbers + WEIGHT_BYTES * -(-numbers // BLOCK_8BIT))
    return total


class Kept(NamedTuple):
    """Bytes that a forward pass of a backbone keeps for the backward pass."""

    row: int  # for each row
    copies: int  # bfloat16 copies of the weights
    layer: float  # of `row`, for each layer
    inputs: int  # inputs of all layers, for each row: what gradient checkpointing keeps


def kept_bytes(
    config: Any,
    length: int,
    *,
    dtype: str = "auto",
    attn_implementation: str | None = None,
    bf16: bool = False,
    adapters: LoRA | None = None,
) -> Kept:
    """Return what a causal LM keeps for rows of `length` tokens; with `adapters` only these are trained."""
    length = -(-length // LENGTH_STEP) * LENGTH_STEP
    options = adapters and adapters.model_dump_json(include={"kind", "r", "target_modules"})
    kind: Any = type(config)
    fields = build.one_label(config).to_json_string()  # the same for a reward model: it has the same backbone
    return _kept_bytes(kind, fields, length, dtype, attn_implementation, bf16, options)


@cache
def _kept_bytes(
    kind: Any, fields: str, length: int, dtype: str, attention: str | None, bf16: bool, options: str | None
) -> Kept:
    adapters = None if options is None else LoRA.model_validate_json(options)
    config = config_from_json(kind, fields)
    text = config.get_text_config()
    layers = text.num_hidden_layers

    def count(number: int) -> tuple[int, int, int]:
        """Return the bytes for one row, for two rows and of a layer's input, in a model of `number` layers."""
        with FakeTensorMode():
            cpu, shallow = torch.device("cpu"), with_layers(config, number)
            model = build.causal_lm_from_config(shallow, dtype=dtype, attn_implementation=attention, device=cpu)
            model.eval()
            if adapters:
                add_adapters(model, adapters)
            one, two = (_count_kept(model, rows, length, bf16=bf16) for rows in (1, 2))
        return one, two, length * text.hidden_size * model.dtype.itemsize

    if layers > COUNTED_LAYERS[-1] and has_equal_layers(kind, fields):
        few, more = (count(each) for each in COUNTED_LAYERS)
        one, two = (a + (layers - COUNTED_LAYERS[0]) * (b - a) for a, b in zip(few[:2], more[:2], strict=True))
        size = few[2]
    else:
        one, two, size = count(layers)
    row = two - one
    return Kept(row, one - row, row / layers, layers * size)


def config_from_json(kind: Any, fields: str) -> Any:
    """Return the config of a JSON text by transformers, which writes infinity as {"__float__": "Infinity"}."""
    decoded = json.loads(fields, object_hook=lambda each: float(each["__float__"]) if "__float__" in each else each)
    return kind.from_dict(decoded)


def with_layers(config: Any, count: int) -> Any:
    """Return a copy of a config with its first `count` layers, lists with an item per layer included."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == text.num_hidden_layers:
            setattr(text, name, value[:count])
    text.num_hidden_layers = count
    return config


@cache
def has_equal_layers(kind: Any, fields: str) -> bool:
    """Return True if all decoder layers of a config's model have weights of the same shapes."""
    model = build.causal_lm_from_config(config_from_json(kind, fields))
    return len({str([weight.shape for weight in layer.parameters()]) for layer in sharding.decoder_layers(model)}) == 1


def _count_kept(model: Any, rows: int, length: int, *, bf16: bool) -> int:
    weights = {each.untyped_storage()._cdata for each in (*model.parameters(), *model.buffers())}
    storages: dict[int, Any] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage  # kept alive, so that no other has its address
        return tensor

    ids = torch.zeros(rows, length, dtype=torch.int64)
    with (
        patch("transformers.masking_utils.find_packed_sequence_indices", return_value=None),  # it reads contents
        patch("transformers.integrations.moe._can_use_grouped_mm", return_value=False),  # no float32 without contents
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16),
    ):
        _output = build.backbone(model)(input_ids=ids, use_cache=False)
    return sum(storage.nbytes() for address, storage in storages.items() if address not in weights)
