"""What single fast paths save, each beside the plain one: CPU milliseconds, forward and backward, one thread.

    python benchmarks/fast_paths.py

Random weights and tokens in the sizes of the reference workload: width 256, 4 heads, 8192 words; the least of several
calls, in turn.
"""

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.append(str(Path(__file__).resolve().parent.parent))

from rlhf_cli import terminal
from rlhf_cli.models import forward, packing
from rlhf_cli.ppo import losses

RAGGED = [60, 52, 40, 36, 33, 30, 28, 25, 22, 20, 18, 15, 12, 10, 8, 8]  # lengths of a micro-batch's rows
DENSE = [80, 78, 78, 75, 72, 70, 70, 69]
REPEATS = 30


def least(*calls: Callable[[], None]) -> list[float]:
    """Milliseconds of each call, in turn, so that all meet the same neighbours."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(REPEATS):
        for call, spent in zip(calls, seconds, strict=True):
            began = time.process_time()
            call()
            spent.append(time.process_time() - began)
    return [1e3 * min(spent) for spent in seconds]


def attention(lengths: list[int]) -> list[float]:
    """Of a layer: all rows in one batch, and each length by itself."""
    tokens, cpu = sum(lengths), torch.device("cpu")
    x, back = torch.randn(1, 4, tokens, 64, requires_grad=True), torch.randn(1, tokens, 4, 64)

    def run(rows: packing.PackedRows) -> None:
        parts = zip(rows.batches, rows.split(x), strict=True)
        found = [
            batch.unpad(F.scaled_dot_product_attention(part, part, part, is_causal=True).transpose(1, 2))
            for batch, part in parts
        ]
        torch.cat(found, dim=1).backward(back)

    one = packing.PackedRows([packing.PaddedBatch.from_lengths(lengths, cpu)])
    return least(lambda: run(one), lambda: run(packing.PackedRows.from_lengths(lengths, cpu)))


def model() -> LlamaForCausalLM:
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 1, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=8192, tie_word_embeddings=True))


def head(policy: LlamaForCausalLM, *, at_once: int, in_place: bool) -> Callable[[], None]:
    """Log-probs and entropy of 352 tokens, `at_once` at a time, and their gradients."""
    hidden, ids = torch.randn(352, 256), torch.randint(8192, (352,))

    def run() -> None:
        with forward.in_place_embedding_gradients(policy) if in_place else nullcontext():
            for first in range(0, len(ids), at_once):
                part = hidden[first : first + at_once].requires_grad_()
                log_probs = losses.log_probs(policy.lm_head(part), 1.0)
                with torch.no_grad():
                    losses.entropy(log_probs)
                losses.gather_logprobs(log_probs, ids[first : first + at_once]).sum().backward()

    return run


def embedding(policy: LlamaForCausalLM, *, in_place: bool) -> Callable[[], None]:
    """600 tokens read, and their gradients."""
    ids, back = torch.randint(8192, (1, 600)), torch.randn(1, 600, 256)

    def run() -> None:
        with forward.in_place_embedding_gradients(policy) if in_place else nullcontext():
            policy.get_input_embeddings()(ids).backward(back)

    return run


def adamw(policy: LlamaForCausalLM, *, fused: bool) -> Callable[[], None]:
    """A step of a model of 3 million weights."""
    return torch.optim.AdamW(policy.parameters(), lr=1e-5, fused=fused).step


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    policy, rows = model(), []
    names = "attention of a layer: one batch, by length"
    rows += [(f"{names} ({kind})", *attention(of)) for kind, of in (("ragged", RAGGED), ("dense", DENSE))]
    heads = [head(policy, at_once=size, in_place=place) for size, place in ((352, False), (128, False), (128, True))]
    whole, parts, in_place = least(*heads)
    rows += [("head, 352 tokens: all at once, 128 at a time", whole, parts)]
    rows += [("the same 128 at a time: autograd's gradient, added in place", parts, in_place)]
    rows += [("embedding, 600 tokens: autograd's gradient, added in place",
              *least(embedding(policy, in_place=False), embedding(policy, in_place=True)))]  # fmt: skip
    rows += [("AdamW: plain, fused", *least(adamw(policy, fused=False), adamw(policy, fused=True)))]
    shown = [(what, f"{plain:.2f}", f"{fast:.2f}", f"{plain / fast:.2f}") for what, plain, fast in rows]
    terminal.table(["what", "plain, ms", "fast, ms", "times"], shown, title="Fast paths")


if __name__ == "__main__":
    main()
