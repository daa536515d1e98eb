"""Responses: sampled from softmax(logits / temperature), with random numbers keyed by (row, step, token)."""

import torch
from torch import Tensor

from rlhf_cli.data.sampling import derive_seed
from tests.reference.outputs import response_logits
from tests.reference.state import State


@torch.no_grad()
def count_unexplained(state: State) -> int:
    """Sample each token again by the Gumbel trick: argmax_v (z_v / temperature + g_v), g_v = -log E_v, E_v ~ Exp(1).

    Maddison, Tarlow and Minka 2014 (arXiv 1411.0030). z are the logits before the token; one pass over the row gives
    those of all its tokens. Counted are tokens below the maximum by more than `near_tie`, responses that continue after
    a stop token, and those that end early without a stop token.
    """
    unexplained = 0
    for row, response in enumerate(state.responses):
        seed = derive_seed(state.seed, "sample", state.update, row)
        logits = response_logits(state.policy, state.prompts[row], response)
        for step, z in enumerate(logits):
            gumbel = -exponential(seed, step, len(z)).log()
            perturbed = z / state.settings.temperature + gumbel
            unexplained += bool(perturbed.max() - perturbed[response[step]] > state.near_tie)

        unexplained += not state.stop_token_ids.isdisjoint(response[:-1])
        unexplained += not state.ended(row) and len(response) != state.length_limit
    return unexplained


def exponential(seed: int, step: int, count: int) -> Tensor:
    """Return E_v ~ Exp(1) of a token, (V,) float64: -log(1 - u_v), u_v from 31 bits of a hash of (seed, step, v)."""
    low = torch.tensor([seed % 2**32])
    high = torch.tensor([seed // 2**32])
    first = lowbias32(low ^ lowbias32(torch.tensor([step])))
    second = lowbias32((high + first) % 2**32)

    tokens = lowbias32(torch.arange(count))
    bits = lowbias32(((tokens ^ first) + second) % 2**32)
    uniform = (bits.double() % 2**31 + 0.5) * 2.0**-31
    return -torch.log1p(-uniform)


def lowbias32(x: Tensor) -> Tensor:
    """Return Wellons' lowbias32 hash of unsigned 32-bit numbers, in int64."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) % 2**32
    x = ((x ^ (x >> 15)) * 0x846CA68B) % 2**32
    return x ^ (x >> 16)
