"""Reward sources and the value model of a PPO run.

With `models.adapters` they share the SFT model's weights with policy and reference: `stages/common/shared_base.py`.
"""

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_cli import data
from rlhf_cli.config.base import Options
from rlhf_cli.config.machinery.section import Where
from rlhf_cli.config.ppo import PPOConfig, RewardSourceSettings
from rlhf_cli.errors import RLHFError, collect_errors
from rlhf_cli.models import devices, forward, load, row_trial, sharding
from rlhf_cli.models.parallel import SINGLE_PROCESS, ProcessGroup
from rlhf_cli.rewards.function import FunctionReward, RewardContext, RolloutReward, make_reward_fn
from rlhf_cli.rewards.judge import Baseline, JudgeReward, PairwiseScores
from rlhf_cli.rewards.model import EnsembleReward, ModelReward
from rlhf_cli.rewards.signature import RewardFn, check_columns
from rlhf_cli.runs.parents import Parent
from rlhf_cli.stages.common import model_loading, scoring
from rlhf_cli.stages.common.scoring import warn_pad_is_end_token
from rlhf_cli.stages.common.shared_base import SharedBaseModels


@dataclass
class RewardModelCache:
    """The run's reward models; each folder is loaded once, even if several keys name it.

    Of the processes `loading` only the main one reads weights from disk.
    """

    config: PPOConfig
    options: Options
    parents: Mapping[str, Parent]
    policy_text: scoring.PolicyText
    base: SharedBaseModels | None = None
    offload: bool = False
    bf16: bool = False
    loading: ProcessGroup = SINGLE_PROCESS
    loaded: dict[Path, tuple[Any, Any]] = field(default_factory=dict)  # folder -> (model, own tokenizer)

    def reward(self, key: str) -> ModelReward:
        """Return a frozen model as a reward source, on the policy's tokens or its own."""
        settings = self.config.ppo
        model, own_tokenizer = self._load_frozen(key)
        return scoring.build_model_reward(
            self.config,
            key,
            self.policy_text,
            parent=self.parents[key],
            model=model,
            own_tokenizer=own_tokenizer,
            rows=settings.local_rollout_forward_batch_size or settings.per_device_train_batch_size,
            packed=settings.packing,
            offloaded=self.offload,
            bf16=self.bf16,
        )

    def _load(self, key: str, tokenizer: Any, loading: ProcessGroup) -> Any:
        """Load a new copy of a model that reads the tokens of `tokenizer`."""
        parent = self.parents[key]
        if self.base:
            return self.base.load_frozen_scorer(parent, tokenizer, bf16=False)
        model = model_loading.load_model(load.load_reward_model, self.config, self.options, parent, tokenizer, loading)
        row_trial.require_rows_alone(model, self.config.where(key), loading)
        return model

    def _load_frozen(self, key: str) -> tuple[Any, Any]:
        """Return a frozen model and its own tokenizer, None if it reads the policy's tokens."""
        parent = self.parents[key]
        if parent.model in self.loaded:
            return self.loaded[parent.model]

        own_tokenizer = scoring.load_own_tokenizer(self.config, self.options, self.policy_text.sft, parent)
        tokenizer = own_tokenizer or self.policy_text.tokenizer
        loading = SINGLE_PROCESS if self.offload else self.loading
        model = self._load(key, tokenizer, loading).eval().requires_grad_(False)
        if loading.world_size > 1:
            sharding.broadcast_weights(model, devices.device())
        elif not self.offload:
            model.to(devices.device())
        self.loaded[parent.model] = model, own_tokenizer

        warn_pad_is_end_token(model.config, scoring.end_token_ids(tokenizer), self.config.where(key))
        return model, own_tokenizer

    def value_model(self, policy: Any) -> Any:
        """Return the value model of `models.value`, with adapters the peft model; None for `none`."""
        source = self.config.models.value
        if source == "none":
            return None
        if source == "policy_head":
            return forward.ValueHead(policy)

        key = "models.reward" if source == "reward" else "models.value"
        tokenizer = self.policy_text.tokenizer
        if self.base:
            parent = self.parents[key]
            if self.base.own_weights_reason(parent, tokenizer) is None:
                return self.base.load_scorer(parent)
            model, _ = self._load_frozen(key)
            return self.base.add_adapters(model, parent, "value")

        if self.loading.world_size > 1:  # on the CPU: no GPU holds all of a model that is sharded
            return self._load(key, tokenizer, self.loading)
        if source == "reward":
            model, _ = self._load_frozen(key)
            value = copy.deepcopy(model)
        else:
            value = self._load(key, tokenizer, self.loading)
        return value.requires_grad_(True).to(devices.device())

    def check_probes(self) -> None:
        """Raise RLHFError M09 if a reward model no longer gives the scores its stage stored with it."""
        for key, parent in self.parents.items():
            if not parent.manifest.probes:
                continue
            model, _ = self._load_frozen(key)
            with sharding.on_device(model, devices.device()) if self.offload else nullcontext():
                scoring.check_probes(model, parent, where=self.config.where(key))


