"""Set-up of `rlhf ppo`: load models, prompts and reward sources, and check that they fit together."""

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlhf_cli import config as configs
from rlhf_cli import data, terminal
from rlhf_cli.config.base import Options
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.errors import RLHFError, collect_errors
from rlhf_cli.models import devices, forward, hub, load, lora, sharding
from rlhf_cli.models.parallel import SINGLE_PROCESS, ProcessGroup
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.ppo.trainer import PPOTrainer
from rlhf_cli.rewards import source as rewards_source
from rlhf_cli.rewards.function import FunctionReward
from rlhf_cli.rewards.model import EnsembleReward, ModelReward
from rlhf_cli.rewards.source import RewardFn, RewardSource
from rlhf_cli.runs.parents import Parent
from rlhf_cli.stages import hardware, setup, shared_base
from rlhf_cli.stages.shared_base import SharedBaseModels


@dataclass(frozen=True)
class PPOComponents:
    """A loaded PPO run. `policy` and `value` are as they are saved: with adapters, the peft models."""

    tokenizer: Any
    stop_token_id: int | None
    prompts: list[data.Prompt]
    eval_prompts: list[data.Prompt]
    trainer: PPOTrainer
    ref_engine: HFEngine
    num_updates: int
    policy: Any
    value: Any
    base: SharedBaseModels | None


def load_components(
    config: PPOConfig, options: Options, parents: Mapping[str, Parent], process_group: ProcessGroup = SINGLE_PROCESS
) -> PPOComponents:
    """Load and check everything a run needs. `config` has the batch sizes of all ranks together.

    Raises RLHFError: C06, C07, C13, D01-D14, T04, T05, M01-M09.
    """
    settings, sft = hardware.settings_for_this_machine(config.ppo), parents["models.sft"]
    check_hub_push(config, sft)
    setup.check_same_tokenization(config, options, parents)
    reward_fns = build_reward_fns(config, options, parents)
    tokenizer = setup.load_tokenizer(config, options, sft)
    start = setup.load_causal_lm(config, options, sft, tokenizer)
    ref = start if config.models.adapters else copy.deepcopy(start)  # copied on the CPU: offload keeps it off the GPU
    if not settings.fsdp:
        start.to(devices.device())
    base = shared_base.build_shared_base(config, options, sft, start)
    saved_policy = base.make_policy() if base else start
    policy = lora.unwrap(saved_policy)
    check_num_shared_layers(config, policy.config)
    stop_id = stop_token_id(config, tokenizer, policy.get_input_embeddings().weight.shape[0])
    prompts = read_prompts(config, "prompts", tokenizer, policy.config)
    has_eval = "data.eval_prompts" in config.sources()
    eval_prompts = read_prompts(config, "eval_prompts", tokenizer, policy.config) if has_eval else None
    check_prompt_counts(config, prompts, eval_prompts)
    policy_text = setup.PolicyText(sft, tokenizer, stop_id, [*prompts, *(eval_prompts or [])])
    cache = RewardModelCache(config, options, parents, policy_text, base, settings.offload, settings.fsdp)
    cache.check_probes()
    batch_size, pad_id = settings.local_rollout_forward_batch_size, tokenizer.pad_token_id or 0
    engine = HFEngine(policy, stop_id, pad_id, settings.temperature, batch_size, bf16=settings.bf16)
    num_updates = settings.num_updates(len(prompts))
    saved_value = cache.value_model(policy)
    trainer = PPOTrainer(
        policy,
        ref if settings.offload or settings.fsdp else ref.to(devices.device()),
        lora.unwrap(saved_value),
        build_reward_sources(config, reward_fns, cache),
        engine,
        settings,
        weights={name: source.weight for name, source in config.rewards.items()},
        clips={name: source.clip for name, source in config.rewards.items() if source.clip is not None},
        ptx=_read_ptx_pairs(config, tokenizer, policy.config),
        num_updates=num_updates,
        seed=config.seed,
        process_group=process_group,
    )
    return PPOComponents(
        tokenizer,
        stop_id,
        prompts,
        eval_prompts or [],
        trainer,
        replace(engine, model=ref),
        num_updates,
        saved_policy,
        saved_value,
        base,
    )


