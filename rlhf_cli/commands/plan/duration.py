"""How long an update takes.

Of small models on a CPU the phases are run, with random weights, on rows as long as the data's are on average, in as
many threads as the stage will have: such a model's time goes into Python and into norms, softmax and copies, which no
count of products knows. Of all others, and of machines that are not here, it is matrix products alone, so a floor:

    multiply-adds = those of the phases' own forward and backward passes, counted by shape; two operations each
    seconds       = operations / rate

The rate is measured on products of the model's width: one for what reads and learns, with all tokens of a micro-batch
as rows, and one for what writes, whose every step has one row a response and is bound by the reading of weights.
"""

import time
from dataclasses import dataclass
from statistics import median

import torch

from rlhf_cli.commands.plan.estimate import Estimate
from rlhf_cli.commands.plan.measure import StepTimer
from rlhf_cli.models import devices

LONG, FEWEST = 0.1, 3  # seconds of a measurement, and products
ENOUGH, TOO_LONG = 1.0, 30.0  # seconds of running phases; of products, from which they take most of the time
MAX_ROWS = 4096


@dataclass(frozen=True)
class Duration:
    """Seconds of each phase that calculates. `run`: told by running it, else a floor.

    `share`: how much of the time this process had the processor while it measured, which is what other work leaves it;
    1 where nothing was measured.
    """

    phases: dict[str, float]
    run: bool
    share: float


def estimate_duration(found: Estimate, flops: float | None) -> Duration:
    """By `flops`, operations a second, or as this machine does it now."""
    most = max(found.parameters.values())
    devices.set_num_threads(most)
    floor, share = devices.measure_cpu_share(lambda: _floor(found, flops))
    small = most < devices.SMALL_MODEL_PARAMETERS and found.mode != "qlora"  # whose 4 bits nobody opens here
    if flops or found.target.gpu or not small or share * sum(floor.values()) > TOO_LONG:
        return Duration(floor, False, 1 if flops else share)
    seconds, share = devices.measure_cpu_share(lambda: _by_running(found))
    return Duration(seconds, True, share)


def _by_running(found: Estimate) -> dict[str, float]:
    runs: list[dict[str, float]] = []
    began = time.perf_counter()
    while not runs or time.perf_counter() - began < ENOUGH:
        _, phases = found.run(count=StepTimer, lengths=found.lengths.average)
        runs.append({phase.name: phase.work for phase in phases if phase.work})
    return {name: median(run[name] for run in runs) for name in runs[0]}  # the first one makes what is made once


def _floor(found: Estimate, flops: float | None) -> dict[str, float]:
    return {
        phase.name: phase.work / (flops or measure_rate(phase.rows * _width(found, phase.name), found.hidden))
        for phase in found.phases
        if phase.work
    }


def _width(found: Estimate, phase: str) -> int:
    return 1 if phase == "rollout" else found.lengths.row


def measure_rate(rows: int, hidden: int) -> float:
    """Operations a second of (rows, hidden) x (hidden, 4 hidden) on this machine's device, in float32."""
    device = devices.device()
    left = torch.zeros(min(rows, MAX_ROWS), hidden, device=device)
    right = torch.zeros(hidden, 4 * hidden, device=device)
    taken: list[float] = []
    while sum(taken) < LONG or len(taken) < FEWEST:
        began = time.perf_counter()
        left @ right
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return 2 * left.numel() * right.shape[1] / median(taken)  # a busy machine stops some of them for long
