"""The lower bound of the arithmetic of an update, and the rate of arithmetic of this machine."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

TRIALS = 7


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama-like model: gated MLP, grouped keys and values."""

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
        """Multiply-adds per position in the matrices of all layers: q, o, k, v and three of the MLP."""
        attention = 2 * self.hidden * self.heads * self.head_size + 2 * self.hidden * self.kv_heads * self.head_size
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def pair(self) -> int:
        """Multiply-adds per pair of a query and a visible key: the score and the weighted value."""
        return self.layers * 2 * self.heads * self.head_size


def multiply_adds(shape: Shape, lengths: Iterable[tuple[int, int]], epochs: int) -> int:
    """Return the multiply-adds of an update of policy and value model on rows of (prompt, response) lengths.

    A row of P + R tokens has n = P + R - 1 positions, because the last token is not an input, and n (n + 1) / 2 causal
    pairs. Each model needs n * linear + pairs * pair. The policy's head needs hidden * vocabulary for each of the R
    response tokens, the value head hidden. The backward pass costs twice the forward pass (inputs and weights), and
    both run once per epoch.

    Norms, activations, softmax, losses, clipping and the optimizer are not included. Neither is the possible saving of
    the last layer on prompt positions, of which only keys and values are needed.
    """
    total = 0
    for prompt, response in lengths:
        positions = prompt + response - 1
        body = positions * shape.linear + positions * (positions + 1) // 2 * shape.pair
        total += 2 * body + response * shape.hidden * (shape.vocabulary + 1)
    return 3 * epochs * total


def forward_flops(shape: Shape, lengths: Iterable[int], head_tokens: int = 0) -> float:
    """Return the FLOPs of a causal forward pass over rows of these lengths, with the head on `head_tokens` tokens."""
    body = sum(n * shape.linear + n * (n + 1) // 2 * shape.pair for n in lengths)
    return 2.0 * (body + shape.hidden * shape.vocabulary * head_tokens)


def attention_share(shape: Shape, prompt: int, response: int) -> float:
    """Return the share of attention pairs, the quadratic part, in the arithmetic of rows of one length."""
    positions = prompt + response - 1
    pairs = 2 * positions * (positions + 1) // 2 * shape.pair
    return 3 * pairs / multiply_adds(shape, [(prompt, response)], epochs=1)


def rates(shape: Shape) -> dict[str, float]:
    """Return GFLOP per CPU second for float32 matrices of the model's sizes and for a large square.

    The highest of them is the rate of the machine. Each is a median and not the best trial, because the update that is
    compared with it runs at average speed, too.
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
        start = time.process_time()
        left @ right
        seconds.append(time.process_time() - start)
    return 2 * rows * inner * columns / median(seconds) / 1e9