def restore_policy(config: PPOConfig, options: Options, components: PPOComponents, folder: Path) -> None:
    """Load the weights saved in `folder` into the policy. Raises RLHFError M01, M04."""
    if components.base:
        lora.load_adapter_weights(components.policy, folder)
    else:
        saved = load.load_causal_lm(folder, **load.load_kwargs(config.models, options.trust_remote_code))
        components.trainer.parallel.load_full_state_dict(components.trainer.policy, saved.state_dict())


# Reward and value models


@dataclass
class RewardModelCache:
    """The run's reward models; each folder is loaded once, even if several keys name it."""

    config: PPOConfig
    options: Options
    parents: Mapping[str, Parent]
    policy_text: setup.PolicyText
    base: SharedBaseModels | None = None
    offload: bool = False
    fsdp: bool = False
    loaded: dict[Path, tuple[Any, Any]] = field(default_factory=dict)  # folder -> (model, own tokenizer)

    def load(self, key: str, own_tokenizer: Any = None) -> Any:
        """Load a new copy of a model. `own_tokenizer`: the one it reads if that is not the policy's."""
        tokenizer = own_tokenizer or self.policy_text.tokenizer
        if self.base:
            return shared_base.load_reward_model(self.base, self.parents[key], tokenizer)
        return setup.load_reward_model(self.config, self.options, self.parents[key], tokenizer)

    def frozen_model(self, key: str) -> Any:
        """Return a cached model that is not trained."""
        return self._load_frozen(key)[0]

    def reward(self, key: str) -> ModelReward:
        """Return a frozen model as a reward source, on the policy's tokens or its own."""
        settings = self.config.ppo
        rows = settings.local_rollout_forward_batch_size or settings.per_device_train_batch_size
        model, own_tokenizer = self._load_frozen(key)
        return setup.build_model_reward(
            self.config,
            key,
            self.policy_text,
            model,
            own_tokenizer,
            rows=rows,
            packed=settings.packing,
            offloaded=self.offload,
        )

    def _load_frozen(self, key: str) -> tuple[Any, Any]:
        """Return a frozen model and its own tokenizer, None if it reads the policy's tokens."""
        parent = self.parents[key]
        if parent.model not in self.loaded:
            own_tokenizer = setup.load_own_tokenizer(self.config, self.options, self.policy_text.sft, parent)
            model = self.load(key, own_tokenizer).eval().requires_grad_(False)
            if not self.offload:
                model.to(devices.device())
            self.loaded[parent.model] = model, own_tokenizer
            stop_id = data.stop_token_id(own_tokenizer) if own_tokenizer else self.policy_text.stop_token_id
            warn_pad_is_stop_token(model.config, stop_id, self.config.where(key))
        return self.loaded[parent.model]

    def value_model(self, policy: Any) -> Any:
        """Return the value model of `models.value`; with adapters the peft model."""
        source = self.config.models.value
        if source == "policy_head":
            return forward.ValueHead(policy)
        key = "models.reward" if source == "reward" else "models.value"
        if self.base:
            parent = self.parents[key]
            if self.base.own_weights_reason(parent, self.policy_text.tokenizer):
                return self.base.value_from_reward_model(self.frozen_model(key), parent)
            return self.base.load_scorer(parent)
        copied = source == "reward"
        model = copy.deepcopy(self.frozen_model(key)).requires_grad_(True) if copied else self.load(key)
        return model if self.fsdp else model.to(devices.device())

    def check_probes(self) -> None:
        """Raise RLHFError M09 if a reward model no longer gives the scores its stage stored with it."""
        for key, parent in self.parents.items():
            if parent.manifest.get("probes"):
                model = self.frozen_model(key)
                with sharding.on_device(model, devices.device()) if self.offload else nullcontext():
                    setup.check_probes(model, parent, where=self.config.where(key))


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
            context = rewards_source.RewardContext(
                config.file.parent,
                lambda option: config.where(f"{key}.{option}"),
                model.model if model else None,
                options.trust_remote_code,
                load_models,
            )
            reward_fns[name] = rewards_source.make_reward_fn(section.kind, section, context)

    names = [name for name, section in config.rewards.items() if section.kind not in ("model", "models")]
    collect_errors(*(partial(build, name) for name in names))
    return reward_fns


