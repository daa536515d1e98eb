"""The estimate of one stage: its models built without content, and its phases counted on them."""

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlhf_cli import checkpoints
from rlhf_cli.config import Config, EvalConfig, PPOConfig, RewardConfig, SFTConfig
from rlhf_cli.errors import placed
from rlhf_cli.inputs import machine
from rlhf_cli.models import build, forward
from rlhf_cli.plan import depth, memory, remaining
from rlhf_cli.plan.chain import Chain
from rlhf_cli.plan.depth import Found
from rlhf_cli.plan.ghosts import Lengths
from rlhf_cli.plan.memory import Count, How, Phase
from rlhf_cli.plan.modes import STANDARD
from rlhf_cli.plan.remaining import How as HowTrue
from rlhf_cli.plan.remaining import Remaining
from rlhf_cli.plan.tally import Tally
from rlhf_cli.plan.target import Target
from rlhf_cli.stages import ppo_setup

EIGHT_BITS = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")  # what transformers calls it


@dataclass(frozen=True)
class Estimate:
    """What a stage takes. `steps` are optimizer steps (sft, reward) or updates (ppo); 1 for an evaluation."""

    config: Config
    mode: str
    parameters: dict[str, int]  # of each model in memory
    remaining: Remaining
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
    def steps_are(self) -> HowTrue:
        """How true `steps` is."""
        return self.remaining.how if remaining.steps_go_by_rows(self.config) else "exact"

    @property
    def fullest(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)


def of(config: Config, chain: Chain, mode: str | None, target: Target) -> Estimate:
    """An estimate in a mode; None: as the config says. Of several processes what each of them takes.

    Raises RLHFError as `rlhf check` does, for models and data that are not there or do not fit.
    """
    apart = chain.apart(config) if mode is None else set()
    mode = mode or _mode(config)
    starts = {use.key: chain.start(config, use.key) for use in machine.uses(config)}
    first = next(iter(starts.values()))
    rows = chain.remaining(config, first)
    ppo = partial(_ppo, apart=apart)
    estimates: dict[str, Callable[..., Found]] = {"sft": _sft, "reward": _reward, "ppo": ppo}
    if isinstance(config, EvalConfig):
        estimates["eval"] = partial(_eval, prompts=rows.rows, snapshots=chain.snapshots(config))
    bodies = {key: start.body for key, start in starts.items()}
    run = partial(estimates[config.stage], lengths=rows.lengths, mode=mode, target=target)
    models, phases = depth.of(partial(run, count=Tally), config, bodies)
    text = first.body.get_text_config()
    mode = "full" if isinstance(config, EvalConfig) else mode  # what is evaluated is loaded whole
    return Estimate(
        config, mode, models, rows, text.hidden_size, text.num_hidden_layers, phases,
        _steps(config, rows.rows, target.processes), target, partial(run, config, bodies),
    )  # fmt: skip


def _mode(config: Config) -> str:
    if isinstance(config, PPOConfig) and config.models.adapters:
        return "one-base"
    return machine.adapters_of(config) or "full"


def _sft(config: SFTConfig, bodies: dict[str, Any], lengths: Lengths, mode: str, target: Target, count: Count) -> Found:
    model = _causal(config, "model.path", bodies, config.model, count)
    return _by_trl(config, config.sft, "policy", model, memory.sft, lengths, mode, target, count)


def _reward(
    config: RewardConfig, bodies: dict[str, Any], lengths: Lengths, mode: str, target: Target, count: Count
) -> Found:
    model = _scorer(config, "model.path", bodies, config.model, count)
    return _by_trl(config, config.reward, "reward", model, memory.reward, lengths, mode, target, count)


def _by_trl(
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
    config: PPOConfig, bodies: dict[str, Any], lengths: Lengths, mode: str, target: Target, count: Count,
    *, apart: Collection[str],
) -> Found:  # fmt: skip
    """`apart`: keys of models that are no adapters of the policy's weights, though PPO trains adapters."""
    ppo_setup.check_num_shared_layers(config, bodies["models.sft"])
    settings, section = target.usable(config.ppo), config.models
    policy = _causal(config, "models.sft", bodies, section, count)
    made: dict[str, Any] = {"policy": policy, "reference": copy.deepcopy(policy)}
    keys: dict[str, str] = {}
    for use in machine.uses(config):
        if use.role in ("value", "reward"):
            name = use.role if use.role not in made else f"{use.role} {use.key}"
            made[name], keys[name] = _scorer(config, use.key, bodies, section, count), use.key
    value = made.get("value") or forward.ValueHead(policy)
    parameters = {name: model.num_parameters() for name, model in made.items()}
    rewards = {name: model for name, model in made.items() if name.startswith("reward")}
    paths = {reference.key: reference.path for reference in checkpoints.references(config)}
    beside = next((name for name in rewards if "value" in keys and paths[keys[name]] == paths[keys["value"]]), None)
    whole = {name for name, key in keys.items() if key in apart}
    adapters = config.models.adapters or STANDARD
    models = memory.Trained(policy, made["reference"], value, rewards, adapters, whole, beside)
    phases = memory.ppo(models, settings, lengths, mode=mode, gpu=target.gpu, processes=target.processes, count=count)
    return parameters, phases


def _eval(
    config: EvalConfig, bodies: dict[str, Any], lengths: Lengths, mode: str, target: Target, count: Count,
    *, prompts: int, snapshots: int,
) -> Found:  # fmt: skip
    section, ours, uses = config.models, config.eval, machine.uses(config)
    policies = {u.key: _causal(config, u.key, bodies, section, count) for u in uses if u.role == "policy"}
    judges = {u.key: _scorer(config, u.key, bodies, section, count) for u in uses if u.role == "judge"}
    rounds = (len(policies) + bool(section.base)) * len(ours.modes) + snapshots + max(ours.best_of, default=0)
    phases = memory.evaluation(
        [*policies.values()], [*judges.values()], ours.per_device_batch_size, -(-prompts // target.processes) * rounds,
        lengths, gpu=target.gpu, count=count,
    )  # fmt: skip
    return {key: model.num_parameters() for key, model in {**policies, **judges}.items()}, phases


def _causal(config: Config, key: str, bodies: dict[str, Any], section: Any, count: Count) -> Any:
    return _built(build.causal_lm_from_config, config, key, bodies, section, count)


def _scorer(config: Config, key: str, bodies: dict[str, Any], section: Any, count: Count) -> Any:
    return _built(build.reward_model_from_config, config, key, bodies, section, count)


def _built(make: Any, config: Config, key: str, bodies: dict[str, Any], section: Any, count: Count) -> Any:
    with placed(config.where(key)):
        how = {"dtype": section.dtype, "attn_implementation": section.attn_implementation}
        return make(bodies[key], **how, device=count.device)


def _how(config: Any, ours: Any, mode: str, target: Target) -> How:
    adapters = config.model.adapters or STANDARD
    bf16, in_8_bits = target.computes_in_bf16(ours.bf16), config.trainer.get("optim") in EIGHT_BITS
    return How(bf16, ours.gradient_checkpointing, mode, target.gpu, adapters, in_8_bits)


def _steps(config: Config, rows: int, processes: int) -> int:
    if isinstance(config, PPOConfig):
        return ppo_setup.scale_to_world_size(config, processes).ppo.num_updates(max(1, rows))
    if isinstance(config, SFTConfig | RewardConfig):
        return (config.sft if isinstance(config, SFTConfig) else config.reward).steps(max(1, rows), processes)
    return 1
