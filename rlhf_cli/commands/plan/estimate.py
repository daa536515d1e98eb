"""Estimate of one stage: its models without content, its data, the memory of its phases, and their time.

Time: passes of small models on a CPU are measured, with random weights, on rows of average length: such a model's time
goes into Python, norms, softmax and copies. For all others, and for machines that are not here, the time is that of the
matrix products only, a lower bound: FLOPs / rate. The rate is measured on products of the model's width, one with all
tokens of a micro-batch as rows for reading and learning, and one with a row per response for generation.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rlhf_cli import runs
from rlhf_cli.commands.plan import phases
from rlhf_cli.commands.plan.models import Certainty, DataSize, ModelResolver, ModelSpec, steps_follow_rows
from rlhf_cli.commands.plan.phases import DEFAULT_ADAPTERS, Phase, PPOModels, StageModel
from rlhf_cli.config.base import Config
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.ppo_options import PPOSettings
from rlhf_cli.config.training import RewardConfig, SFTConfig
from rlhf_cli.errors import at_location
from rlhf_cli.models import build, devices, memory
from rlhf_cli.models.batch import Prompts
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.stages import hardware, ppo_setup, training_setup

MAX_MEASURED_S = 30.0  # products that take longer take most of the time
MAX_CALLS, MAX_CALLS_S = 3, 5.0  # per function and round: number of calls, seconds after which none is added
MAX_ROUNDS, MAX_ROUNDS_S = 5, 10.0  # on a busy machine: number of rounds, seconds after which none is added
MAX_PRODUCT_ROWS = 4096
ADAMW_8BIT_NAMES = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")  # what transformers calls it


@dataclass(frozen=True)
class Target:
    """Hardware available to each of `processes`."""

    gpu: bool
    memory: int  # bytes
    name: str
    processes: int = 1

    @classmethod
    def of(cls, gib: float | None, processes: int) -> "Target":
        """Return a target of GPUs with `gib` GiB, or this machine; CPU processes share its memory."""
        if gib is not None:
            return cls(True, round(gib * 2**30), f"a GPU of {gib:g} GiB", processes)
        gpu = devices.device().type == "cuda"
        return cls(gpu, devices.memory_bytes() // (1 if gpu else processes), devices.device_name(), processes)

    def computes_in_bf16(self, requested: bool | None) -> bool:
        """Return devices.use_bf16; a planned GPU is assumed to support it."""
        return devices.use_bf16(requested) if not self.gpu else requested is not False

    def usable(self, settings: PPOSettings) -> PPOSettings:
        """Return the settings that this hardware supports."""
        bf16 = self.gpu or devices.supports_dtype("bfloat16")
        return hardware.supported_settings(settings, bf16=bf16, gpu=self.gpu, group=self.processes > 1)


@dataclass(frozen=True)
class Estimate:
    """Estimate of a stage. `steps` are optimizer steps (sft, reward) or updates (ppo); 1 for an evaluation."""

    config: Config
    mode: str
    models: dict[str, StageModel]  # in memory; "reference" is the policy's
    data: DataSize
    phases: list[Phase]
    steps: int
    target: Target

    @property
    def parameters(self) -> dict[str, int]:
        return {name: model.parameters for name, model in self.models.items()}

    @property
    def policy(self) -> StageModel:
        return next(iter(self.models.values()))

    @property
    def steps_are(self) -> Certainty:
        """How certain `steps` is."""
        return self.data.how if steps_follow_rows(self.config) else "exact"

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)


def estimate_stage(config: Config, chain: ModelResolver, mode: str | None, target: Target) -> Estimate:
    """Estimate a stage per process, in a mode or, if None, that of the config.

    Raises RLHFError as `rlhf check` does, for missing or invalid models and data.
    """
    separate = chain.separate_models(config) if mode is None else set()
    shares_base = isinstance(config, PPOConfig) and config.models.adapters
    mode = mode or ("one-base" if shares_base else hardware.adapter_kind(config) or "full")
    starts = {use.key: chain.start(config, use.key) for use in hardware.models_in_memory(config)}
    data = chain.data_size(config, next(iter(starts.values())))
    if isinstance(config, PPOConfig):
        models, stage_phases = _ppo(config, starts, data, mode, target, separate)
    elif isinstance(config, EvalConfig):
        mode = "full"  # evaluated models are loaded in full
        models, stage_phases = _evaluation(config, starts, data, target, chain)
    else:
        assert isinstance(config, SFTConfig | RewardConfig)
        models, stage_phases = _trl(config, starts, data, mode, target)
    return Estimate(config, mode, models, data, stage_phases, _steps(config, data.rows, target.processes), target)


def _stage_model(config: Any, key: str, start: ModelSpec, *, scorer: bool, **options: Any) -> StageModel:
    section = config.model if config.stage in ("sft", "reward") else config.models
    make = build.reward_model_from_config if scorer else build.causal_lm_from_config
    with at_location(config.where(key)):
        model = make(start.body, dtype=section.dtype, attn_implementation=section.attn_implementation)
    return StageModel(model, section, **options)


def _adapters(mode: str, section: Any) -> dict[str, Any]:
    adapters = None if mode == "full" else section.adapters or DEFAULT_ADAPTERS
    return {"adapters": adapters, "four_bits": mode == "qlora"}


def _trl(
    config: SFTConfig | RewardConfig, starts: dict[str, ModelSpec], data: DataSize, mode: str, target: Target
) -> tuple[dict[str, StageModel], list[Phase]]:
    settings = training_setup.settings_of(config)
    options = {"bf16": target.computes_in_bf16(settings.bf16), "checkpointing": settings.gradient_checkpointing}
    scorer, start = config.stage == "reward", starts["model.path"]
    model = _stage_model(config, "model.path", start, scorer=scorer, **options, **_adapters(mode, config.model))
    eight_bits = config.trainer.get("optim") in ADAMW_8BIT_NAMES
    stage_phases = phases.trl_phases(config.stage, model, settings, data.lengths, gpu=target.gpu, eight_bits=eight_bits)
    return {"reward" if scorer else "policy": model}, stage_phases


def _ppo(
    config: PPOConfig, starts: dict[str, ModelSpec], data: DataSize, mode: str, target: Target, separate: set[str]
) -> tuple[dict[str, StageModel], list[Phase]]:
    """`separate`: keys of models that are not adapters of the policy's weights, although PPO trains adapters."""
    ppo_setup.check_num_shared_layers(config, starts["models.sft"].body)
    settings = target.usable(config.ppo)
    options = {"bf16": settings.bf16, "checkpointing": settings.gradient_checkpointing}
    adapted = _adapters(mode, config.models)
    policy = _stage_model(config, "models.sft", starts["models.sft"], scorer=False, **options, **adapted)
    models, keys = {"policy": policy, "reference": policy}, {}
    for use in hardware.models_in_memory(config):
        if use.role in ("value", "reward"):
            name = use.role if use.role not in models else f"{use.role} {use.key}"
            # a frozen reward model has adapters if it shares its base, and in 4 bits
            has_adapters = use.role == "value" or mode == "qlora" or (mode == "one-base" and use.key not in separate)
            extra = adapted if has_adapters else {}
            models[name] = _stage_model(config, use.key, starts[use.key], scorer=True, **options, **extra)
            keys[name] = use.key
    rewards = {name: model for name, model in models.items() if name.startswith("reward")}
    sharing = {name for name, key in keys.items() if mode == "one-base" and key not in separate}
    paths = {reference.key: reference.path for reference in runs.references(config)}
    if mode == "one-base" and "value" in keys and paths[keys["value"]] in [paths[keys[name]] for name in rewards]:
        sharing.add("value")  # its adapters use the reward model's weights
    ppo_models = PPOModels(policy, models.get("value"), rewards, mode, sharing)
    plan = phases.PPOPlan(ppo_models, settings, data.lengths, gpu=target.gpu, processes=target.processes)
    return models, plan.phases()


