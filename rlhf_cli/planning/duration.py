"""Time of a stage by its estimate: measured passes on this CPU, matrix products on a GPU and on other machines.

On a CPU passes are measured with random weights on rows of average length: much of the time goes into Python, norms,
softmax and copies. Of a deep model whose layers are alike the passes of two shallow ones are measured, and the time of
the other layers follows. On a GPU, for machines that are not here, and for models too large to measure, the time is
that of the matrix products only, a lower bound: FLOPs / rate. The rate is measured on products of the model's width,
one with all tokens of a micro-batch as rows for reading and learning, and one with a row per response for generation.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch

from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.models import build, devices
from rlhf_cli.models.batch import Prompts
from rlhf_cli.planning import memory
from rlhf_cli.planning.estimate import Estimate
from rlhf_cli.planning.phase_memory import Phase, StageModel
from rlhf_cli.ppo.rollout import HFEngine

MAX_MEASURED_S = 30.0  # by products, of a small model's step; more is left to the products
TRAINING_BYTES = 16  # per parameter: weights, gradients and moments of AdamW in float32
SHALLOW_LAYERS = (1, 5)  # of a deep model
MAX_SHALLOW_TOKENS = 512  # of its measured rows
MAX_NEW_TOKENS = 9  # of a measured response
MAX_SHALLOW_SHARE = 0.25  # of the memory, for weights, gradients and moments of a shallow model
MAX_CALLS, MAX_CALLS_S = 3, 2.5  # per function and round: number of calls, seconds after which none is added
MAX_ROUNDS, MAX_ROUNDS_S = 5, 10.0  # on a busy machine: number of rounds, seconds after which none is added
MAX_PRODUCT_ROWS = 4096


class Duration(NamedTuple):
    """Seconds of each phase."""

    phases: dict[str, float]
    run: bool  # whether passes were measured; else they are a lower bound
    share: float  # of the processor, which the measurement had; 1 without a measurement


def estimate_duration(stage: Estimate, flops: float | None) -> Duration:
    """Estimate the time by `flops` operations per second, or by measurements on this machine."""
    computing = [phase for phase in stage.phases if phase.flops]
    if flops:
        return Duration({phase.name: phase.flops / flops for phase in computing}, False, 1)
    largest = max(stage.parameters.values())
    devices.set_num_threads(largest)
    policy, seconds, shares = stage.policy, dict[str, float](), list[float]()
    for phase in computing:
        width = 1 if phase.name in ("rollout", "normalize") else stage.data.lengths.row
        rate, share = measure_flops(phase.rows * width, policy.hidden)
        seconds[phase.name] = phase.flops / rate
        shares.append(share)
    small = largest < devices.SMALL_MODEL_PARAMETERS and sum(seconds.values()) < MAX_MEASURED_S
    if not stage.target.gpu and not policy.four_bits:
        layers = (policy.layers,) if small else _shallow_layers(policy, stage.target.memory)
        if layers:
            return _measure(stage, computing, layers, seconds)
    return Duration(seconds, False, min(shares))


def _shallow_layers(policy: StageModel, available: int) -> tuple[int, ...]:
    """Return the numbers of layers to measure of a model whose layers are alike; none if they take too much memory."""
    config, kind = policy.model.config, cast("Any", type(policy.model.config))
    if policy.layers <= SHALLOW_LAYERS[-1] or not memory.has_equal_layers(kind, config.to_json_string()):
        return ()
    rest = 1 - SHALLOW_LAYERS[-1] / policy.layers
    parameters = policy.parameters - rest * memory.layer_bytes(policy.model) / policy.model.dtype.itemsize
    return SHALLOW_LAYERS if TRAINING_BYTES * parameters < MAX_SHALLOW_SHARE * available else ()


def _measure(
    stage: Estimate, computing: list[Phase], layers: tuple[int, ...], products: Mapping[str, float]
) -> Duration:
    """Measure a pass of the stage's first model with `layers`; each phase takes as many of them as its FLOPs say.

    `products`: seconds of the phases by matrix products, for normalize, which samples from another model.
    """
    policy, mean = stage.policy, stage.data.lengths.average
    is_scorer = policy.model.get_output_embeddings() is None
    rollout = next((phase for phase in computing if phase.name == "rollout"), None)
    last = next(phase for phase in reversed(computing) if not phase.once)
    rows = last.rows * (2 if is_scorer else 1)
    new_tokens, generated = (mean.response, rollout.rows) if rollout else (0, 1)
    if len(layers) > 1:
        rows = max(1, min(rows, MAX_SHALLOW_TOKENS // mean.row))
    sizes = rows, mean.prompt, mean.response, new_tokens, generated
    measured = [measure_passes(_make_model(policy, n, is_scorer), *sizes, bf16=policy.bf16) for n in layers]
    times = measured[0]
    if len(layers) > 1:
        steps = (policy.layers - layers[0]) / (layers[1] - layers[0])
        extrapolated = (few + steps * max(0.0, more - few) for few, more in zip(*measured, strict=True))
        times = PassTimes(*extrapolated)._replace(share=min(each.share for each in measured))
    answers = 0 if is_scorer else rows * mean.response
    passes = {
        "rollout": (times.generate, policy.generation_flops(generated, mean)),
        "judge": (forward := (times.forward, policy.forward_flops(rows, mean.row, answers))),
        "evaluate": forward,
    }
    training = times.train, policy.training_flops(rows, mean.row, answers)
    seconds = dict(products)
    for phase in [each for each in computing if each.name != "normalize"]:
        pass_seconds, pass_flops = passes.get(phase.name, training)
        seconds[phase.name] = phase.flops / pass_flops * pass_seconds
    config, steps = stage.config, int(stage.config.stage != "eval")  # of an update, for each trained model
    if isinstance(config, PPOConfig):
        steps = config.ppo.num_ppo_epochs * config.ppo.num_mini_batches * (1 + ("value" in stage.models))
    seconds[last.name] += times.step * steps
    return Duration(seconds, True, times.share)


def _make_model(policy: StageModel, layers: int, is_scorer: bool) -> Any:
    """Return a stage's model with random weights and its first layers, frozen where it has adapters."""
    make = build.reward_model_from_config if is_scorer else build.causal_lm_from_config
    with torch.random.fork_rng():
        model = make(memory.with_layers(policy.model.config, layers), device=torch.device("cpu"))
    if policy.adapters:
        memory.add_adapters(model, policy.adapters)
    return model


