"""How fast this machine is with a model, by a short measurement that one bad second does not spoil."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlhf_cli.models import devices, load
from rlhf_cli.models.batch import Prompts
from rlhf_cli.ppo.rollout import HFEngine

ROWS, TOKENS, WRITTEN = 8, 64, 16
CALLS, ENOUGH = 3, 5.0  # of each kind a round: calls at most, and seconds after which no other one is made
ROUNDS, LONG = 5, 10.0  # beside other work: rounds at most, and seconds after which no other one begins


@dataclass(frozen=True)
class Speed:
    """Tokens a second; `share`: how much of the processor other work left to the measurement."""

    trained: float  # forward and backward
    written: float
    share: float = 1.0


def measure(folder: Path) -> Speed:
    """Tokens a second that the model of a folder learns from and writes, the best of several short measurements.

    As long as other work takes part of the processor the measurement is made again, a few times.
    """
    model = load.load_causal_lm(folder).to(devices.device())
    config = model.config.get_text_config()
    width = min(TOKENS, load.context_length(config) or TOKENS)
    ids = torch.arange(ROWS * width, device=model.device).remainder(config.vocab_size).reshape(ROWS, width)

    def train() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()

    engine = HFEngine(model, None, 0)
    written = min(WRITTEN, width // 2)
    prompts = Prompts.from_lists(ids.cpu()[:, :written].tolist())
    asked = Prompts(prompts.ids, prompts.mask, tuple(range(ROWS)), written)
    trained, wrote, share = best(train, lambda: engine.generate(asked))
    return Speed(ROWS * width / trained, ROWS * written / wrote, share)


def best(*calls: Callable[[], Any]) -> tuple[float, ...]:
    """The fewest seconds that each of the calls took, and the largest share of the processor in any round of them."""
    for call in calls:
        call()  # what is made once is made
    began = time.perf_counter()
    rounds: list[tuple[float, ...]] = []
    while len(rounds) < ROUNDS and (not rounds or time.perf_counter() - began < LONG):
        seconds, share = devices.measure_cpu_share(lambda: [_fewest(call) for call in calls])
        rounds.append((*seconds, share))
        if share >= devices.MIN_CPU_SHARE:
            break
    *taken, shares = zip(*rounds, strict=True)
    return *map(min, taken), max(shares)


def _fewest(call: Callable[[], Any]) -> float:
    taken: list[float] = []
    while len(taken) < CALLS and sum(taken) < ENOUGH:
        taken.append(_seconds(call))
    return min(taken)


def _seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began
