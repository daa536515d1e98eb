"""How long an update takes at least: its matrix products at the rate at which this machine multiplies.

    multiply-adds = those of the phases' own forward and backward passes, counted by shape; two operations each
    seconds       = operations / rate

The rate is measured on products of the model's width: one for what reads and learns, with all tokens of a micro-batch
as rows, and one for what writes, whose every step has one row a response and is bound by the reading of weights.
"""

import time
from statistics import median

import torch

from rlhf_cli.models import devices
from rlhf_cli.plan.estimate import Estimate

LONG, FEWEST = 0.1, 3  # seconds of a measurement, and products
MOST_ROWS = 4096


def seconds(estimate: Estimate, flops: float | None) -> dict[str, float]:
    """Of each phase that calculates; `flops`: operations a second, instead of measured ones."""
    return {
        phase.name: phase.flops / (flops or rate(phase.rows * _width(estimate, phase.name), estimate.hidden))
        for phase in estimate.phases
        if phase.flops
    }


def _width(estimate: Estimate, phase: str) -> int:
    return 1 if phase == "rollout" else estimate.lengths.row


def rate(rows: int, hidden: int) -> float:
    """Operations a second of (rows, hidden) x (hidden, 4 hidden) on this machine's device, in float32."""
    device = devices.device()
    left = torch.zeros(min(rows, MOST_ROWS), hidden, device=device)
    right = torch.zeros(hidden, 4 * hidden, device=device)
    taken: list[float] = []
    while sum(taken) < LONG or len(taken) < FEWEST:
        began = time.perf_counter()
        left @ right
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return 2 * left.numel() * right.shape[1] / median(taken)  # a busy machine stops some of them for long
