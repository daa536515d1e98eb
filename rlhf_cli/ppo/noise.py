"""Random numbers as a function of (row's seed, step, token): whatever rows share a batch, on whatever device.

A counter-based generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): no state, so all rows
are drawn at once, and where a batch is cut, ends early or goes on elsewhere changes no draw.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

CELLS = 2**17  # numbers made at a time on a CPU: they stay in its cache


def mixed(x: Tensor) -> Tensor:
    """A bijection of the int32 that scatters neighbours: lowbias32 of Wellons 2018, "Prospecting for hash functions".

    In place. int32 wraps around as the unsigned integers of the original do.
    """
    shifted = torch.empty_like(x)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32), (16, None)):
        torch.bitwise_right_shift(x, shift, out=shifted)
        shifted &= (1 << 32 - shift) - 1  # a signed shift copies the sign bit
        x ^= shifted
        if factor:
            x *= factor
    return x


def keys(seeds: Sequence[int], device: torch.device) -> Tensor:
    """The rows' 64-bit seeds as two int32 each, (b, 2)."""
    words = [[(seed >> shift) & 0xFFFFFFFF for shift in (0, 32)] for seed in seeds]
    return torch.tensor([[word - (word >> 31 << 32) for word in row] for row in words], dtype=torch.int32).to(device)


def counters(vocabulary: int, device: torch.device) -> Tensor:
    """One number for each token, (V,) int32, the same for all rows and steps."""
    return mixed(torch.arange(vocabulary, dtype=torch.int32, device=device))


def log_exponential(keys: Tensor, step: int, counters: Tensor) -> Tensor:
    """log E of independent E ~ Exp(1), (b, V) float32, of 31 random bits each.

    The smallest E are the finest: E of the one nearest to 0, which wins a race (see `drawn`), has all 31 bits.
    """
    first = mixed(keys[:, :1] ^ mixed(torch.full_like(keys[:, :1], step)))
    second = mixed(keys[:, 1:] + first)
    bits = mixed((counters[None] ^ first).add_(second)).bitwise_and_(0x7FFFFFFF)
    return bits.to(torch.float32).add_(0.5).mul_(-(2.0**-31)).log1p_().neg_().log_()


def drawn(logits: Tensor, keys: Tensor, step: int, counters: Tensor) -> Tensor:
    """A token (b,) int64 of the softmax of each row of logits (b, V), by the Gumbel trick: argmax_v (z_v - log E_v).

    Maddison, Tarlow and Minka 2014 (arXiv 1411.0030).
    """
    rows = max(1, CELLS // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    parts = zip(logits.split(rows), keys.split(rows), strict=True)
    return torch.cat([(z - log_exponential(key, step, counters)).argmax(-1) for z, key in parts])
