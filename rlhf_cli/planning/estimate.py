"""Estimate of one stage: its models without content, its data, and the memory and operations of its phases."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf_cli.config import stages
from rlhf_cli.config.base import Config
from rlhf_cli.config.dpo import DPOConfig
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.reward import RewardConfig
from rlhf_cli.config.sft import BestOf, SFTConfig
from rlhf_cli.config.stages import TRLConfig
from rlhf_cli.evaluation.reward_probes import MAX_PROBED, PROBE_LABELS
from rlhf_cli.models import forward
from rlhf_cli.planning import phase_memory, stage_models
from rlhf_cli.planning.memory import Lengths
from rlhf_cli.planning.phase_memory import Phase, StageModel
from rlhf_cli.planning.stage_inputs import Certainty, DataSize, ModelResolver, steps_follow_rows
from rlhf_cli.planning.stage_models import Bodies, Target
from rlhf_cli.stages.common.training import SAMPLING_BATCH_SIZE
from rlhf_cli.stages.ppo import setup

# Freed memory that glibc's malloc keeps, as a share of the tensors (measured: docs/results/memory.md, chat-model.md).
# PPO's phases allocate tensors of different sizes in turn; batches of pairs have the widths of their pairs.
FRAGMENTATION = {"ppo": 0.4, "sft": 0.12, "reward": 0.45, "dpo": 0.45, "eval": 0.12}
TRL_BYTES = 220_000_000  # that TRL and datasets add to torch and transformers


@dataclass(frozen=True)
class Estimate:
    """Estimate of a stage. `steps` are optimizer steps (sft, reward, dpo) or updates (ppo); 1 for an evaluation."""

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
    mode = mode or stage_models.mode_of(config)
    specs = {use.key: chain.start(config, use.key) for use in stage_models.models_in_memory(config)}
    bodies, data = {key: spec.body for key, spec in specs.items()}, chain.data_size(config, next(iter(specs.values())))
    if isinstance(config, PPOConfig):
        setup.check_num_shared_layers(config, bodies["models.sft"])
    options: dict[str, Any] = {"separate": separate}
    if isinstance(config, EvalConfig):
        mode = "full"  # evaluated adapters are loaded onto the full weights of models.sft
        options = {"adapters": chain.adapters_of_sft(config), "sampled": _num_sampled(config, chain, data.rows, target)}
    models, phases = stage_phases(config, bodies, mode, target, data.lengths, **options)
    steps = _steps(config, data.rows, target.processes)
    if isinstance(config, TRLConfig):
        phases += measuring_phases(config, next(iter(models.values())), data, steps, target.processes)
    if isinstance(config, SFTConfig) and config.best_of:
        shared = not chain.separate_models(config)
        frozen = stage_models.best_of_models(config, bodies, target, shared=shared)
        weights = stage_models.evaluation_weights(frozen, ["reward"] if shared else [])
        phases = [*best_of_phases(config.best_of, frozen, weights, data, target), *phases]
        models["reward"] = frozen["reward"]
    return Estimate(config, mode, models, data, phases, steps, target)


def stage_phases(
    config: Config,
    bodies: Bodies,
    mode: str,
    target: Target,
    lengths: Lengths,
    *,
    separate: Collection[str] = (),
    adapters: Collection[str] = (),
    sampled: int = 0,
) -> tuple[dict[str, StageModel], list[Phase]]:
    """Return the models of a stage by name and its phases, for models with these configs and rows of these lengths.

    `separate` as in `plan_models.ppo_plan`. Of an evaluation: `adapters`, the keys of models that are adapters of
    models.sft, and `sampled`, its responses.
    """
    if isinstance(config, PPOConfig):
        models, plan = stage_models.ppo_plan(config, bodies, mode, target, separate, lengths)
        return models, plan.phases()
    if isinstance(config, EvalConfig):
        policies, judges = stage_models.evaluation_models(config, bodies, target, adapters)
        weights = stage_models.evaluation_weights({**policies, **judges}, adapters)
        sizes = weights, config.eval.per_device_batch_size, sampled, lengths
        phases = evaluation_phases([*policies.values()], [*judges.values()], *sizes)
        return {**policies, **judges}, phases
    assert isinstance(config, TRLConfig)
    model, settings = stage_models.trl_model(config, bodies, mode, target), stages.settings_of(config)
    fixed = stage_models.trl_fixed(config, model, target)
    phases = phase_memory.trl_phases(config.stage, model, settings, lengths, fixed, target.gpu)
    return dict.fromkeys((use.role for use in stage_models.models_in_memory(config)), model), phases


def measuring_phases(config: TRLConfig, model: StageModel, data: DataSize, steps: int, processes: int) -> list[Phase]:
    """Return what a process of TRL measures: held-out rows in training and at its end, report card, scale."""
    settings, average, phases = stages.settings_of(config), data.lengths.average, list[Phase]()
    step_rows = settings.per_device_train_batch_size * settings.gradient_accumulation_steps * processes
    times = math.ceil(steps / settings.eval_steps if settings.eval_steps else steps * step_rows / max(1, data.rows))
    rows, read = settings.per_device_eval_batch_size, times * data.evaluated
    if isinstance(config, RewardConfig):
        read = 2 * read + len(PROBE_LABELS) * min(MAX_PROBED, data.evaluated)
    if isinstance(config, DPOConfig):  # both sides, by the policy and the reference
        read *= 4
    read = math.ceil(read / processes)
    if data.evaluated:
        reading = {"weights": model.weights, "activations": model.working(rows, data.lengths.row)}
        answers = 0 if isinstance(config, RewardConfig) else read * average.response
        phases.append(Phase("evaluate", rows, [reading], model.forward_flops(read, average.row, answers), once=True))
    if isinstance(config, RewardConfig) and config.reward.normalize == "sft":
        cache = {"weights": model.weights, "cache": model.cache * SAMPLING_BATCH_SIZE * data.answers.row}
        flops = model.generation_flops(math.ceil(config.reward.normalize_samples / processes), data.answers)
        phases.append(Phase("normalize", SAMPLING_BATCH_SIZE, [cache], flops, once=True))
    return phases


def evaluation_phases(
    policies: Sequence[StageModel], judges: Sequence[StageModel], weights: int, rows: int, total: int, lengths: Lengths
) -> list[Phase]:
    """Return the phases of an evaluation. `policies` are those in memory at once: SFT and one other."""
    rows = min(rows, total)
    fixed, answers = {"weights": weights}, rows * lengths.response
    reading = max(model.working(rows, lengths.row) for model in (*policies, *judges))
    chunk = min(answers, forward.logit_chunks(policies[0].model, 1)[0].stop)
    logits = {"logits": phase_memory.SAMPLE_COPIES * 4 * chunk * policies[0].vocabulary}
    width = lengths.average.row
    flops = sum(model.forward_flops(rows, width) for model in judges)
    flops += sum(model.forward_flops(rows, width - 1, answers) for model in policies)
    return [
        phase_memory.rollout_phase(policies[0], fixed, rows, total, lengths),
        Phase("judge", rows, [{**fixed, "activations": reading}, {**fixed, **logits}], flops * total / rows),
    ]


def best_of_phases(
    settings: BestOf, frozen: Mapping[str, StageModel], weights: int, data: DataSize, target: Target
) -> list[Phase]:
    """Return what SFT with best_of does first: n answers to each prompt are sampled and scored, some at a time."""
    fixed, width, reward = {"weights": weights}, data.lengths.row, frozen["reward"]
    total = -(-settings.n * (data.rows + data.evaluated) // target.processes)
    rows = max(1, min(settings.per_device_batch_size, total))
    reading = {**fixed, "activations": reward.working(rows, width)}
    rollout = phase_memory.rollout_phase(frozen["policy"], fixed, rows, total, data.lengths)
    flops = reward.forward_flops(total, data.lengths.average.row)
    return [replace(rollout, once=True), Phase("judge", rows, [reading], flops, once=True)]


def overhead_bytes(stage: str, peak: int, target: Target, process: int) -> dict[str, int]:
    """Return what a process on a CPU needs beside `peak` bytes of tensors: freed memory that malloc keeps, libraries.

    `process`: bytes of this process before it computes.
    """
    if target.gpu:
        return {"holes": 0, "libraries": 0}
    libraries = process + (TRL_BYTES if stage in ("sft", "reward", "dpo") else 0)
    return {"holes": round(FRAGMENTATION[stage] * peak), "libraries": libraries}


def _num_sampled(config: EvalConfig, chain: ModelResolver, prompts: int, target: Target) -> int:
    """Return the responses that each process samples in an evaluation."""
    settings, policies = config.eval, 2 + bool(config.models.base) + len(config.policies)
    rounds = policies * len(settings.modes) + settings.draws + len(settings.interpolate)
    if settings.frontier and (trainer := chain.trainer(config)):
        rounds += max(0, trainer.output.snapshots - 1)  # beside PPO's last policy; its best one may be evaluated too
    return -(-prompts // target.processes) * rounds


def _steps(config: Config, rows: int, processes: int) -> int:
    if isinstance(config, PPOConfig):
        return setup.scale_to_world_size(config, processes).ppo.num_updates(max(1, rows))
    if isinstance(config, TRLConfig):
        return stages.settings_of(config).steps(max(1, rows), processes)
    return 1
