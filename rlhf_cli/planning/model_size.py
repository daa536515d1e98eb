"""Size of one model of a stage, from its config alone: the bytes it takes, and what its passes keep and compute.

For W weights of which T are trained, in float32:

    weights      4 W; in bfloat16 half of a frozen matrix, in 4 bits an eighth and a scale for each block
    gradients    4 T
    optimizer    8 T: AdamW's moments; in 8 bits a quarter, except those of embeddings
    kept         what autograd keeps for a backward pass: counted in a forward pass of tensors without content

Adapters add r (in + out) numbers beside a matrix, and only these are trained.
"""

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rlhf_cli.config.sections import Adapters, LoRA
from rlhf_cli.models import build, lora, sharding

FLOAT32 = 4  # bytes of a number
BFLOAT16 = 2
MOMENTS = 2  # of AdamW, in sizes of the weights
EIGHT_BIT_MOMENTS = 2 * (1 + FLOAT32 / 256) / FLOAT32  # scales included
FOUR_BITS = 0.5 + FLOAT32 / lora.BLOCK_SIZE  # bytes of a number, scales included
DEFAULT_ADAPTERS: LoRA = Adapters(kind="lora")

READING = 0.75  # of what a layer keeps: the working memory of a pass that keeps nothing
WITH_ADAPTERS = 0.9  # of what a layer keeps, where norms and matrices are frozen
BACKWARD = 0.5  # of what a layer keeps: the working memory of its backward pass
COMPILED_SAVES = 10  # numbers in bfloat16 that a compiled layer keeps less, in hidden sizes for each token
RECOMPUTED = 0.75  # of a checkpointed layer's products: all but those of its last matrix
LENGTH_STEP = 8  # lengths are rounded up to a multiple: similar ones are counted once
COUNTED_LAYERS = (1, 2)  # of a deeper model; what the others keep follows


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
        prompt = max(1, round(share * self.prompt))
        response = max(1, round(share * self.response))
        return Lengths(prompt, response)


# An architecture


@dataclass(frozen=True)
class Architecture:
    """Numbers in the parts of a model, and the widths that its passes depend on."""

    config: Any  # of transformers
    itemsize: int  # bytes of a number
    parameters: int
    embeddings: int  # without an output head of its own
    vocabulary_parts: int  # embeddings and output head
    decoder: int  # all decoder layers
    largest_layer: int
    matrices: Mapping[str, tuple[tuple[int, int], ...]]  # name of a linear layer -> (in, out) of each
    layers: int
    hidden: int
    vocabulary: int
    heads_width: int  # 0 of a recurrent model: its state does not grow with the tokens
    key_values: int
    softcaps: bool

    @property
    def matrix_numbers(self) -> int:
        """Numbers in the backbone's matrices."""
        return sum(width * height for width, height in chain.from_iterable(self.matrices.values()))

    def adapter_numbers(self, adapters: LoRA) -> int:
        """Return the numbers of adapters beside their target matrices."""
        targets = self.matrices if adapters.target_modules == "all-linear" else adapters.target_modules
        sites = chain.from_iterable(self.matrices.get(name, ()) for name in targets)
        return adapters.r * sum(width + height for width, height in sites)


@cache
def _architecture(kind: Any, fields: str, dtype: str, attention: str | None, scorer: bool) -> Architecture:
    make = build.reward_model_from_config if scorer else build.causal_lm_from_config
    model: Any = make(config_from_json(kind, fields), dtype=dtype, attn_implementation=attention)
    text = model.config.get_text_config()
    heads = getattr(text, "num_attention_heads", 0)
    head_size = getattr(text, "head_dim", None) or text.hidden_size // max(1, heads)
    key_value_heads = getattr(text, "num_key_value_heads", None) or heads

    matrices: dict[str, list[tuple[int, int]]] = {}
    for _, name, layer in lora.linear_layers(model):
        matrices.setdefault(name, []).append(tuple(layer.weight.shape))
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    layer_sizes = [count(layer.parameters()) for layer in sharding.decoder_layers(model)]

    return Architecture(
        config=model.config,
        itemsize=model.dtype.itemsize,
        parameters=model.num_parameters(),
        embeddings=count(embeddings),
        vocabulary_parts=count(weight for weight, _ in sharding.vocabulary_weights(model)),
        decoder=sum(layer_sizes),
        largest_layer=max(layer_sizes),
        matrices={name: tuple(shapes) for name, shapes in matrices.items()},
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        heads_width=heads * head_size,
        key_values=key_value_heads * head_size,
        softcaps=getattr(text, "final_logit_softcapping", None) is not None,
    )


def count(weights: Any) -> int:
    """Return the numbers in distinct weights."""
    return sum({id(weight): weight.numel() for weight in weights}.values())