# Speed of this machine, by short measurements


class PassTimes(NamedTuple):
    """Seconds of passes of a model, and the share of the processor that the measurement had."""

    train: float  # forward and backward
    forward: float
    step: float  # of AdamW
    generate: float
    share: float


def measure_passes(
    model: Any, rows: int, prompt: int, response: int, new_tokens: int, generated: int, *, bf16: bool = False
) -> PassTimes:
    """Measure passes on `rows` rows of prompt and response, with the logits of the responses if it has a head.

    Generation is of `generated` rows of `new_tokens` tokens: a few in the middle are measured. `bf16`: under autocast.
    """
    head, vocabulary = model.get_output_embeddings(), model.config.get_text_config().vocab_size
    ids = torch.arange(rows * (prompt + response), device=model.device).remainder(vocabulary).reshape(rows, -1)

    def forward() -> torch.Tensor:
        with devices.autocast(bf16=bf16):
            states = build.backbone(model)(input_ids=ids, use_cache=False).last_hidden_state
            return states if head is None else head(states[:, -response:]).float().log_softmax(-1)[..., 0]

    def train() -> None:
        forward().sum().backward()

    engine, few = HFEngine(model, None, 0, bf16=bf16), min(new_tokens, MAX_NEW_TOKENS)
    width = prompt + (new_tokens - few) // 2
    read = torch.arange(generated * width).remainder(vocabulary).reshape(generated, width)  # different prompts

    def generate(count: int) -> None:
        if count:
            engine.generate(Prompts(read, torch.ones_like(read, dtype=torch.bool), tuple(range(generated)), count))

    step = torch.optim.AdamW(weight for weight in model.parameters() if weight.requires_grad).step
    calls = (train, torch.no_grad()(forward), step, lambda: generate(min(few, 1)), lambda: generate(few))
    training, reading, stepping, prefill, written, share = fastest(*calls)
    token = max(0.0, written - prefill) / max(1, few - 1)
    return PassTimes(training, reading, stepping, prefill * prompt / width + token * max(0, new_tokens - 1), share)


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
