"""Estimate of one stage: its models on the meta device, and the memory and FLOPs of its phases."""

import copy
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from torch import nn

from rlhf_cli import runs
from rlhf_cli.commands.plan import memory
from rlhf_cli.commands.plan import models as remaining
from rlhf_cli.commands.plan.measure import MemoryCounter
from rlhf_cli.commands.plan.memory import Count, Phase, Target, TrainOptions
from rlhf_cli.commands.plan.meta import STANDARD, Lengths
from rlhf_cli.commands.plan.models import Certainty, DataSize, ModelResolver
from rlhf_cli.config.base import Config
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.training import RewardConfig, SFTConfig
from rlhf_cli.errors import at_location
from rlhf_cli.models import build, forward, sharding
from rlhf_cli.stages import hardware, ppo_setup

UNITS = (2, 3, 4)
MIN_EXTRAPOLATED_UNITS = 20  # units from which three shallow counts take less time than a whole one
Found = tuple[dict[str, int], list[Phase]]  # parameters of each model, phases


def extrapolate_depth(
    count: Callable[[Config, dict[str, Any]], Found], config: Config, model_configs: dict[str, Any]
) -> Found:
    """What `count` finds for a config and its models' transformers configs, without the counting of all layers."""
    whole = _units(config, model_configs)
    if whole >= MIN_EXTRAPOLATED_UNITS and all(map(_has_identical_layers, model_configs.values())):
        found = [count(*_cut(config, model_configs, whole, units)) for units in UNITS]
        phases = [_extrapolate_phase(each, whole) for each in zip(*(one[1] for one in found), strict=True)]
        numbers = _by_name([one[0] for one in found])
        if all(phases) and all(map(_is_linear, numbers.values())):
            parameters = {name: round(_extrapolate(whole, counts)) for name, counts in numbers.items()}
            return parameters, [phase for phase in phases if phase]
    return count(config, model_configs)


def _units(config: Config, model_configs: dict[str, Any]) -> int:
    """Into how many like parts the models can be cut together, and what they share."""
    shared = (config.ppo.num_shared_layers or 0) if isinstance(config, PPOConfig) else 0
    depths = [_depth(body) for body in model_configs.values()]
    return math.gcd(shared, *depths) if shared < min(depths) else 1


def _depth(body: Any) -> int:
    return int(body.get_text_config().num_hidden_layers)