def config_from_json(kind: Any, fields: str) -> Any:
    """Return the config of a JSON text by transformers, which writes infinity as {"__float__": "Infinity"}."""
    decoded = json.loads(fields, object_hook=lambda each: float(each["__float__"]) if "__float__" in each else each)
    return kind.from_dict(decoded)


def with_layers(config: Any, number: int) -> Any:
    """Return a copy of a config with its first `number` layers, lists with an item per layer included."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == text.num_hidden_layers:
            setattr(text, name, value[:number])
    text.num_hidden_layers = number
    return config


# What a forward pass keeps


class Kept(NamedTuple):
    """Bytes that a forward pass of a backbone keeps for the backward pass."""

    row: int  # for each row
    copies: int  # bfloat16 copies of the weights
    layer: float  # of `row`, for each layer
    inputs: int  # inputs of all layers, for each row: what gradient checkpointing keeps


def kept_bytes(
    config: Any, length: int, *, dtype: str = "auto", attn_implementation: str | None = None, bf16: bool = False
) -> Kept:
    """Return what a causal LM keeps for rows of `length` tokens."""
    length = -(-length // LENGTH_STEP) * LENGTH_STEP
    kind: Any = type(config)
    fields = build.one_label(config).to_json_string()  # the same for a reward model: it has the same backbone
    return _kept_bytes(kind, fields, length, dtype, attn_implementation, bf16)


@cache
def _kept_bytes(kind: Any, fields: str, length: int, dtype: str, attention: str | None, bf16: bool) -> Kept:
    config = config_from_json(kind, fields)
    text = config.get_text_config()
    layers = text.num_hidden_layers

    def keep(number: int) -> tuple[int, int, int]:
        """Return the bytes for one row, for two rows and of a layer's input, in a model of `number` layers."""
        with FakeTensorMode():
            shallow = with_layers(config, number)
            cpu = torch.device("cpu")
            model = build.causal_lm_from_config(shallow, dtype=dtype, attn_implementation=attention, device=cpu)
            model.eval()
            one = _count_kept(model, 1, length, bf16=bf16)
            two = _count_kept(model, 2, length, bf16=bf16)
        return one, two, length * text.hidden_size * model.dtype.itemsize

    if layers > COUNTED_LAYERS[-1] and has_equal_layers(kind, fields):
        few = keep(COUNTED_LAYERS[0])
        more = keep(COUNTED_LAYERS[1])
        rest = layers - COUNTED_LAYERS[0]
        one = few[0] + rest * (more[0] - few[0])
        two = few[1] + rest * (more[1] - few[1])
        size = few[2]
    else:
        one, two, size = keep(layers)
    row = two - one
    return Kept(row, one - row, row / layers, layers * size)


@cache
def has_equal_layers(kind: Any, fields: str) -> bool:
    """Return True if all decoder layers of a config's model have weights of the same shapes."""
    model = build.causal_lm_from_config(config_from_json(kind, fields))
    shapes = {str([weight.shape for weight in layer.parameters()]) for layer in sharding.decoder_layers(model)}
    return len(shapes) == 1


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


# A model of a stage


