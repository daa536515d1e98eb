"""Time of a stage by its estimate: measured passes on a CPU, a model of the card for PPO on a GPU, else products.

On a CPU passes are measured with random weights on rows of average length: much of the time goes into Python, norms,
softmax and copies. Of a deep model whose layers are alike the passes of two shallow ones are measured, and the time of
the other layers follows. PPO on a known GPU: gpu_time. Elsewhere the time is that of the matrix products only, a lower
bound: FLOPs / rate. The rate of this machine is measured on products of the model's width, one with all tokens of a
micro-batch as rows for reading and learning, and one with a row per response for generation.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.sections import LoRA
from rlhf_cli.models import build, devices, lora
from rlhf_cli.models.batch import Prompts
from rlhf_cli.planning import gpu_time, model_size
from rlhf_cli.planning.estimate import Estimate
from rlhf_cli.planning.memory import SCORING, Phase
from rlhf_cli.planning.model_size import Lengths, ModelSize
from rlhf_cli.ppo.rollout import HFEngine

ATTAINED = 0.4  # of a known GPU's peak FLOP/s, by the products of the other stages
MAX_MEASURED_S = 30.0  # by products, of a small model's step; more is left to the products
TRAINING_BYTES = 16  # per parameter: weights, gradients and moments of AdamW in float32
SHALLOW_LAYERS = (1, 5)  # of a deep model
MAX_SHALLOW_TOKENS = 512  # of its measured rows
MAX_NEW_TOKENS = 9  # of a measured response
MAX_SHALLOW_SHARE = 0.25  # of the memory, for weights, gradients and moments of a shallow model
MAX_CALLS = 3  # per function and round
MAX_CALLS_S = 2.5  # after which no call is added
MAX_ROUNDS = 5  # on a busy machine
MAX_ROUNDS_S = 10.0  # after which no round is added
MAX_PRODUCT_ROWS = 4096


class Duration(NamedTuple):
    """Seconds of each phase."""

    phases: dict[str, float]
    run: bool = False  # whether passes were measured
    is_bound: bool = False  # only the products are counted
    share: float = 1  # of the processor, which the measurement had


class PassTimes(NamedTuple):
    """Seconds of passes of a model, and the share of the processor that the measurement had."""

    train: float  # forward and backward
    forward: float
    step: float  # of AdamW
    generate: float
    share: float


class Measured(NamedTuple):
    """Rows of the passes that are measured, for a stage on this CPU."""

    rows: int
    lengths: Lengths
    new_tokens: int  # of a response that is generated; 0 without a rollout
    generated: int  # responses at a time


def estimate_duration(stage: Estimate, flops: float | None) -> Duration:
    """Estimate the time by `flops` operations per second, or by what is known or measured of the target."""
    computing = [phase for phase in stage.phases if phase.flops]
    card = stage.target.card
    if card and not flops:
        if isinstance(stage.config, PPOConfig):
            seconds = gpu_time.ppo_seconds(stage, stage.config, card)
            return Duration(seconds, is_bound=stage.config.models.server is not None)
        flops = ATTAINED * card.peak_flops
    if flops:
        return Duration({phase.name: phase.flops / flops for phase in computing}, is_bound=True)

    largest = max(stage.parameters.values())
    devices.set_num_threads(largest)
    products = _products(stage, computing)
    if not stage.target.gpu and not stage.policy.four_bits:
        is_small = largest < devices.SMALL_MODEL_PARAMETERS and sum(products.phases.values()) < MAX_MEASURED_S
        layers = (stage.policy.shape.layers,) if is_small else _shallow_layers(stage.policy, stage.target.memory)
        if layers:
            return _measure(stage, computing, layers, products.phases)
    return products


def _products(stage: Estimate, computing: list[Phase]) -> Duration:
    """Return the time of the matrix products alone, at the rate of this machine."""
    seconds: dict[str, float] = {}
    shares: list[float] = []
    for phase in computing:
        width = 1 if phase.name in ("rollout", "normalize") else stage.data.lengths.row
        rate, share = measure_flops(phase.rows * width, stage.policy.shape.hidden)
        seconds[phase.name] = phase.flops / rate
        shares.append(share)
    return Duration(seconds, is_bound=True, share=min(shares))


def _shallow_layers(policy: ModelSize, available: int) -> tuple[int, ...]:
    """Return the numbers of layers to measure of a model whose layers are alike; none if they take too much memory."""
    shape = policy.shape
    kind = cast("Any", type(shape.config))
    if shape.layers <= SHALLOW_LAYERS[-1] or not model_size.has_equal_layers(kind, shape.config.to_json_string()):
        return ()
    left_out = 1 - SHALLOW_LAYERS[-1] / shape.layers
    parameters = shape.parameters - left_out * shape.decoder
    return SHALLOW_LAYERS if TRAINING_BYTES * parameters < MAX_SHALLOW_SHARE * available else ()


def _measure(
    stage: Estimate, computing: list[Phase], layers: tuple[int, ...], products: Mapping[str, float]
) -> Duration:
    """Measure passes of the stage's first model with `layers`; each phase takes as many of them as its FLOPs say.

    `products`: seconds of the phases by matrix products, for normalize, which samples from another model.
    """
    policy = stage.policy
    last = next(phase for phase in reversed(computing) if not phase.once)
    measured = _measured_rows(stage, computing, last, shallow=len(layers) > 1)
    times = _pass_times(policy, layers, measured)

    rows = measured.rows
    mean = measured.lengths
    answers = 0 if policy.scorer else rows * mean.response
    seconds = dict(products)
    for phase in computing:
        if phase.name == "rollout":
            flops = policy.generation_flops(measured.generated, mean)
            seconds[phase.name] = phase.flops / flops * times.generate
        elif phase.name in (SCORING, "evaluate"):
            flops = policy.forward_flops(rows, mean.row, answers)
            seconds[phase.name] = phase.flops / flops * times.forward
        elif phase.name != "normalize":
            flops = policy.training_flops(rows, mean.row, answers)
            seconds[phase.name] = phase.flops / flops * times.train
    seconds[last.name] += times.step * _optimizer_steps(stage)
    return Duration(seconds, run=True, share=times.share)


def _measured_rows(stage: Estimate, computing: list[Phase], last: Phase, *, shallow: bool) -> Measured:
    mean = stage.data.lengths.average
    rows = last.rows * (2 if stage.policy.scorer else 1)
    if shallow:
        rows = max(1, min(rows, MAX_SHALLOW_TOKENS // mean.row))

    for phase in computing:
        if phase.name == "rollout":
            return Measured(rows, mean, new_tokens=mean.response, generated=phase.rows)
    return Measured(rows, mean, new_tokens=0, generated=1)


def _optimizer_steps(stage: Estimate) -> int:
    """Return the optimizer steps of a step or an update, for each trained model."""
    config = stage.config
    if isinstance(config, PPOConfig):
        trained = 2 if "value" in stage.models else 1
        return config.ppo.num_ppo_epochs * config.ppo.num_mini_batches * trained
    return 0 if config.stage == "eval" else 1


def _pass_times(policy: ModelSize, layers: tuple[int, ...], sizes: Measured) -> PassTimes:
    """Measure passes of a model with each number of layers; the time of the other layers follows."""
    times = []
    for number in layers:
        model = _make_model(policy, number)
        passes = measure_passes(
            model,
            sizes.rows,
            sizes.lengths.prompt,
            sizes.lengths.response,
            new_tokens=sizes.new_tokens,
            generated=sizes.generated,
            bf16=policy.bf16,
        )
        times.append(passes)
    if len(times) == 1:
        return times[0]

    few, more = times
    steps = (policy.shape.layers - layers[0]) / (layers[1] - layers[0])
    whole = [one + steps * max(0.0, other - one) for one, other in zip(few, more, strict=True)]
    return PassTimes(*whole)._replace(share=min(few.share, more.share))


def _make_model(policy: ModelSize, layers: int) -> Any:
    """Return a stage's model with random weights and its first layers, with adapters where it has some."""
    make = build.reward_model_from_config if policy.scorer else build.causal_lm_from_config
    with torch.random.fork_rng():
        model: Any = make(model_size.with_layers(policy.shape.config, layers), device=torch.device("cpu"))
    if policy.adapters:
        _add_adapters(model, policy.adapters)
    return model