def build_reward_sources(
    config: PPOConfig, reward_fns: Mapping[str, RewardFn], cache: RewardModelCache
) -> dict[str, RolloutReward]:
    """Build every reward source by name; `reward_fns` are those that read text. Raises as `check_ensembles`."""
    check_ensembles(config, cache.parents)
    sources: dict[str, RolloutReward] = {}
    for name, section in config.rewards.items():
        function = reward_fns.get(name)
        if isinstance(function, PairwiseScores):
            sources[name] = JudgeReward(name, function, cache.policy_text.tokenizer)
        elif function:
            sources[name] = FunctionReward(name, function, cache.policy_text.tokenizer)
        elif keys := _member_keys(name, section, cache.parents, config.where):
            members = {member: cache.reward(key) for member, key in keys.items()}
            sources[name] = EnsembleReward(members, section.combine, section.std_coef)
        else:
            sources[name] = cache.reward(f"rewards.{name}.model")
    return sources


def _member_keys(
    name: str, section: RewardSourceSettings, parents: Mapping[str, Parent], where: Where
) -> dict[str, str]:
    """Return the keys of an ensemble's models by member: those of `models`, or of a reward stage with members.

    The first of the latter is `model` itself. Raises RLHFError C17 if `combine` has no effect on one model.
    """
    prefix = f"rewards.{name}.models."
    keys = {key.removeprefix(prefix): key for key in parents if key.startswith(prefix)}
    if keys and section.model:
        return {"1": f"rewards.{name}.model", **keys}
    if not keys and not section.is_default("combine"):
        text = f"rewards.{name}.combine has no effect: its model is no ensemble"
        raise RLHFError("C17", text, where=where(f"rewards.{name}.combine"), hint="remove it, or set reward.ensemble")
    return keys


def check_ensembles(config: PPOConfig, parents: Mapping[str, Parent]) -> None:
    """Raise RLHFError C17 for each key that has no effect, because no source or this one is no ensemble."""
    checks: list[Callable[[], object]] = []
    for name, source in config.rewards.items():
        if f"rewards.{name}.model" in parents:
            checks.append(partial(_member_keys, name, source, parents, config.where))
    checks.append(partial(_check_disagreement, config, parents))
    collect_errors(*checks)


def _check_disagreement(config: PPOConfig, parents: Mapping[str, Parent]) -> None:
    """Raise RLHFError C17 if the watchdog shall watch the disagreement of models, and each source has one."""
    watchdog = config.ppo.watchdog
    if any(".models." in key for key in parents) or not watchdog:
        return
    has_action = "disagreement" in watchdog.actions
    if has_action or not watchdog.is_default("disagreement"):
        key = f"ppo.watchdog.{'actions.' if has_action else ''}disagreement"
        text = f"{key} has no effect without an ensemble in rewards"
        raise RLHFError("C17", text, where=config.where(key), hint="remove it, or set reward.ensemble")


def set_baseline(sources: Mapping[str, RolloutReward], baseline: Baseline) -> None:
    """Give the judges among the sources the answers to compare responses with."""
    for source in sources.values():
        if isinstance(source, JudgeReward):
            source.function.baseline = baseline


def build_reward_fns(
    config: PPOConfig, options: Options, parents: Mapping[str, Parent], *, load_models: bool = True
) -> dict[str, RewardFn]:
    """Build the reward sources that read text, by name; without `load_models` they are only validated.

    A source whose model is not among `parents` is skipped. Raises RLHFError with the problems of all sources: C01,
    C05-C07, C17, and M01, M03, M07, M08 of a model.
    """
    reward_fns: dict[str, RewardFn] = {}

    def build(name: str) -> None:
        section = config.rewards[name]
        key = f"rewards.{name}"
        model = parents.get(f"{key}.pipeline")
        if section.pipeline and model is None:
            return
        context = RewardContext(
            config.file.parent,
            lambda option: config.where(f"{key}.{option}"),
            name=name,
            run=Path(config.run),
            model=model.model if model else None,
            trust_remote_code=options.trust_remote_code,
            load=load_models,
        )
        reward_fns[name] = make_reward_fn(section.kind, section, context)

    names = [name for name, section in config.rewards.items() if section.kind not in ("model", "models")]
    collect_errors(*(partial(build, name) for name in names))
    return reward_fns


def check_reward_columns(
    config: PPOConfig, reward_fns: Mapping[str, RewardFn], *rows: data.Rows[data.Prompt] | None
) -> None:
    """Check the columns that reward functions name, in all rows of prompts. Raises RLHFError D02, D06, D12."""
    for prompts in rows:
        if prompts is not None:
            source = prompts.source.shown()
            check_columns(reward_fns, prompts, source, lambda name: config.where(f"rewards.{name}"))
