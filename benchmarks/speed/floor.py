"""The least arithmetic that an update phase can do, and how fast this machine does arithmetic."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

TRIALS = 7


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama-like model: gated MLP, grouped keys and values."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int

    @classmethod
    def of(cls, config: Any) -> "Shape":
        heads = config.num_attention_heads
        return cls(
            config.hidden_size,
            config.intermediate_size,
            config.num_hidden_layers,
            heads,
            config.num_key_value_heads,
            getattr(config, "head_dim", None) or config.hidden_size // heads,
            config.vocab_size,
        )

    @property
    def linear(self) -> int:
        """Multiply-adds of one position in the layers' matrices: q and o, k and v, and the MLP's three."""
        attention = 2 * self.hidden * self.heads * self.head_size + 2 * self.hidden * self.kv_heads * self.head_size
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def pair(self) -> int:
        """Multiply-adds of one pair (query, key that it may see): their product, and the value's share."""
        return self.layers * 2 * self.heads * self.head_size


def multiply_adds(shape: Shape, lengths: Iterable[tuple[int, int]], epochs: int) -> int:
    """Multiply-adds of an update phase on rows of (prompt, response) lengths, for a policy and a value model.

    A row of P + R tokens has n = P + R - 1 positions, for nothing is read behind the last token, and n (n + 1) / 2
    pairs, for attention is causal. Each model costs n * linear + pairs * pair; the policy's head hidden * vocabulary at
    each of the R positions before a response token, the value's hidden. The forward pass does that once, the backward
    pass twice (for the inputs and for the weights), and all of it comes once an epoch.

    Not in it: norms, activations, softmax, losses, clipping, the optimizer: what a perfect program would hide or
    hardly feel. It could even do less, and leave out what the last layer makes of prompt positions beyond keys and
    values; nobody does.
    """
    total = 0
    for prompt, response in lengths:
        positions = prompt + response - 1
        body = positions * shape.linear + positions * (positions + 1) // 2 * shape.pair
        total += 2 * body + response * shape.hidden * (shape.vocabulary + 1)
    return 3 * epochs * total


def attention_share(shape: Shape, prompt: int, response: int) -> float:
    """Share of the pairs in an update's arithmetic on rows of one length: what grows faster than tokens do."""
    positions = prompt + response - 1
    pairs = 2 * positions * (positions + 1) // 2 * shape.pair
    return 3 * pairs / multiply_adds(shape, [(prompt, response)], epochs=1)


def rates(shape: Shape) -> dict[str, float]:
    """GFLOP in a CPU second, for float32 matrices like the model's and a large square.

    Of these the highest is the machine's rate: a floor must not be above what the machine can do. Each is the median of
    some trials, not the best one: the update that it is compared with has no choice of moments either.
    """
    sizes = {
        "512 tokens, MLP": (512, shape.hidden, shape.intermediate),
        "2048 tokens, MLP": (2048, shape.hidden, shape.intermediate),
        "512 tokens, head": (512, shape.hidden, shape.vocabulary),
        "square, 1024": (1024, 1024, 1024),
    }
    return {name: _rate(*size) for name, size in sizes.items()}


def _rate(rows: int, inner: int, columns: int) -> float:
    left, right = torch.ones(rows, inner), torch.ones(inner, columns)
    seconds = []
    for _ in range(TRIALS):
        began = time.process_time()
        left @ right
        seconds.append(time.process_time() - began)
    return 2 * rows * inner * columns / median(seconds) / 1e9
