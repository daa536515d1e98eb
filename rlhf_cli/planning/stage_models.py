"""The models of a stage without content, for the memory plan: `rlhf plan`, the check before a run, `rlhf init`."""

import math
import tomllib
from collections.abc import Collection, Mapping
from copy import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rlhf_cli import runs
from rlhf_cli.config.base import Config
from rlhf_cli.config.dpo import DPOConfig
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.ppo import PPOConfig, PPOSettings
from rlhf_cli.config.reward import RewardConfig
from rlhf_cli.config.sections import LoRA
from rlhf_cli.config.sft import SFTConfig
from rlhf_cli.config.stages import TRLConfig
from rlhf_cli.errors import RLHFError, at_location, did_you_mean
from rlhf_cli.models import build, devices
from rlhf_cli.planning import memory, phase_memory
from rlhf_cli.planning.memory import Lengths
from rlhf_cli.planning.phase_memory import DEFAULT_ADAPTERS, Bytes, PPOModels, PPOPlan, StageModel
from rlhf_cli.runs.resolve import is_policy_key, is_scorer_key

ADAMW_8BIT_NAMES = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")  # what transformers calls it
ZERO_3 = 3  # shards weights, too
Bodies = Mapping[str, Any]  # config key -> the transformers config of the model that it names


@dataclass(frozen=True)
class Target:
    """Hardware available to each of `processes`, of which `per_machine` (None: all) are on a machine."""

    gpu: bool
    memory: int  # bytes
    name: str
    processes: int = 1
    planned: bool = False  # not here; a planned GPU computes in bfloat16

    peak_flops: float | None = None  # of a planned GPU of the table
    per_machine: int | None = None

    @classmethod
    def of(cls, planned: str | None, processes: int, *, sharing: int | None = None) -> "Target":
        """Return a target of planned GPUs, or this machine, with `sharing` (None: all) processes on a machine.

        `planned` is a name of gpus.toml or a size in GiB. CPU processes share this machine's memory. Raises RLHFError
        C07 for an unknown GPU.
        """
        if planned is not None:
            name, known = planned.lower(), gpu_table()
            gib = known[name]["gib"] if name in known else as_number(planned)
            if gib is None or gib <= 0:
                text = f"--gpu {planned}: not a size in GiB, and not one of {', '.join(known)}"
                raise RLHFError("C07", text, hint=did_you_mean(name, known) or "for example --gpu h100")
            title = f"a GPU {name} of" if name in known else "a GPU of"
            rate = known.get(name, {}).get("flops")
            return cls(True, round(gib * 2**30), f"{title} {gib:g} GiB", processes, True, rate, sharing)
        gpu = devices.device().type == "cuda"
        parts = 1 if gpu else sharing or processes
        return cls(gpu, devices.memory_bytes() // parts, devices.device_name(), processes, per_machine=sharing)

    def computes_in_bf16(self, requested: bool | None) -> bool:
        """Return devices.use_bf16; a planned GPU is assumed to support it."""
        return requested is not False if self.planned else devices.use_bf16(requested)

    def usable(self, settings: PPOSettings) -> PPOSettings:
        """Return the settings without what this hardware does not support; bf16 is set."""
        usable = {"offload": settings.offload and self.gpu, "fsdp": self.processes > 1 and settings.fsdp}
        return settings.model_copy(update={"bf16": self.computes_in_bf16(settings.bf16), **usable})


def as_number(text: str) -> float | None:
    """Return a finite number, or None for any other text."""
    try:
        return float(text) if math.isfinite(float(text)) else None
    except ValueError:
        return None


@cache
def gpu_table() -> dict[str, dict[str, Any]]:
    """Return the known GPUs by name: memory in GiB, peak FLOP/s, and the source of both."""
    return tomllib.loads(Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class ModelUse:
    """A model that a stage keeps in memory: its role, and the key that names it."""

    role: str
    key: str


def models_in_memory(config: Config) -> list[ModelUse]:
    """Return the models a stage keeps in memory at the same time; frozen models are loaded once per folder.

    In an evaluation models.ppo and the policies are loaded one after the other; models.ppo stands for models.base too.
    """
    folders = {reference.key: reference.path for reference in runs.references(config)}
    if isinstance(config, TRLConfig):
        others = [ModelUse("reference", "model.path")] if isinstance(config, DPOConfig) else []
        if isinstance(config, SFTConfig) and config.best_of:  # before the training
            others = [ModelUse("reward", "best_of.reward")]
        return [ModelUse("reward" if isinstance(config, RewardConfig) else "policy", "model.path"), *others]
    if isinstance(config, EvalConfig):
        policies = [key for key in folders if is_policy_key(key) and key != "models.base"]
        judges = [ModelUse("judge", key) for key in folders if not is_policy_key(key)]
        return [ModelUse("policy", key) for key in policies] + judges
    assert isinstance(config, PPOConfig)
    models = [ModelUse("policy", "models.sft"), ModelUse("reference", "models.sft")]
    if config.models.value not in ("policy_head", "none"):
        models.append(ModelUse("value", "models.reward" if config.models.value == "reward" else "models.value"))
    scorers = {path: key for key, path in reversed(folders.items()) if is_scorer_key(key) and key != "models.value"}
    return models + [ModelUse("reward", key) for key in reversed(scorers.values())]


def adapter_kind(config: Config) -> str | None:
    """Return the kind of adapters a stage trains, None if it trains full models."""
    adapters: LoRA | None = None
    if isinstance(config, TRLConfig):
        adapters = config.model.adapters
    elif isinstance(config, PPOConfig):
        adapters = config.models.adapters
    return adapters.kind if adapters else None


def mode_of(config: Config) -> str:
    """Return the mode of a config, one of MODES."""
    return adapter_kind(config) or "full"


def _stage_model(
    config: Any, key: str, bodies: Bodies, *, scorer: bool, checkpointing: bool = False, **options: Any
) -> StageModel:
    section = config.model if isinstance(config, TRLConfig) else config.models
    adapters = options.pop("adapters", None)
    packed = adapters and adapters.model_dump_json(include={"kind", "r", "target_modules"})
    freezes_layers = config.stage == "ppo" and config.ppo.num_shared_layers  # in the model itself
    make: Any = _make_stage_model if freezes_layers else cache_stage_model
    source: Any = type(bodies[key]), bodies[key].to_json_string(), section.dtype, section.attn_implementation
    with at_location(config.where(key)):
        model = copy(make(*source, scorer, packed, **options))
    model.checkpointing = checkpointing
    return model


def _make_stage_model(
    kind: Any, fields: str, dtype: str, attention: str | None, scorer: bool, adapters: str | None, **options: Any
) -> StageModel:
    make = build.reward_model_from_config if scorer else build.causal_lm_from_config
    model = make(memory.config_from_json(kind, fields), dtype=dtype, attn_implementation=attention)
    packed = None if adapters is None else LoRA.model_validate_json(adapters)
    return StageModel(model, dtype, attention, adapters=packed, **options)


cache_stage_model = cache(_make_stage_model)


def _adapters(mode: str, section: Any) -> dict[str, Any]:
    adapters = None if mode == "full" else section.adapters or DEFAULT_ADAPTERS
    return {"adapters": adapters, "four_bits": mode == "qlora"}


def trl_model(config: TRLConfig, bodies: Bodies, mode: str, target: Target) -> StageModel:
    """Return the model that SFT, the reward stage or DPO trains."""
    settings = getattr(config, config.stage)
    options = {"bf16": target.computes_in_bf16(settings.bf16), "checkpointing": settings.gradient_checkpointing}
    scorer = isinstance(config, RewardConfig)
    return _stage_model(config, "model.path", bodies, scorer=scorer, **options, **_adapters(mode, config.model))


def trl_fixed(config: TRLConfig, model: StageModel, target: Target) -> Bytes:
    """Return what SFT, the reward stage or DPO keep in memory, per process."""
    eight_bits = config.trainer.get("optim") in ADAMW_8BIT_NAMES
    deepspeed, stage = config.trainer.get("deepspeed"), ZERO_3 if config.trainer.get("fsdp") else 0
    if deepspeed:  # the settings, or a file with them
        stage = deepspeed.get("zero_optimization", {}).get("stage", 0) if isinstance(deepspeed, dict) else ZERO_3
    fixed = phase_memory.trl_fixed(model, eight_bits=eight_bits, zero_stage=stage, processes=target.processes)
    samples = isinstance(config, RewardConfig) and config.reward.normalize == "sft" and not target.gpu
    has_own_head = not model.model.config.get_text_config().tie_word_embeddings
    if samples and has_own_head and model.adapters and not model.four_bits:  # the SFT model's, for its answers
        fixed["weights"] += model.model.get_input_embeddings().weight.nbytes
    if isinstance(config, DPOConfig) and not (model.adapters or config.trainer.get("precompute_ref_log_probs")):
        fixed["weights"] += model.full_weights
    return fixed


def best_of_models(config: SFTConfig, bodies: Bodies, target: Target, *, shared: bool) -> dict[str, StageModel]:
    """Return the model that best_of samples from and its reward model, frozen; `shared`: an adapter of its weights."""
    bf16 = target.computes_in_bf16(config.sft.bf16)
    extra: dict[str, Any] = {"adapters": DEFAULT_ADAPTERS} if shared else {"frozen": True}
    policy = _stage_model(config, "model.path", bodies, scorer=False, bf16=bf16, frozen=True)
    return {"policy": policy, "reward": _stage_model(config, "best_of.reward", bodies, scorer=True, bf16=bf16, **extra)}


def ppo_plan(
    config: PPOConfig, bodies: Bodies, mode: str, target: Target, separate: Collection[str], lengths: Lengths
) -> tuple[dict[str, StageModel], PPOPlan]:
    """Return PPO's models by name, as far as `bodies` has them, and the plan of an update.

    `separate`: keys of models that are not adapters of the policy's weights, although PPO trains adapters.
    """
    settings = target.usable(config.ppo)
    options: dict[str, Any] = {"bf16": settings.bf16, "checkpointing": settings.gradient_checkpointing}
    adapted = _adapters(mode, config.models)
    policy = _stage_model(config, "models.sft", bodies, scorer=False, **options, **adapted)
    models, keys = {"policy": policy, "reference": policy}, {}
    for use in models_in_memory(config):
        if use.role in ("value", "reward") and use.key in bodies:
            name = use.role if use.role not in models else f"{use.role} {use.key}"
            has_adapters = mode != "full" and (use.role == "value" or use.key not in separate)
            extra = adapted if has_adapters else {"frozen": use.role == "reward"}
            models[name] = _stage_model(config, use.key, bodies, scorer=True, **options, **extra)
            keys[name] = use.key
    rewards = {name: model for name, model in models.items() if name.startswith("reward")}
    sharing = {name for name, key in keys.items() if mode != "full" and key not in separate}
    paths = {reference.key: reference.path for reference in runs.references(config)}
    if mode != "full" and "value" in keys and paths[keys["value"]] in [paths[keys[name]] for name in rewards]:
        sharing.add("value")  # its adapters use the reward model's weights
    head = policy.value_head() if settings.needs_value_model and "value" not in models else None
    ppo_models = PPOModels(policy, models.get("value"), rewards, mode, sharing, head)
    sharded_over = target.per_machine if settings.fsdp == "hybrid" and target.per_machine else target.processes
    here: dict[str, Any] = {"gpu": target.gpu, "memory": target.memory, "processes": sharded_over}
    return models, PPOPlan(ppo_models, settings, lengths, **here, engine=config.engine_name(gpu=target.gpu))


def evaluation_models(
    config: EvalConfig, bodies: Bodies, target: Target, adapters: Collection[str] = ()
) -> tuple[dict[str, StageModel], dict[str, StageModel]]:
    """Return the policies and the judges of an evaluation by key, as far as `bodies` has them.

    Of the policies other than models.sft only the largest: they are loaded one after the other. `adapters`: keys of
    models that are adapters of models.sft's weights.
    """
    bf16 = {"bf16": target.computes_in_bf16(config.eval.bf16)}
    whole: dict[str, Any] = {**bf16, "frozen": True}
    options = {key: {**bf16, "adapters": DEFAULT_ADAPTERS} if key in adapters else whole for key in bodies}
    policies, judges = (
        {
            use.key: _stage_model(config, use.key, bodies, scorer=role == "judge", **options[use.key])
            for use in models_in_memory(config)
            if use.role == role and use.key in bodies
        }
        for role in ("policy", "judge")
    )
    added = {key: evaluation_weights({key: policies[key]}, adapters) for key in policies if key != "models.sft"}
    largest = max(added, key=added.__getitem__, default=None)
    return {key: model for key, model in policies.items() if key in ("models.sft", largest)}, judges


def evaluation_weights(models: Mapping[str, StageModel], adapters: Collection[str]) -> int:
    """Return the bytes of all weights of an evaluation; adapters add only themselves to those of models.sft."""
    return sum(memory.size_bytes(m.trained) if key in adapters else m.weights for key, m in models.items())


@dataclass(frozen=True)
class FixedMemory:
    """What a process keeps in memory through a stage, by kind, and the bytes of a checkpoint on disk."""

    kinds: Bytes
    checkpoint: float

    @property
    def total(self) -> int:
        return round(sum(self.kinds.values()))


def fixed_memory(config: Config, bodies: Bodies, separate: set[str], target: Target) -> FixedMemory:
    """Return a lower bound of a stage's memory: no activations, and only the models of `bodies`."""
    mode = mode_of(config)
    if isinstance(config, TRLConfig) and "model.path" in bodies:
        model = trl_model(config, bodies, mode, target)
        states = phase_memory.trl_fixed(model, eight_bits=config.trainer.get("optim") in ADAMW_8BIT_NAMES)
        fixed = trl_fixed(config, model, target)
        if model.four_bits and sum(fixed.values()) < model.full_weights:
            fixed = {"weights": model.full_weights}  # the finished model is read in full
        return FixedMemory(fixed, memory.size_bytes(model.trained) + states["optimizer"])
    if isinstance(config, PPOConfig) and "models.sft" in bodies:
        _, plan = ppo_plan(config, bodies, mode, target, separate, Lengths(1, 1))
        return FixedMemory(plan.fixed(), memory.size_bytes(plan.trained) + plan.learning["optimizer"] + plan.average)
    if isinstance(config, EvalConfig):
        adapters = bodies.keys() - separate - {"models.sft"} if "models.sft" in bodies else set()
        policies, judges = evaluation_models(config, bodies, target, adapters)
        return FixedMemory({"weights": evaluation_weights({**policies, **judges}, adapters)}, 0)
    return FixedMemory({}, 0)