@dataclass(frozen=True)
class ModelSize:
    """A model of a stage: how it is kept and trained. `adapters` are added to it."""

    shape: Architecture
    dtype: str
    attn_implementation: str | None
    scorer: bool
    bf16: bool = False
    checkpointing: bool = False
    compiled: bool = False
    adapters: LoRA | None = None
    four_bits: bool = False
    frozen: bool = False
    shared_layers: int = 0  # that are frozen in a policy, and its embeddings with them

    @classmethod
    def of(cls, config: Any, dtype: str, attn_implementation: str | None, *, scorer: bool, **how: Any) -> "ModelSize":
        """Return the size of a model with a transformers config."""
        kind: Any = type(config)
        shape = _architecture(kind, config.to_json_string(), dtype, attn_implementation, scorer)
        return cls(shape, dtype, attn_implementation, scorer, **how)

    @property
    def parameters(self) -> int:
        return self.shape.parameters

    @property
    def adapter_numbers(self) -> int:
        return self.shape.adapter_numbers(self.adapters) if self.adapters else 0

    @property
    def shared(self) -> int:
        """Numbers of the layers that are frozen, and of the embeddings."""
        if not self.shared_layers or self.adapters:
            return 0
        return self.shape.embeddings + self.shared_layers * self.shape.decoder // self.shape.layers

    @property
    def trained(self) -> int:
        """Numbers that are trained; of a model with adapters these and its head."""
        if self.adapters:
            return self.adapter_numbers + (self.shape.hidden if self.scorer else 0)
        return 0 if self.frozen else self.parameters - self.shared

    @property
    def gradients(self) -> int:
        """Bytes of the gradients, and of the trained weights."""
        return self.trained * (FLOAT32 if self.adapters else self.shape.itemsize)

    @cached_property
    def weights(self) -> int:
        """Bytes in memory."""
        shape = self.shape
        is_fixed = self.frozen or self.adapters is not None
        itemsize = float(shape.itemsize)  # of a number of a matrix
        if self.four_bits:
            itemsize = FOUR_BITS
        elif self.bf16 and is_fixed:
            itemsize = min(shape.itemsize, BFLOAT16)
        others = (shape.parameters - shape.matrix_numbers) * shape.itemsize
        return round(others + shape.matrix_numbers * itemsize) + FLOAT32 * self.adapter_numbers

    @property
    def full_weights(self) -> int:
        """Bytes without adapters, in no 4 bits, frozen: as a finished model is read."""
        saved = max(0, self.shape.itemsize - BFLOAT16) * self.shape.matrix_numbers if self.bf16 else 0
        return self.shape.itemsize * self.shape.parameters - saved

    def optimizer(self, *, eight_bits: bool) -> int:
        """Return the bytes of AdamW's moments."""
        if not eight_bits:
            return MOMENTS * self.gradients
        embeddings = 0 if self.adapters or self.frozen or self.shared_layers else self.shape.embeddings
        in_32_bits = 2 * FLOAT32 * embeddings
        return in_32_bits + round(EIGHT_BIT_MOMENTS * FLOAT32 * (self.trained - embeddings))

    def kept(self, length: int) -> Kept:
        """Return what a forward pass of rows keeps for the backward pass."""
        shape = self.shape
        kept = kept_bytes(
            shape.config,
            length,
            dtype=self.dtype,
            attn_implementation=self.attn_implementation,
            bf16=self.bf16,
        )
        if self.four_bits or self.adapters or self.frozen:  # stored in bfloat16, or dequantized again
            kept = kept._replace(copies=0)
        if self.adapters:
            kept = kept._replace(row=round(WITH_ADAPTERS * kept.row), layer=WITH_ADAPTERS * kept.layer)
        if self.compiled and self.bf16:
            saved = COMPILED_SAVES * BFLOAT16 * length * shape.hidden
            kept = kept._replace(row=kept.row - saved * shape.layers, layer=kept.layer - saved)
        return kept

    def reading(self, rows: int, length: int) -> float:
        """Return the bytes of a pass that keeps nothing."""
        return READING * rows * self.kept(length).layer

    def training(self, rows: int, length: int) -> tuple[float, float]:
        """Return the bytes that a forward pass keeps, and those at the peak of the two passes, without logits."""
        kept = self.kept(length)
        layer = rows * kept.layer
        if self.checkpointing:  # a layer is computed again, and kept, in its backward pass
            inputs = rows * kept.inputs
            return inputs, inputs + max((1 + BACKWARD) * layer, kept.copies + READING * layer)
        unfrozen = 1 - self.shared_layers / self.shape.layers  # a frozen layer keeps nothing
        stored = unfrozen * rows * kept.row + kept.copies
        return stored, stored + BACKWARD * layer

    @property
    def cache(self) -> int:
        """Bytes of keys and values of a token, in all layers."""
        itemsize = BFLOAT16 if self.bf16 else self.shape.itemsize
        return 2 * self.shape.layers * self.shape.key_values * itemsize

    # Operations: 2 for each weight and token in a forward pass (Kaplan et al. 2020, section 2.1), and attention's

    def forward_flops(self, rows: float, length: int, answers: float = 0) -> float:
        """Return the operations of a forward pass, with the logits of `answers` tokens."""
        shape = self.shape
        attention = 4 * shape.layers * shape.heads_width * length**2
        matrices = 2 * (shape.matrix_numbers + self.adapter_numbers) * length
        return rows * (matrices + attention) + 2 * shape.vocabulary * shape.hidden * answers

    def training_flops(self, rows: float, length: int, answers: float = 0) -> float:
        """Return the operations of a forward and backward pass; checkpointed layers run their forward pass again."""
        shape = self.shape
        frozen = self.shared_layers * shape.matrix_numbers / shape.layers
        learnt = self.adapter_numbers if self.adapters else shape.matrix_numbers - frozen

        matrices = 2 * (shape.matrix_numbers + self.adapter_numbers + learnt) * length
        attention = 10 * shape.layers * shape.heads_width * length**2
        head = (2 if self.adapters else 4) * shape.vocabulary * shape.hidden
        backward = rows * (matrices + attention) + head * answers

        forward = self.forward_flops(rows, length, answers)
        if self.checkpointing:
            forward += RECOMPUTED * self.forward_flops(rows, length)
        return forward + backward

    def generation_flops(self, rows: float, lengths: Lengths) -> float:
        """Return the operations of writing a response to each prompt with a cache."""
        shape = self.shape
        width = lengths.prompt + lengths.response / 2
        attention = 4 * shape.layers * shape.heads_width * width
        token = 2 * (shape.matrix_numbers + shape.vocabulary * shape.hidden) + attention
        return self.forward_flops(rows, lengths.prompt, rows) + rows * (lengths.response - 1) * token