def warn_pad_is_stop_token(model_config: Any, stop_id: int | None, where: str) -> None:
    """Warn (T01) if an external reward model's pad token is also its stop token."""
    if stop_id is not None and model_config.pad_token_id == stop_id:
        text = "the reward model's pad token ends a text: it is read at the token before, as it was trained"
        terminal.warn("T01", text, where=where)


# Config and prompts


def load_run_config(folder: Path) -> PPOConfig:
    """Load the resolved config of a PPO run's folder. Raises RLHFError as `config.load` does.

    Reward functions are imported from the folder of the config that started the run, which is the run's folder unless
    `run:` is set.
    """
    config = configs.load("ppo", folder / "config.yaml")
    config._origin = replace(config._origin, file=folder.resolve().parent / "ppo.yaml")
    return config


def scale_to_world_size(config: PPOConfig, world_size: int) -> PPOConfig:
    """Multiply the batch sizes by the number of processes. Raises RLHFError C06 if they conflict with other keys."""
    if world_size == 1:
        return config
    try:
        return config.model_copy(update={"ppo": config.ppo.across(world_size)})
    except ValidationError as error:
        text = f"in {world_size} processes: {error.errors()[0]['msg']}"
        raise RLHFError("C06", text, where=config.where("ppo"), hint="smaller batches, or fewer processes") from error


def stop_token_id(config: PPOConfig, tokenizer: Any, vocab_size: int) -> int | None:
    """Return the id that ends a response, None without one. Raises RLHFError C06 if it exceeds the vocabulary."""
    settings = config.ppo
    if settings.stop_token_id is None:
        return data.stop_token_id(tokenizer) if settings.stop_token != "none" else None
    if settings.stop_token_id >= vocab_size:
        text = f"ppo.stop_token_id {settings.stop_token_id} is no token of the model"
        raise RLHFError("C06", text, where=config.where("ppo.stop_token_id"), hint="see the tokenizer's eos_token_id")
    return settings.stop_token_id


def read_prompts(
    config: PPOConfig, key: str, tokenizer: Any, model_config: Any, *, sample: int | None = None
) -> data.Rows[data.Prompt]:
    """Read data.prompts or data.eval_prompts, keeping prompts that leave room for a response in the model's context.

    Of more than `sample` rows only a sample is read. `model_config` None: unknown context. Warns D16. Raises RLHFError
    C13 if no prompt can fit, D01-D14, D16.
    """
    max_length, response_length = None, config.ppo.max_response_length
    if model_config is not None:
        max_length = load.max_prompt_tokens(model_config, response_length, config.where("ppo.response_length"))
    source, on_long = config.sources()[f"data.{key}"], config.data.on_long
    read = partial(data.prompt_rows, source, tokenizer, max_length=max_length, on_long=on_long, sample=sample)
    return setup.read_rows(config, f"data.{key}", setup.longer_prompts_hint("ppo", max_length, response_length), read)


def read_ptx(config: PPOConfig, tokenizer: Any, model_config: Any) -> data.Rows[dict[str, list[int]]]:
    """Read data.ptx_data, which must be set, as rows of `data.sft_rows`.

    Warns D16. Raises RLHFError D01-D10, D12, D14, D16.
    """
    key, max_length = "data.ptx_data", None if model_config is None else load.context_length(model_config)
    remedy = f"take a model with a longer context than {max_length} positions, or shorten the rows"
    source, on_long = config.sources()[key], config.data.on_long
    return setup.read_rows(
        config, key, remedy, partial(data.sft_rows, source, tokenizer, max_length=max_length, on_long=on_long)
    )


