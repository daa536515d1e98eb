"""Models and reward sources of a PPO run.

With `models.adapters`, policy, reference, reward and value model share the SFT model's weights. They are four separate
models with their own modules over the same tensors; only adapters and heads differ. No adapter is switched on or off,
so a layer recomputed in the backward pass uses the same adapter as in the forward pass.
"""

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlhf_cli import data, runs, system, terminal
from rlhf_cli.config.base import Options
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.sft import SFTConfig
from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.errors import RLHFError, at_location, collect_errors
from rlhf_cli.models import build, devices, forward, load, lora, row_trial, sharding, tokenizers
from rlhf_cli.models.parallel import SINGLE_PROCESS, ProcessGroup
from rlhf_cli.rewards.function import FunctionReward, RewardContext, RewardSource, make_reward_fn
from rlhf_cli.rewards.model import EnsembleReward, ModelReward
from rlhf_cli.rewards.signature import RewardFn, check_columns
from rlhf_cli.runs.parents import Parent
from rlhf_cli.stages.common import model_loading, scoring


@dataclass(frozen=True)
class SharedBaseModels:
    """The SFT model, which is also the reference, and constructors of the models that share its weights.

    They return peft models, for `save.save_model`; PPO works with the plain model inside, `get_base_model()`.
    """

    config: PPOConfig | EvalConfig | SFTConfig
    options: Options
    sft: Parent
    model: Any

    def own_weights_reason(self, parent: Parent, tokenizer: Any) -> str | None:
        """Return why a reward or value model needs its own weights, None if it can share these.

        `tokenizer` is the one it reads. A pad token added by its training is no reason: no text contains it.
        """
        if parent.base is None:
            return "a full model"
        if not runs.is_adapter_of(parent, self.sft):
            return "an adapter of other weights than models.sft's"
        try:
            tokenizers.check_vocabulary(self.model, tokenizer)
        except RLHFError:
            return "an adapter with additional tokens"
        return None

    def load_frozen_scorer(self, parent: Parent, tokenizer: Any, *, bf16: bool) -> Any:
        """Return a frozen reward model that reads the tokens of `tokenizer`, on the shared weights if it can.

        PPO prints why it needs its own weights. Raises RLHFError M01-M03, M06-M08.
        """
        reason = self.own_weights_reason(parent, tokenizer)
        if reason is None:
            return self.load_scorer(parent).get_base_model().requires_grad_(False).eval()
        options = self.config, self.options, parent, tokenizer
        model = model_loading.load_model(load.load_reward_model, *options, bf16_matrices=bf16)
        row_trial.require_rows_alone(model, self.config.where(parent.key))
        if self.config.stage == "ppo":
            size = system.format_bytes(sum(weight.nbytes for weight in model.parameters()))
            hint = "an adapter of models.sft (reward.yaml: model.adapters) would need next to nothing"
            terminal.say(f"ppo      {parent.key} is {reason}: {size} of additional memory; {hint}")
        return model_loading.place_frozen(model, bf16=bf16)

    def load_policy(self, parent: Parent) -> Any:
        """Load a policy's adapter onto the shared weights; return the plain model. Raises RLHFError M01."""
        with at_location(self.config.where(parent.key)):
            model_config = load.read_config(parent.model, self.options.trust_remote_code)
            return self._load_adapter(sharding.clone_sharing_weights(self.model), parent, model_config).get_base_model()

    def load_scorer(self, parent: Parent) -> Any:
        """Load a reward or value model's adapter and head onto the shared weights. Raises RLHFError M01-M03."""
        with at_location(self.config.where(parent.key)):
            model_config = load.read_reward_model_config(parent.model, self.options.trust_remote_code)
            # Float32, since bfloat16 loses small updates. No random numbers are drawn for it.
            width = self.model.get_output_embeddings().weight.shape[1]
            head = nn.utils.skip_init(nn.Linear, width, 1, bias=False, dtype=torch.float32)
            nn.init.zeros_(head.weight)
            model = load.reward_model_from_backbone(sharding.clone_sharing_weights(self.model), head)
            return self._load_adapter(model, parent, model_config)

    def _load_adapter(self, model: Any, parent: Parent, model_config: Any) -> Any:
        base = self.sft.hub or self.sft.model
        return lora.load_adapter(model, parent.model, model_config, base, self.sft.revision).to(devices.device())

    def value_from_head(self, policy: Any, head: nn.Linear) -> Any:
        """Return the policy's value head as a separate model with the policy's adapters, for saving."""
        model = load.reward_model_from_backbone(sharding.clone_sharing_weights(self.model), head)
        value = self.add_adapters(model, self.sft, "value")
        lora.copy_adapter_weights(policy, value)
        return value

    def add_adapters(self, model: Any, base: Parent, role: str) -> Any:
        """Return a model that shares the weights of `model`, loaded from `base`, with new trainable adapters.

        They initially change nothing, and their values depend only on the seed and the role. Raises RLHFError C07.
        """
        assert isinstance(self.config, PPOConfig) and self.config.models.adapters
        adapters, key = self.config.models.adapters, "models.adapters"
        if role == "policy":
            lora.check_adapters(self.config, model.config)
        with at_location(self.config.where(f"{key}.target_modules")), torch.random.fork_rng(devices=[]):
            torch.random.default_generator.manual_seed(derive_seed(self.config.seed, f"adapters of the {role}"))
            adapted = lora.add_adapters(
                sharding.clone_sharing_weights(model), adapters, vocab_size=0, base=base.hub or base.model,
                revision=base.revision, device=devices.device(), bf16=False, key=key,
            )  # fmt: skip
        return adapted.to(devices.device())


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
        rows = settings.local_rollout_forward_batch_size or settings.per_device_train_batch_size
        options = {"packed": settings.packing, "offloaded": self.offload, "bf16": self.bf16}
        return scoring.build_model_reward(
            self.config, key, self.policy_text, self.parents[key], *self._load_frozen(key), rows=rows, **options
        )

    def _load(self, key: str, tokenizer: Any, loading: ProcessGroup) -> Any:
        """Load a new copy of a model that reads the tokens of `tokenizer`."""
        if self.base:
            return self.base.load_frozen_scorer(self.parents[key], tokenizer, bf16=False)
        parent = self.parents[key]
        model = model_loading.load_model(load.load_reward_model, self.config, self.options, parent, tokenizer, loading)
        row_trial.require_rows_alone(model, self.config.where(key), loading)
        return model

    def _load_frozen(self, key: str) -> tuple[Any, Any]:
        """Return a frozen model and its own tokenizer, None if it reads the policy's tokens."""
        parent = self.parents[key]
        if parent.model not in self.loaded:
            own_tokenizer = scoring.load_own_tokenizer(self.config, self.options, self.policy_text.sft, parent)
            loading = SINGLE_PROCESS if self.offload else self.loading
            model = self._load(key, own_tokenizer or self.policy_text.tokenizer, loading).eval().requires_grad_(False)
            if loading.world_size > 1:
                sharding.broadcast_weights(model, devices.device())
            elif not self.offload:
                model.to(devices.device())
            self.loaded[parent.model] = model, own_tokenizer
            end = scoring.end_token_ids(own_tokenizer or self.policy_text.tokenizer)
            warn_pad_is_end_token(model.config, end, self.config.where(key))
        return self.loaded[parent.model]

    def value_model(self, policy: Any) -> Any:
        """Return the value model of `models.value`, with adapters the peft model; None for `none`."""
        source, tokenizer = self.config.models.value, self.policy_text.tokenizer
        if source == "none":
            return None
        if source == "policy_head":
            return forward.ValueHead(policy)
        key = "models.reward" if source == "reward" else "models.value"
        if self.base:
            parent = self.parents[key]
            if self.base.own_weights_reason(parent, tokenizer):
                return self.base.add_adapters(self._load_frozen(key)[0], parent, "value")
            return self.base.load_scorer(parent)
        if self.loading.world_size > 1:  # on the CPU: no GPU holds all of a model that is sharded
            return self._load(key, tokenizer, self.loading)
        copied = copy.deepcopy(self._load_frozen(key)[0]) if source == "reward" else None
        return (copied or self._load(key, tokenizer, self.loading)).requires_grad_(True).to(devices.device())

    def check_probes(self) -> None:
        """Raise RLHFError M09 if a reward model no longer gives the scores its stage stored with it."""
        for key, parent in self.parents.items():
            if parent.manifest.probes:
                model, _ = self._load_frozen(key)
                with sharding.on_device(model, devices.device()) if self.offload else nullcontext():
                    scoring.check_probes(model, parent, where=self.config.where(key))


