"""Speed of a model on this machine, by short measurements: for `rlhf plan` and `rlhf init preferences`."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rlhf_cli.models import devices
from rlhf_cli.models.batch import Prompts
from rlhf_cli.ppo.rollout import HFEngine

MAX_CALLS, MAX_CALLS_S = 3, 5.0  # per function and round: number of calls, seconds after which none is added
MAX_ROUNDS, MAX_ROUNDS_S = 5, 10.0  # on a busy machine: number of rounds, seconds after which none is added
MAX_PRODUCT_ROWS = 4096


@dataclass(frozen=True)
class PassTimes:
    """Seconds of passes of a model, and the share of the processor that the measurement had."""

    train: float  # forward and backward
    forward: float
    step: float  # of AdamW
    generate: float
    share: float


def measure_passes(model: Any, rows: int, prompt: int, response: int, new_tokens: int, generated: int) -> PassTimes:
    """Measure passes on `rows` rows of prompt and response, with the logits of the responses if it has a head.

    Generation is of `generated` rows of `new_tokens` tokens each.
    """
    head, vocabulary = model.get_output_embeddings(), model.config.get_text_config().vocab_size
    ids = torch.arange(rows * (prompt + response), device=model.device).remainder(vocabulary).reshape(rows, -1)

    def forward() -> torch.Tensor:
        states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return states if head is None else head(states[:, -response:]).float().log_softmax(-1)[..., 0]

    def train() -> None:
        forward().sum().backward()

    engine = HFEngine(model, None, 0)
    prompts = Prompts.from_lists(ids[:1, :prompt].tolist() * generated)
    seeded = Prompts(prompts.ids, prompts.mask, tuple(range(generated)), new_tokens)
    step = torch.optim.AdamW(weight for weight in model.parameters() if weight.requires_grad).step
    calls = (train, torch.no_grad()(forward), step, lambda: engine.generate(seeded) if new_tokens else None)
    return PassTimes(*fastest(*calls))


def fastest(*calls: Callable[[], Any]) -> tuple[float, ...]:
    """Return the minimum seconds of each call, and the maximum CPU share of any round.

    While other processes use part of the processor, the measurement is repeated a few times.
    """
    for call in calls:
        call()  # warm-up
    start = time.perf_counter()
    rounds: list[tuple[float, ...]] = []
    while len(rounds) < MAX_ROUNDS and (not rounds or time.perf_counter() - start < MAX_ROUNDS_S):
        seconds, share = devices.measure_cpu_share(lambda: [_min_seconds(call) for call in calls])
        rounds.append((*seconds, share))
        if share >= devices.MIN_CPU_SHARE:
            break
    *seconds_of_calls, shares = zip(*rounds, strict=True)
    return *map(min, seconds_of_calls), max(shares)


def _min_seconds(call: Callable[[], Any]) -> float:
    seconds: list[float] = []
    while len(seconds) < MAX_CALLS and sum(seconds) < MAX_CALLS_S:
        start = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def measure_flops(rows: int, hidden: int) -> tuple[float, float]:
    """Return FLOP/s of the product (rows, hidden) x (hidden, 4 hidden) in float32, and the CPU share it had."""
    left = torch.zeros(min(rows, MAX_PRODUCT_ROWS), hidden, device=devices.device())
    right = torch.zeros(hidden, 4 * hidden, device=devices.device())
    seconds, share = fastest(lambda: left @ right)
    return 2 * left.numel() * right.shape[1] / seconds, share