def _cut(config: Any, model_configs: dict[str, Any], whole: int, units: int) -> tuple[Config, dict[str, Any]]:
    """The config and its models with so many of the `whole` units."""
    if isinstance(config, PPOConfig) and config.ppo.num_shared_layers:
        shared = {"num_shared_layers": config.ppo.num_shared_layers // whole * units}
        config = config.model_copy(update={"ppo": config.ppo.model_copy(update=shared)})
    return config, {key: _shallow(body, _depth(body) // whole * units) for key, body in model_configs.items()}


def _shallow(body: Any, depth: int) -> Any:
    body, whole = deepcopy(body), _depth(body)
    text = body.get_text_config()
    for key, each in _per_layer_lists(text, whole):
        setattr(text, key, each[:depth])
    text.num_hidden_layers = depth
    return body


def _per_layer_lists(text: Any, depth: int) -> list[tuple[str, list[Any]]]:
    return [(key, each) for key, each in vars(text).items() if isinstance(each, list) and len(each) == depth]


def _has_identical_layers(body: Any) -> bool:
    kind: Any = type(body)
    return _layers_identical(kind, body.to_json_string())


@cache
def _layers_identical(kind: Any, body: str) -> bool:
    """Whether each layer has the modules, settings and weights of the first, and the config says no more of one."""
    config = kind.from_dict(json.loads(body))
    text = config.get_text_config()
    if any(one != each[0] for _, each in _per_layer_lists(text, text.num_hidden_layers) for one in each):
        return False
    try:
        first, *others = map(_layer_signature, sharding.decoder_layers(build.backbone_from_config(config)))
    except ValueError:  # a family that is built in another way
        return False
    return all(layer == first for layer in others)


def _layer_signature(layer: nn.Module) -> list[Any]:
    plain = (int, float, str, bool)
    modules = [
        (name, type(each), {key: told for key, told in vars(each).items() if isinstance(told, plain)})
        for name, each in layer.named_modules()
    ]
    for _, _, settings in modules:
        settings.pop("layer_idx", None)
    return [*modules, *((name, weight.shape, weight.dtype) for name, weight in layer.named_parameters())]


def _extrapolate_phase(phases: Sequence[Phase], whole: int) -> Phase | None:
    """A phase at its whole depth, with its fullest moment alone; None where that cannot be told."""
    common = set.intersection(*(set(phase.moments) for phase in phases))
    totals = {moment: [sum(phase.moments[moment].values()) for phase in phases] for moment in common}

    def straight(moment: Any) -> bool:
        return all(map(_is_linear, _by_name([phase.moments[moment] for phase in phases]).values()))

    for number, phase in enumerate(phases):
        if not any(straight(moment) for moment in common if totals[moment][number] == phase.total):
            return None
    fullest = next(filter(straight, sorted(common, key=lambda moment: -_extrapolate(whole, totals[moment]))))
    held = _by_name([phase.moments[fullest] for phase in phases])
    work = [phase.work for phase in phases]
    if not _is_linear(work):
        return None
    moments = {fullest: {kind: round(_extrapolate(whole, counts)) for kind, counts in held.items()}}
    return Phase(phases[0].name, phases[0].rows, moments, _extrapolate(whole, work))


def _by_name(seen: Sequence[Mapping[str, int]]) -> dict[str, list[int]]:
    names = dict.fromkeys(name for each in seen for name in each)
    return {name: [each.get(name, 0) for each in seen] for name in names}


def _extrapolate(units: int, seen: Sequence[float]) -> float:
    """A number where so many units are, on the line through what it was with the last two of UNITS."""
    (_, before, last), (_, low, high) = seen, UNITS
    return last + (last - before) * (units - high) / (high - low)


def _is_linear(seen: Sequence[float]) -> bool:
    """Whether what it was with the first is on that line, too."""
    return math.isclose(_extrapolate(UNITS[0], seen), seen[0], rel_tol=1e-9)


ADAMW_8BIT_NAMES = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")  # what transformers calls it


@dataclass(frozen=True)
class Estimate:
    """Estimate of a stage. `steps` are optimizer steps (sft, reward) or updates (ppo); 1 for an evaluation."""

    config: Config
    mode: str
    parameters: dict[str, int]  # of each model in memory
    remaining: DataSize
    hidden: int
    layers: int
    phases: list[Phase]
    steps: int
    target: Target
    run: Callable[..., Found]  # it once more, with another `count`

    @property
    def lengths(self) -> Lengths:
        return self.remaining.lengths

    @property
    def steps_are(self) -> Certainty:
        """TrainOptions true `steps` is."""
        return self.remaining.how if remaining.steps_go_by_rows(self.config) else "exact"

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)


def estimate_stage(config: Config, chain: ModelResolver, mode: str | None, target: Target) -> Estimate:
    """Estimate a stage per process, in a mode or, if None, that of the config.

    Raises RLHFError as `rlhf check` does, for models and data that are not there or do not fit.
    """
    apart = chain.apart(config) if mode is None else set()
    mode = mode or _mode(config)
    starts = {use.key: chain.start(config, use.key) for use in hardware.models_in_memory(config)}
    first = next(iter(starts.values()))
    rows = chain.remaining(config, first)
    ppo = partial(_ppo, apart=apart)
    estimates: dict[str, Callable[..., Found]] = {"sft": _sft, "reward": _reward, "ppo": ppo}
    if isinstance(config, EvalConfig):
        estimates["eval"] = partial(_eval, prompts=rows.rows, snapshots=chain.snapshots(config))
    model_configs = {key: start.body for key, start in starts.items()}
    run = partial(estimates[config.stage], lengths=rows.lengths, mode=mode, target=target)
    models, phases = extrapolate_depth(partial(run, count=MemoryCounter), config, model_configs)
    text = first.body.get_text_config()
    mode = "full" if isinstance(config, EvalConfig) else mode  # what is evaluated is loaded whole
    return Estimate(
        config, mode, models, rows, text.hidden_size, text.num_hidden_layers, phases,
        _steps(config, rows.rows, target.processes), target, partial(run, config, model_configs),
    )  # fmt: skip


def _mode(config: Config) -> str:
    if isinstance(config, PPOConfig) and config.models.adapters:
        return "one-base"
    return hardware.adapter_kind(config) or "full"


def _sft(
    config: SFTConfig, model_configs: dict[str, Any], lengths: Lengths, mode: str, target: Target, count: Count
) -> Found:
    model = _causal(config, "model.path", model_configs, config.model, count)
    return _trl_stage(config, config.sft, "policy", model, memory.sft, lengths, mode, target, count)


def _reward(
    config: RewardConfig, model_configs: dict[str, Any], lengths: Lengths, mode: str, target: Target, count: Count
) -> Found:
    model = _scorer(config, "model.path", model_configs, config.model, count)
    return _trl_stage(config, config.reward, "reward", model, memory.reward, lengths, mode, target, count)


def _trl_stage(
    config: Any, ours: Any, name: str, model: Any, step: Any, lengths: Lengths, mode: str, target: Target,
    count: Count,
) -> Found:  # fmt: skip
    """A stage of one model that TRL trains; `step` is its function in `memory`."""
    parameters = {name: model.num_parameters()}  # before a mode changes the model
    whole = sum(weight.nbytes for weight in model.parameters())
    how = _how(config, ours, mode, target)
    made = [step(model, ours.per_device_train_batch_size, lengths, ours.gradient_accumulation_steps, how, count)]
    if mode == "qlora":  # the finished model is measured as its readers get it
        made.append(Phase("read again", 0, {"read": {"weights": whole}}))
    return parameters, made


def _ppo(
    config: PPOConfig, model_configs: dict[str, Any], lengths: Lengths, mode: str, target: Target, count: Count,
    *, apart: Collection[str],
) -> Found:  # fmt: skip
    """`apart`: keys of models that are no adapters of the policy's weights, though PPO trains adapters."""
    ppo_setup.check_num_shared_layers(config, model_configs["models.sft"])
    settings, section = target.usable(config.ppo), config.models
    policy = _causal(config, "models.sft", model_configs, section, count)
    made: dict[str, Any] = {"policy": policy, "reference": copy.deepcopy(policy)}
    keys: dict[str, str] = {}
    for use in hardware.models_in_memory(config):
        if use.role in ("value", "reward"):
            name = use.role if use.role not in made else f"{use.role} {use.key}"
            made[name], keys[name] = _scorer(config, use.key, model_configs, section, count), use.key
    value = made.get("value") or forward.ValueHead(policy)
    parameters = {name: model.num_parameters() for name, model in made.items()}
    rewards = {name: model for name, model in made.items() if name.startswith("reward")}
    paths = {reference.key: reference.path for reference in runs.references(config)}
    beside = next((name for name in rewards if "value" in keys and paths[keys[name]] == paths[keys["value"]]), None)
    whole = {name for name, key in keys.items() if key in apart}
    adapters = config.models.adapters or STANDARD
    models = memory.PPOModels(policy, made["reference"], value, rewards, adapters, whole, beside)
    phases = memory.ppo(models, settings, lengths, mode=mode, gpu=target.gpu, processes=target.processes, count=count)
    return parameters, phases


def _eval(
    config: EvalConfig, model_configs: dict[str, Any], lengths: Lengths, mode: str, target: Target, count: Count,
    *, prompts: int, snapshots: int,
) -> Found:  # fmt: skip
    section, ours, uses = config.models, config.eval, hardware.models_in_memory(config)
    policies = {u.key: _causal(config, u.key, model_configs, section, count) for u in uses if u.role == "policy"}
    judges = {u.key: _scorer(config, u.key, model_configs, section, count) for u in uses if u.role == "judge"}
    rounds = (len(policies) + bool(section.base)) * len(ours.modes) + snapshots + max(ours.best_of, default=0)
    phases = memory.evaluation(
        [*policies.values()], [*judges.values()], ours.per_device_batch_size, -(-prompts // target.processes) * rounds,
        lengths, gpu=target.gpu, count=count,
    )  # fmt: skip
    return {key: model.num_parameters() for key, model in {**policies, **judges}.items()}, phases


def _causal(config: Config, key: str, model_configs: dict[str, Any], section: Any, count: Count) -> Any:
    return _built(build.causal_lm_from_config, config, key, model_configs, section, count)


def _scorer(config: Config, key: str, model_configs: dict[str, Any], section: Any, count: Count) -> Any:
    return _built(build.reward_model_from_config, config, key, model_configs, section, count)


def _built(make: Any, config: Config, key: str, model_configs: dict[str, Any], section: Any, count: Count) -> Any:
    with at_location(config.where(key)):
        how = {"dtype": section.dtype, "attn_implementation": section.attn_implementation}
        return make(model_configs[key], **how, device=count.device)


def _how(config: Any, ours: Any, mode: str, target: Target) -> TrainOptions:
    adapters = config.model.adapters or STANDARD
    bf16, in_8_bits = target.computes_in_bf16(ours.bf16), config.trainer.get("optim") in ADAMW_8BIT_NAMES
    return TrainOptions(bf16, ours.gradient_checkpointing, mode, target.gpu, adapters, in_8_bits)


def _steps(config: Config, rows: int, processes: int) -> int:
    if isinstance(config, PPOConfig):
        return ppo_setup.scale_to_world_size(config, processes).ppo.num_updates(max(1, rows))
    if isinstance(config, SFTConfig | RewardConfig):
        return (config.sft if isinstance(config, SFTConfig) else config.reward).steps(max(1, rows), processes)
    return 1