def warn_pad_is_end_token(model_config: Any, end_token_ids: tuple[int, ...], where: str) -> None:
    """Warn (T01) if an external reward model's pad token is also the (first) token that ends its training pairs."""
    if (build.pad_token_id(model_config),) == end_token_ids[:1]:
        text = "the reward model's pad token is its EOS: scores are read at the token before it, as in its training"
        terminal.warn("T01", text, where=where)


def build_reward_sources(
    config: PPOConfig, reward_fns: Mapping[str, RewardFn], cache: RewardModelCache
) -> dict[str, RewardSource]:
    """Build every reward source by name; `reward_fns` are those that read text."""
    sources: dict[str, RewardSource] = {}
    for name, section in config.rewards.items():
        if name in reward_fns:
            sources[name] = FunctionReward(name, reward_fns[name], cache.policy_text.tokenizer)
        elif section.models:
            members = {member: cache.reward(f"rewards.{name}.models.{member}") for member in section.models}
            sources[name] = EnsembleReward(members, section.combine, section.std_coef)
        else:
            sources[name] = cache.reward(f"rewards.{name}.model")
    return sources


def build_reward_fns(
    config: PPOConfig, options: Options, parents: Mapping[str, Parent], *, load_models: bool = True
) -> dict[str, RewardFn]:
    """Build the reward sources that read text, by name; without `load_models` they are only validated.

    A source whose model is not among `parents` is skipped. Raises RLHFError with the problems of all sources: C01,
    C05-C07, C17, and M01, M03, M07, M08 of a model.
    """
    reward_fns: dict[str, RewardFn] = {}

    def build(name: str) -> None:
        section, key = config.rewards[name], f"rewards.{name}"
        model = parents.get(f"{key}.pipeline")
        if not section.pipeline or model:
            context = RewardContext(
                config.file.parent,
                lambda option: config.where(f"{key}.{option}"),
                model.model if model else None,
                options.trust_remote_code,
                load_models,
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