class LoRALinear(nn.Module):
    """A linear layer, and two trained low-rank matrices beside it (LoRA, arXiv 2106.09685)."""

    def __init__(self, base: Any, rank: int) -> None:
        super().__init__()
        is_conv1d = hasattr(base, "nf")
        width, height = (base.nx, base.nf) if is_conv1d else (base.in_features, base.out_features)
        self.base = base
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, height, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.base(x) + self.up(self.down(x))
        return output


def _add_adapters(model: Any, adapters: LoRA) -> None:
    """Add adapters to a model; train only these and a one-label head. Without peft, whose import takes seconds."""
    targets = lora.target_modules(model, adapters)
    for owner, name, layer in list(lora.linear_layers(model)):
        if name in targets:
            setattr(owner, name, LoRALinear(layer, adapters.r))
    for name, weight in model.named_parameters():
        weight.requires_grad_(".down." in name or ".up." in name or name.startswith("score."))


# Speed of this machine, by short measurements


def measure_passes(
    model: Any, rows: int, prompt: int, response: int, new_tokens: int, generated: int, *, bf16: bool = False
) -> PassTimes:
    """Measure passes on `rows` rows of prompt and response, with the logits of the responses if it has a head.

    Generation is of `generated` rows of `new_tokens` tokens: a few in the middle are measured. `bf16`: under autocast.
    """
    head = model.get_output_embeddings()
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.arange(rows * (prompt + response), device=model.device).remainder(vocabulary).reshape(rows, -1)

    def forward() -> torch.Tensor:
        with devices.autocast(bf16=bf16):
            states: torch.Tensor = build.backbone(model)(input_ids=ids, use_cache=False).last_hidden_state
            if head is None:
                return states
            logits: torch.Tensor = head(states[:, -response:])
            return logits.float().log_softmax(-1)[..., 0]

    def train() -> None:
        forward().sum().backward()

    engine = HFEngine(model, None, 0, bf16=bf16)
    few = min(new_tokens, MAX_NEW_TOKENS)
    width = prompt + (new_tokens - few) // 2
    read = torch.arange(generated * width).remainder(vocabulary).reshape(generated, width)  # different prompts

    def generate(count: int) -> None:
        if count:
            engine.generate(Prompts(read, torch.ones_like(read, dtype=torch.bool), tuple(range(generated)), count))

    step = torch.optim.AdamW(weight for weight in model.parameters() if weight.requires_grad).step
    calls = (train, torch.no_grad()(forward), step, lambda: generate(min(few, 1)), lambda: generate(few))
    training, reading, stepping, prefill, written, share = fastest(*calls)

    token = max(0.0, written - prefill) / max(1, few - 1)
    generating = prefill * prompt / width + token * max(0, new_tokens - 1)
    return PassTimes(training, reading, stepping, generating, share)


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
    best = [min(seconds) for seconds in seconds_of_calls]
    return *best, max(shares)


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
    rows = min(rows, MAX_PRODUCT_ROWS)
    width = 4 * hidden
    left = torch.zeros(rows, hidden, device=devices.device())
    right = torch.zeros(hidden, width, device=devices.device())
    seconds, share = fastest(lambda: left @ right)
    operations = 2 * rows * hidden * width
    return operations / seconds, share
