"""Time of a stage by its estimate: measured passes of small models on this CPU, matrix products for all others.

Passes of small models on a CPU are measured with random weights on rows of average length: such a model's time goes
into Python, norms, softmax and copies. For all others, and for machines that are not here, the time is that of the
matrix products only, a lower bound: FLOPs / rate. The rate is measured on products of the model's width, one with all
tokens of a micro-batch as rows for reading and learning, and one with a row per response for generation.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.models import build, devices, memory
from rlhf_cli.models.batch import Prompts
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.stages.plan_estimate import Estimate
from rlhf_cli.stages.plan_phases import Phase

MAX_MEASURED_S = 30.0  # products that take longer take most of the time
MAX_CALLS, MAX_CALLS_S = 3, 5.0  # per function and round: number of calls, seconds after which none is added
MAX_ROUNDS, MAX_ROUNDS_S = 5, 10.0  # on a busy machine: number of rounds, seconds after which none is added
MAX_PRODUCT_ROWS = 4096


@dataclass(frozen=True)
class Duration:
    """Seconds of each phase. `run`: whether passes were measured; else they are a lower bound.

    `share`: the share of the processor that the measurement had; 1 without a measurement.
    """

    phases: dict[str, float]
    run: bool
    share: float


def estimate_duration(stage: Estimate, flops: float | None) -> Duration:
    """Estimate the time by `flops` operations per second, or by measurements on this machine."""
    computing = [phase for phase in stage.phases if phase.flops]
    if flops:
        return Duration({phase.name: phase.flops / flops for phase in computing}, False, 1)
    largest = max(stage.parameters.values())
    devices.set_num_threads(largest)
    policy, seconds, shares = stage.policy, dict[str, float](), list[float]()
    for phase in computing:
        width = 1 if phase.name == "rollout" else stage.data.lengths.row
        rate, share = measure_flops(phase.rows * width, policy.hidden)
        seconds[phase.name] = phase.flops / rate
        shares.append(share)
    small = largest < devices.SMALL_MODEL_PARAMETERS and not policy.four_bits
    if small and not stage.target.gpu and sum(seconds.values()) < MAX_MEASURED_S:
        return _measure(stage, computing)
    return Duration(seconds, False, min(shares))


def _measure(stage: Estimate, computing: list[Phase]) -> Duration:
    """Measure a pass of the stage's first model; each phase takes as many of them as its FLOPs say."""
    policy, lengths = stage.policy, stage.data.lengths
    is_scorer = policy.model.get_output_embeddings() is None
    make = build.reward_model_from_config if is_scorer else build.causal_lm_from_config
    with torch.random.fork_rng():
        model = make(policy.model.config, device=torch.device("cpu"))
    if policy.adapters:
        memory.add_adapters(model, policy.adapters)
    rollout = next((phase for phase in computing if phase.name == "rollout"), None)
    rows = computing[-1].rows * (2 if is_scorer else 1)
    mean = lengths.average
    new_tokens, generated = (lengths.response, rollout.rows) if rollout else (0, 1)
    times = measure_passes(model, rows, mean.prompt, mean.response, new_tokens, generated)
    answers = 0 if is_scorer else rows * lengths.response
    passes = {
        "rollout": (times.generate, policy.generation_flops(generated, lengths)),
        "judge": (times.forward, policy.forward_flops(rows, lengths.row - 1, answers)),
    }
    training = times.train, policy.training_flops(rows, lengths.row, answers)
    seconds = {}
    for phase in computing:
        pass_seconds, pass_flops = passes.get(phase.name, training)
        seconds[phase.name] = phase.flops / pass_flops * pass_seconds
    config, steps = stage.config, int(stage.config.stage != "eval")  # of an update, for each trained model
    if isinstance(config, PPOConfig):
        steps = config.ppo.num_ppo_epochs * config.ppo.num_mini_batches * (1 + ("value" in stage.models))
    seconds[computing[-1].name] += times.step * steps
    return Duration(seconds, True, times.share)


# Speed of this machine, by short measurements


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
        states = build.backbone(model)(input_ids=ids, use_cache=False).last_hidden_state
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