def _evaluation(
    config: EvalConfig, starts: dict[str, ModelSpec], data: DataSize, target: Target, chain: ModelResolver
) -> tuple[dict[str, StageModel], list[Phase]]:
    uses, settings = hardware.models_in_memory(config), config.eval
    policies, judges = (
        {u.key: _stage_model(config, u.key, starts[u.key], scorer=role == "judge") for u in uses if u.role == role}
        for role in ("policy", "judge")
    )
    rounds = (len(policies) + bool(config.models.base)) * len(settings.modes) + max(settings.best_of, default=0)
    if settings.frontier and (trainer := chain.trainer(config)):
        rounds += max(0, trainer.output.snapshots - 1)  # beside PPO's last policy; its best one may be evaluated too
    total = -(-data.rows // target.processes) * rounds
    stage_phases = phases.evaluation_phases([*policies.values()], [*judges.values()], settings, total, data.lengths)
    return {**policies, **judges}, stage_phases


def _steps(config: Config, rows: int, processes: int) -> int:
    if isinstance(config, PPOConfig):
        return ppo_setup.scale_to_world_size(config, processes).ppo.num_updates(max(1, rows))
    if isinstance(config, SFTConfig | RewardConfig):
        return training_setup.settings_of(config).steps(max(1, rows), processes)
    return 1


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
