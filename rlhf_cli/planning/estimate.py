"""Estimate of one stage from its config and what it reads: the sizes of its models, its phases and its steps.

No content is read here: the configs of the models and the size of the data come from above (`StageInputs`).
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rlhf_cli.config import stages
from rlhf_cli.config.base import Config
from rlhf_cli.config.dpo import DPOConfig
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.ppo import PPOConfig, check_num_shared_layers, scale_to_world_size
from rlhf_cli.config.reward import SAMPLING_BATCH_SIZE, RewardConfig
from rlhf_cli.config.sft import BestOfSettings, SFTConfig
from rlhf_cli.config.stages import TRLConfig, mode_of
from rlhf_cli.errors import at_location
from rlhf_cli.evaluation.reward_probes import MAX_PROBED, PROBE_LABELS
from rlhf_cli.models import compiled
from rlhf_cli.planning import memory
from rlhf_cli.planning.memory import SCORING, Bytes, Phase, PPOMemory
from rlhf_cli.planning.model_size import DEFAULT_ADAPTERS, Lengths, ModelSize
from rlhf_cli.planning.target import Target
from rlhf_cli.runs.resolve import models_in_memory, references

ADAMW_8BIT_NAMES = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")  # what transformers calls it
ZERO_3 = 3  # shards weights, too
SHARDED_BY_ZERO = ("optimizer", "gradients", "weights")  # one kind more with each stage of DeepSpeed's ZeRO
Bodies = Mapping[str, Any]  # config key -> the transformers config of the model that it names
Models = dict[str, ModelSize]
Certainty = Literal["exact", "about", "at most"]


# What a stage reads


@dataclass(frozen=True)
class DataSize:
    """Rows that a stage uses: their lengths, their unit and their number; and the dropped rows.

    `how` certain the number is: "about" if estimated from a sample, "at most" if no row was tokenized.
    `evaluated`: rows of data.eval. `answers`: tokens of an average prompt and of the longest chosen answer of pairs.
    """

    lengths: Lengths
    unit: str
    rows: int
    left_out: int = 0
    asked: int = 0
    how: Certainty = "exact"
    evaluated: int = 0
    answers: Lengths = field(default_factory=lambda: Lengths(1, 1))


@dataclass(frozen=True)
class StageInputs:
    """What a stage reads. `sampled`: the responses of an evaluation, per process.

    `adapters`: keys of models that are adapters of the first model's weights.
    """

    bodies: Bodies
    data: DataSize
    adapters: Collection[str] = ()
    sampled: int = 0


def steps_follow_rows(config: Config) -> bool:
    """Return True if more rows make more steps."""
    if isinstance(config, TRLConfig):
        return stages.settings_of(config).max_steps is None
    return isinstance(config, PPOConfig) and config.ppo.total_episodes is None


@dataclass(frozen=True)
class Estimate:
    """Estimate of a stage. `steps` are optimizer steps (sft, reward, dpo) or updates (ppo); 1 for an evaluation."""

    config: Config
    mode: str
    models: Models  # in memory; "reference" is the policy's
    data: DataSize
    phases: list[Phase]
    steps: int
    target: Target

    @property
    def parameters(self) -> dict[str, int]:
        return {name: model.parameters for name, model in self.models.items()}

    @property
    def policy(self) -> ModelSize:
        return next(iter(self.models.values()))

    @property
    def steps_are(self) -> Certainty:
        """How certain `steps` is."""
        return self.data.how if steps_follow_rows(self.config) else "exact"

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)


def estimate_stage(config: Config, inputs: StageInputs, mode: str | None, target: Target) -> Estimate:
    """Estimate a stage per process, in a mode or, if None, that of the config. Raises RLHFError C06."""
    mode = mode or mode_of(config)
    data = inputs.data
    if isinstance(config, PPOConfig):
        check_num_shared_layers(config, inputs.bodies["models.sft"])
        models, ppo = ppo_memory(config, inputs.bodies, mode, target, data.lengths, inputs.adapters)
        steps = scale_to_world_size(config, target.processes).ppo.num_updates(max(1, data.rows))
        return Estimate(config, mode, models, data=data, phases=ppo.phases(), steps=steps, target=target)
    if isinstance(config, EvalConfig):  # adapters are loaded onto the full weights of models.sft
        models = evaluation_models(config, inputs.bodies, target, inputs.adapters)
        phases = _evaluation_phases(config, models, inputs)
        return Estimate(config, "full", models, data=data, phases=phases, steps=1, target=target)
    assert isinstance(config, TRLConfig)
    return _estimate_training(config, inputs, mode, target)


# SFT, reward model and DPO


def _estimate_training(config: TRLConfig, inputs: StageInputs, mode: str, target: Target) -> Estimate:
    settings = stages.settings_of(config)
    data = inputs.data
    model = trl_model(config, inputs.bodies, mode, target)
    models = {use.role: model for use in models_in_memory(config)}
    steps = settings.steps(max(1, data.rows), target.processes)

    fixed = trl_fixed(config, model, target)
    phases = [memory.trl_step(config.stage, model, settings, data.lengths, fixed, gpu=target.gpu)]
    if model.four_bits:  # the finished model is read in full, to be measured
        reading = model.reading(settings.per_device_train_batch_size, data.lengths.row)
        again = {"weights": model.full_weights, "activations": reading}
        phases.append(Phase("read again", 0, memory.peak(again, {})))
    phases += _measuring_phases(config, model, data, steps, target.processes)
    if isinstance(config, RewardConfig) and config.reward.ensemble:
        steps *= config.reward.ensemble
        phases = [replace(each, flops=each.flops * config.reward.ensemble) if each.once else each for each in phases]

    if isinstance(config, SFTConfig) and config.best_of:
        frozen = _best_of_models(config, inputs, target)
        phases = [*_best_of_phases(config.best_of, frozen, inputs, target), *phases]
        models["reward"] = frozen["reward"]
    return Estimate(config, mode, models, data=data, phases=phases, steps=steps, target=target)


def trl_model(config: TRLConfig, bodies: Bodies, mode: str, target: Target) -> ModelSize:
    """Return the model that SFT, the reward stage or DPO trains."""
    settings = stages.settings_of(config)
    options = {"bf16": target.computes_in_bf16(settings.bf16), "checkpointing": settings.gradient_checkpointing}
    scorer = isinstance(config, RewardConfig)
    return _model_size(config, "model.path", bodies, scorer=scorer, **options, **_adapters(mode, config.model))


def trl_fixed(config: TRLConfig, model: ModelSize, target: Target) -> Bytes:
    """Return what SFT, the reward stage or DPO keep in memory, per process."""
    stage = _zero_stage(config)
    fixed = {
        "weights": model.weights,
        "gradients": model.gradients,
        "optimizer": model.optimizer(eight_bits=config.trainer.get("optim") in ADAMW_8BIT_NAMES),
    }
    for kind in SHARDED_BY_ZERO[:stage]:
        fixed[kind] //= target.processes

    samples = isinstance(config, RewardConfig) and config.reward.normalize == "sft" and not target.gpu
    has_own_head = not model.shape.config.get_text_config().tie_word_embeddings
    if samples and has_own_head and model.adapters and not model.four_bits:  # the SFT model's, for its answers
        fixed["weights"] += model.shape.itemsize * model.shape.embeddings
    if isinstance(config, DPOConfig) and not (model.adapters or config.trainer.get("precompute_ref_log_probs")):
        fixed["weights"] += model.full_weights
    return fixed


def _zero_stage(config: TRLConfig) -> int:
    """Return how much DeepSpeed or FSDP shards, as a stage of ZeRO."""
    deepspeed = config.trainer.get("deepspeed")
    if isinstance(deepspeed, dict):
        stage: int = deepspeed.get("zero_optimization", {}).get("stage", 0)
        return stage
    return ZERO_3 if deepspeed or config.trainer.get("fsdp") else 0  # a file of settings is not read


def _measuring_phases(config: TRLConfig, model: ModelSize, data: DataSize, steps: int, processes: int) -> list[Phase]:
    """Return what a process of TRL measures: held-out rows in training and at its end, report card, scale."""
    phases: list[Phase] = []
    if data.evaluated:
        phases.append(_reading_phase(config, model, data, steps, processes))
    if isinstance(config, RewardConfig) and config.reward.normalize == "sft":
        rows = SAMPLING_BATCH_SIZE
        samples = math.ceil(config.reward.normalize_samples / processes)
        sampling = memory.peak({"weights": model.weights}, {"cache": model.cache * rows * data.answers.row})
        flops = model.generation_flops(samples, data.answers)
        phases.append(Phase("normalize", rows, sampling, flops, once=True))
    return phases


def _reading_phase(config: TRLConfig, model: ModelSize, data: DataSize, steps: int, processes: int) -> Phase:
    """Return the phase that reads the held-out rows, as often as a run does."""
    settings = stages.settings_of(config)
    step_rows = settings.per_device_train_batch_size * settings.gradient_accumulation_steps * processes
    epochs = steps * step_rows / max(1, data.rows)
    times = math.ceil(steps / settings.eval_steps if settings.eval_steps else epochs)

    read = times * data.evaluated
    if isinstance(config, RewardConfig):
        read = 2 * read + len(PROBE_LABELS) * min(MAX_PROBED, data.evaluated)
    if isinstance(config, DPOConfig):  # both sides, by the policy and the reference
        read *= 4
    read = math.ceil(read / processes)

    average = data.lengths.average
    rows = settings.per_device_eval_batch_size
    reading = {"weights": model.weights, "activations": model.reading(rows, data.lengths.row)}
    answers = 0 if isinstance(config, RewardConfig) else read * average.response
    flops = model.forward_flops(read, average.row, answers)
    return Phase("evaluate", rows, memory.peak(reading, {}), flops, once=True)


def _best_of_models(config: SFTConfig, inputs: StageInputs, target: Target) -> Models:
    """Return the model that best_of samples from and its reward model, frozen."""
    bf16 = target.computes_in_bf16(config.sft.bf16)
    shared = "best_of.reward" in inputs.adapters
    extra: dict[str, Any] = {"adapters": DEFAULT_ADAPTERS} if shared else {"frozen": True}
    return {
        "policy": _model_size(config, "model.path", inputs.bodies, scorer=False, bf16=bf16, frozen=True),
        "reward": _model_size(config, "best_of.reward", inputs.bodies, scorer=True, bf16=bf16, **extra),
    }


def _best_of_phases(settings: BestOfSettings, frozen: Models, inputs: StageInputs, target: Target) -> list[Phase]:
    """Return what SFT with best_of does first: n answers to each prompt are sampled and scored, some at a time."""
    policy = frozen["policy"]
    reward = frozen["reward"]
    lengths = inputs.data.lengths
    answers = settings.n * (inputs.data.rows + inputs.data.evaluated)
    total = math.ceil(answers / target.processes)
    rows = max(1, min(settings.per_device_batch_size, total))

    fixed = {"weights": policy.weights + added_weights(reward)}
    rollout = memory.rollout_phase(policy, fixed, rows, total, lengths)
    scoring = memory.peak(fixed, {"activations": reward.reading(rows, lengths.row)})
    flops = reward.forward_flops(total, lengths.average.row)
    return [replace(rollout, once=True), Phase(SCORING, rows, scoring, flops, once=True)]


# PPO


def ppo_memory(
    config: PPOConfig, bodies: Bodies, mode: str, target: Target, lengths: Lengths, adapters: Collection[str]
) -> tuple[Models, PPOMemory]:
    """Return PPO's models by name, as far as `bodies` has them, and their memory.

    `adapters`: keys of models that are adapters of the policy's weights, where PPO trains adapters.
    """
    settings = config.ppo.usable(
        gpu=target.gpu, processes=target.processes, bf16=target.computes_in_bf16(config.ppo.bf16)
    )
    options: dict[str, Any] = {"bf16": settings.bf16, "checkpointing": settings.gradient_checkpointing}
    trained = _adapters(mode, config.models)
    policy = _model_size(
        config,
        "models.sft",
        bodies,
        scorer=False,
        shared_layers=settings.num_shared_layers or 0,
        **options,
        **trained,
    )
    is_compiled = target.gpu and compiled.is_wanted(config, policy.parameters)
    policy = replace(policy, compiled=is_compiled)

    models = {"policy": policy, "reference": policy}
    keys: dict[str, str] = {}
    for use in models_in_memory(config):
        if use.role not in ("value", "reward") or use.key not in bodies:
            continue
        name = use.role if use.role not in models else f"{use.role} {use.key}"
        has_adapters = mode != "full" and (use.role == "value" or use.key in adapters)
        extra = trained if has_adapters else {"frozen": use.role == "reward"}
        models[name] = _model_size(config, use.key, bodies, scorer=True, compiled=is_compiled, **options, **extra)
        keys[name] = use.key

    rewards = {name: model for name, model in models.items() if name.startswith("reward")}
    needs_head = settings.needs_value_model and "value" not in models
    machine = target.per_machine if settings.fsdp == "hybrid" and target.per_machine else target.processes
    return models, PPOMemory(
        policy,
        models.get("value"),
        rewards,
        settings,
        lengths,
        gpu=target.gpu,
        usable=target.usable,
        shards=machine,
        engine=config.engine_name(gpu=target.gpu),
        head=policy.shape.hidden if needs_head else 0,
        sharing=_sharing(config, keys, adapters) if mode != "full" else (),
    )


def _sharing(config: PPOConfig, keys: Mapping[str, str], adapters: Collection[str]) -> set[str]:
    """Return the names of value and reward models that add only their adapters to other weights."""
    paths = {reference.key: reference.path for reference in references(config)}
    folders = {name: paths[key] for name, key in keys.items()}
    sharing = {name for name, key in keys.items() if key in adapters}

    value = folders.pop("value", None)
    if value in folders.values():
        sharing.add("value")  # its adapters use the reward model's weights
    return sharing


# Evaluation


def evaluation_models(config: EvalConfig, bodies: Bodies, target: Target, adapters: Collection[str]) -> Models:
    """Return the models of an evaluation by key, as far as `bodies` has them.

    Of the policies other than models.sft only the largest: they are loaded one after the other.
    """
    bf16 = target.computes_in_bf16(config.eval.bf16)
    models: Models = {}
    for use in models_in_memory(config):
        if use.key in bodies:
            how: dict[str, Any] = {"adapters": DEFAULT_ADAPTERS} if use.key in adapters else {"frozen": True}
            scorer = use.role == "judge"
            models[use.key] = _model_size(config, use.key, bodies, scorer=scorer, bf16=bf16, **how)

    others = [key for key, model in models.items() if not model.scorer and key != "models.sft"]
    largest = max(others, key=lambda key: added_weights(models[key]), default=None)
    return {key: model for key, model in models.items() if key not in others or key == largest}


def added_weights(model: ModelSize) -> int:
    """Return the bytes that a model of an evaluation adds to the others: adapters only themselves."""
    return model.gradients if model.adapters else model.weights


def _evaluation_phases(config: EvalConfig, models: Models, inputs: StageInputs) -> list[Phase]:
    weights = sum(added_weights(model) for model in models.values())
    rollout, scoring = memory.evaluation_phases(
        policies=[model for model in models.values() if not model.scorer],
        judges=[model for model in models.values() if model.scorer],
        weights=weights,
        rows=config.eval.per_device_batch_size,
        total=inputs.sampled,
        lengths=inputs.data.lengths,
    )
    return [scoring] if config.models.server else [rollout, scoring]


# What is in memory through a stage


@dataclass(frozen=True)
class FixedMemory:
    """What a process keeps in memory through a stage, by kind, and the bytes of a checkpoint on disk."""

    kinds: Bytes
    checkpoint: float

    @property
    def total(self) -> int:
        return round(sum(self.kinds.values()))


def fixed_memory(config: Config, bodies: Bodies, adapters: Collection[str], target: Target) -> FixedMemory:
    """Return a lower bound of a stage's memory: no activations, and only the models of `bodies`."""
    if isinstance(config, TRLConfig) and "model.path" in bodies:
        model = trl_model(config, bodies, mode_of(config), target)
        fixed = trl_fixed(config, model, target)
        if model.four_bits and sum(fixed.values()) < model.full_weights:
            fixed = {"weights": model.full_weights}  # the finished model is read in full
        eight_bits = config.trainer.get("optim") in ADAMW_8BIT_NAMES
        return FixedMemory(fixed, model.gradients + model.optimizer(eight_bits=eight_bits))
    if isinstance(config, PPOConfig) and "models.sft" in bodies:
        _, ppo = ppo_memory(config, bodies, mode_of(config), target, Lengths(1, 1), adapters)
        return FixedMemory(ppo.largest_fixed(), ppo.trained_bytes + ppo.optimizer + ppo.average)
    if isinstance(config, EvalConfig):
        models = evaluation_models(config, bodies, target, adapters)
        return FixedMemory({"weights": sum(map(added_weights, models.values()))}, 0)
    return FixedMemory({}, 0)


def _model_size(config: Any, key: str, bodies: Bodies, *, scorer: bool, **how: Any) -> ModelSize:
    section = config.model if isinstance(config, TRLConfig) else config.models
    with at_location(config.where(key)):
        return ModelSize.of(bodies[key], section.dtype, section.attn_implementation, scorer=scorer, **how)


def _adapters(mode: str, section: Any) -> dict[str, Any]:
    adapters = None if mode == "full" else section.adapters or DEFAULT_ADAPTERS
    return {"adapters": adapters, "four_bits": mode == "qlora"}
