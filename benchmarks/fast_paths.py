"""CPU milliseconds of each fast path and of its plain version, forward and backward, on one thread.

    python benchmarks/fast_paths.py

Random weights and tokens in the sizes of the reference workload: width 256, 4 heads, vocabulary 8192. Each time is the
minimum of several calls, and the versions run in turn.
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


def milliseconds(*calls: Callable[[], None]) -> list[float]:
    """Return the minimum time of each call. They run in turn, so that other processes affect all of them."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(REPEATS):
        for call, times in zip(calls, seconds, strict=True):
            start = time.process_time()
            call()
            times.append(time.process_time() - start)
    return [1e3 * min(times) for times in seconds]


def attention(lengths: list[int]) -> list[float]:
    """Return the times of the attention of a layer: all rows padded in one batch, and in batches by length."""
    tokens, cpu = sum(lengths), torch.device("cpu")
    x, gradient = torch.randn(1, 4, tokens, 64, requires_grad=True), torch.randn(1, tokens, 4, 64)

    def run(rows: packing.PackedRows) -> None:
        parts = zip(rows.batches, rows.split(x), strict=True)
        outputs = [
            batch.unpad(F.scaled_dot_product_attention(part, part, part, is_causal=True).transpose(1, 2))
            for batch, part in parts
        ]
        torch.cat(outputs, dim=1).backward(gradient)

    padded = packing.PackedRows([packing.PaddedBatch.from_lengths(lengths, cpu)])
    return milliseconds(lambda: run(padded), lambda: run(packing.PackedRows.from_lengths(lengths, cpu)))


def model() -> LlamaForCausalLM:
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 1, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=8192, tie_word_embeddings=True))


def head(policy: LlamaForCausalLM, *, chunk: int, in_place: bool) -> Callable[[], None]:
    """Return a function that computes log-probs, entropy and gradients of 352 tokens, `chunk` tokens at a time."""
    hidden, ids = torch.randn(352, 256), torch.randint(8192, (352,))

    def run() -> None:
        with forward.in_place_embedding_gradients(policy) if in_place else nullcontext():
            for first in range(0, len(ids), chunk):
                part = hidden[first : first + chunk].requires_grad_()
                log_probs = losses.log_probs(policy.lm_head(part), 1.0)
                with torch.no_grad():
                    losses.entropy(log_probs)
                losses.gather_logprobs(log_probs, ids[first : first + chunk]).sum().backward()

    return run


def embedding(policy: LlamaForCausalLM, *, in_place: bool) -> Callable[[], None]:
    """Return a function that embeds 600 tokens and computes their gradients."""
    ids, gradient = torch.randint(8192, (1, 600)), torch.randn(1, 600, 256)

    def run() -> None:
        with forward.in_place_embedding_gradients(policy) if in_place else nullcontext():
            policy.get_input_embeddings()(ids).backward(gradient)

    return run


def adamw(policy: LlamaForCausalLM, *, fused: bool) -> Callable[[], None]:
    """Return an optimizer step of a model of 3 million weights."""
    return torch.optim.AdamW(policy.parameters(), lr=1e-5, fused=fused).step


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    policy, rows = model(), []
    for kind, lengths in (("ragged", RAGGED), ("dense", DENSE)):
        rows += [(f"attention of a layer: one batch, by length ({kind})", *attention(lengths))]
    heads = [head(policy, chunk=size, in_place=place) for size, place in ((352, False), (128, False), (128, True))]
    full, chunks, in_place = milliseconds(*heads)
    rows += [("head, 352 tokens: in one chunk, in chunks of 128", full, chunks)]
    rows += [("head, chunks of 128: autograd's gradient, added in place", chunks, in_place)]
    embeddings = milliseconds(embedding(policy, in_place=False), embedding(policy, in_place=True))
    rows += [("embedding, 600 tokens: autograd's gradient, added in place", *embeddings)]
    rows += [("AdamW: plain, fused", *milliseconds(adamw(policy, fused=False), adamw(policy, fused=True)))]
    cells = [(what, f"{plain:.2f}", f"{fast:.2f}", f"{plain / fast:.2f}") for what, plain, fast in rows]
    terminal.table(["what", "plain, ms", "fast, ms", "ratio"], cells, title="Fast paths")


if __name__ == "__main__":
    main()