def _read_ptx_pairs(config: PPOConfig, tokenizer: Any, model_config: Any) -> list[tuple[list[int], list[int]]]:
    """Return (prompt ids, completion ids) per row of data.ptx_data; without a prompt, the first token is one."""
    if config.data.ptx_data is None:
        return []
    rows = read_ptx(config, tokenizer, model_config)
    starts = [max(1, row["completion_mask"].index(1)) for row in rows]
    pairs = [(row["input_ids"][:start], row["input_ids"][start:]) for row, start in zip(rows, starts, strict=True)]
    return [pair for pair in pairs if pair[1]]


def check_num_shared_layers(config: PPOConfig, model_config: Any) -> None:
    """Raise RLHFError C06 if ppo.num_shared_layers leaves no layer to train."""
    count, layers = config.ppo.num_shared_layers or 0, model_config.get_text_config().num_hidden_layers
    if count >= layers:
        text = f"ppo.num_shared_layers {count} of {layers} layers leaves none to train"
        hint = f"set it to {layers - 1} at most" if layers > 1 else "leave it out"
        raise RLHFError("C06", text, where=config.where("ppo.num_shared_layers"), hint=hint)


def check_hub_push(config: PPOConfig, sft: Parent | None) -> None:
    """Raise RLHFError C17 if ppo.push_to_hub_if_best cannot push, or would push adapters of a local base model."""
    if not (repo := config.ppo.push_to_hub_if_best):
        return
    where = config.where("ppo.push_to_hub_if_best")
    if config.models.adapters and sft and not sft.hub:
        text = f"adapters alone would be pushed to {repo}, and their base, models.sft, is a folder here"
        raise RLHFError("C17", text, where=where, hint="take ppo.push_to_hub_if_best out, or models.adapters")
    hub.require_token(repo, where)


def check_prompt_counts(config: PPOConfig, prompts: data.Rows[Any], eval_prompts: data.Rows[Any] | None) -> None:
    """Raise RLHFError D11 or C17 if the prompts make no update, or none after value_only_updates. Warns D13, C14."""
    if eval_prompts is not None:
        data.warn_shared(prompts, eval_prompts, where=config.where("data.eval_prompts"))
    num_updates = config.ppo.num_updates(len(prompts))
    collect_errors(
        lambda: setup.check_prompt_count(config, prompts), lambda: _check_value_only_updates(config, num_updates)
    )
    setup.warn_long_intervals(config, num_updates)


def _check_value_only_updates(config: PPOConfig, num_updates: int) -> None:
    if problem := config.ppo.value_only_problem(num_updates):
        text, hint = problem
        raise RLHFError("C17", text, where=config.where("ppo.value_only_updates"), hint=hint)


def describe_batches(config: PPOConfig, prompts: Sequence[data.Prompt], world_size: int = 1) -> str:
    """Return the batch arithmetic as one line; `config` has the batch sizes of all processes together."""
    settings, num_updates = config.ppo, config.ppo.num_updates(len(prompts))
    rows, episodes = settings.per_device_train_batch_size, settings.episodes_per_update
    update = setup.batch_product(rows, settings.gradient_accumulation_steps // world_size, world_size, "episodes")
    epochs, minibatches = settings.num_ppo_epochs, settings.num_mini_batches
    return (
        f"{setup.describe_rows(prompts, 'prompts')}; "
        f"an update: {update}, {settings.num_samples_per_prompt} per prompt; "
        f"{epochs} epochs x {minibatches} minibatches = {epochs * minibatches} optimizer steps; "
        f"in all {num_updates} updates, {num_updates * episodes} episodes"
    )
