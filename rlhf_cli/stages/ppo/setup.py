"""Set-up of `rlhf ppo`: load models, prompts and reward sources, and check that they fit together."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_cli import config as configs
from rlhf_cli import data, terminal
from rlhf_cli.config.base import Options
from rlhf_cli.config.ppo import PPOConfig, check_num_shared_layers
from rlhf_cli.errors import RLHFError, at_location
from rlhf_cli.models import compiled, devices, hub, load, lora, row_trial, sharding
from rlhf_cli.models.batch import StopTokenId, stop_ids
from rlhf_cli.models.initial import check_initial, find_initial
from rlhf_cli.models.parallel import SINGLE_PROCESS, ProcessGroup
from rlhf_cli.ppo.rollout import HFEngine, RolloutEngine
from rlhf_cli.ppo.trainer import PPOTrainer
from rlhf_cli.runs.parents import Parent
from rlhf_cli.stages.common import engines, machine, model_loading, scoring
from rlhf_cli.stages.common.shared_base import SharedBaseModels
from rlhf_cli.stages.ppo import prompt_rows, reward_sources, rollout_engine, sft_answers
from rlhf_cli.stages.ppo.sft_answers import SFTAnswers


@dataclass(frozen=True)
class PPOComponents:
    """A loaded PPO run. `policy` and `value` are as they are saved: with adapters, the peft models."""

    tokenizer: Any
    stop_token_id: StopTokenId
    prompts: data.Rows[data.Prompt]
    eval_prompts: list[data.Prompt]
    trainer: PPOTrainer
    ref_engine: HFEngine
    num_updates: int
    policy: Any
    value: Any  # None without a value model
    base: SharedBaseModels | None


@dataclass(frozen=True)
class PolicyModels:
    """The model to train and the reference: models.policy and models.sft, or with adapters one base for both."""

    saved: Any  # as the policy is saved: with adapters, the peft model
    policy: Any  # the plain model inside
    ref: Any
    base: SharedBaseModels | None  # with adapters


def load_components(
    config: PPOConfig,
    options: Options,
    parents: Mapping[str, Parent],
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> PPOComponents:
    """Load and check everything a run needs. `config` has the batch sizes of all ranks together.

    Raises RLHFError: C06, C07, C13, D01-D14, T04, T05, M01-M09.
    """
    sft = parents["models.sft"]
    settings = machine.settings_for_this_machine(config.ppo)
    loading = process_group if settings.fsdp else SINGLE_PROCESS

    # What is checked before a model is loaded.
    check_hub_push(config, sft)
    model_loading.check_same_tokenization(config, options, parents)
    check_initial(config, options, parents)
    reward_fns = reward_sources.build_reward_fns(config, options, parents)

    # Policy and reference.
    tokenizer = model_loading.load_tokenizer(config, options, sft)
    models = _load_policy_models(config, options, parents, tokenizer, loading)
    model_config = models.policy.config
    vocab_size = models.policy.get_input_embeddings().weight.shape[0]
    stop_id = stop_token_id(config, tokenizer, sft, vocab_size)

    # Prompts.
    prompts, eval_prompts = prompt_rows.read_train_and_eval(config, tokenizer, model_config)
    reward_sources.check_reward_columns(config, reward_fns, prompts, eval_prompts)

    # Reward and value models.
    cache = reward_sources.RewardModelCache(
        config,
        options,
        parents,
        policy_text=scoring.PolicyText(sft, tokenizer, stop_id, [*prompts, *(eval_prompts or [])]),
        base=models.base,
        offload=settings.offload,
        bf16=bool(settings.bf16),
        loading=loading,
    )
    cache.check_probes()

    # Engine and trainer.
    drawing = rollout_engine.drawing(settings, tokenizer, stop_id)
    engine: RolloutEngine
    if config.models.server:
        weights = rollout_engine.PolicyWeights(config, models.saved, models.ref, tokenizer)
        prompt_ids = [prompt.ids for prompt in prompts]
        engine = rollout_engine.server_engine(config, weights, prompt_ids, drawing, process_group)
    else:
        engine = rollout_engine.local_engine(config, models.policy, drawing, loading)
    num_updates = settings.num_updates(len(prompts))
    value = cache.value_model(models.policy)
    if not settings.offload and not settings.fsdp:
        models.ref.to(devices.device())
    trainer = PPOTrainer(
        models.policy,
        models.ref,
        lora.unwrap(value),
        rewards=reward_sources.build_reward_sources(config, reward_fns, cache),
        engine=engine,
        settings=settings,
        weights={name: source.weight for name, source in config.rewards.items()},
        clips={name: source.clip for name, source in config.rewards.items() if source.clip is not None},
        ptx=prompt_rows.read_ptx_pairs(config, tokenizer, model_config),
        num_updates=num_updates,
        seed=config.seed,
        process_group=process_group,
    )
    ref_engine = engines.local_engine(HFEngine, models.ref, drawing)
    if config.reward_judges:
        answers = SFTAnswers(config.folder / sft_answers.FILE, trainer, ref_engine, tokenizer)
        reward_sources.set_baseline(trainer.rewards, answers)
    if machine.compiles(config, models.policy):
        _compile(trainer, scorers=[model for model, _ in cache.loaded.values()])

    return PPOComponents(
        tokenizer=tokenizer,
        stop_token_id=stop_id,
        prompts=prompts,
        eval_prompts=eval_prompts or [],
        trainer=trainer,
        ref_engine=ref_engine,
        num_updates=num_updates,
        policy=models.saved,
        value=value,
        base=models.base,
    )


def _load_policy_models(
    config: PPOConfig,
    options: Options,
    parents: Mapping[str, Parent],
    tokenizer: Any,
    loading: ProcessGroup,
) -> PolicyModels:
    """Load models.sft as the reference, and the policy: a copy of it, or models.policy; or their adapters.

    Raises RLHFError C06, C07, C17, M01-M08.
    """
    sft = parents["models.sft"]
    initial = find_initial(config, parents)
    settings = machine.settings_for_this_machine(config.ppo)
    adapters = config.models.adapters
    bf16 = bool(settings.bf16)
    start = model_loading.load_model(
        load.load_causal_lm,
        config,
        options,
        sft,
        tokenizer,
        loading,
        bf16_matrices=bf16 and adapters is not None and adapters.kind == "lora",
    )
    if adapters:
        ref = start
    elif initial:
        ref = start
        start = model_loading.load_model(load.load_causal_lm, config, options, initial, tokenizer, loading)
    elif settings.fsdp:
        ref = sharding.clone_sharing_storage(start)
    else:
        ref = copy.deepcopy(start)  # on the CPU: offload keeps it there

    if not settings.fsdp:
        start.to(devices.device())
    if adapters and adapters.kind == "qlora":
        with at_location(config.where("models.adapters.kind")):
            lora.quantize(start, devices.device(), bf16=bf16)

    base = None
    saved = start
    if adapters:
        base = SharedBaseModels(config, options, sft, start)
        saved = base.add_adapters(start, sft, "policy")
        if initial:
            lora.load_adapter_weights(saved, initial.model)
    policy = lora.unwrap(saved)
    check_num_shared_layers(config, policy.config)
    _check_shared_layers(config, policy, ref)
    row_trial.require_rows_alone(policy, config.where("models.sft"), loading)
    return PolicyModels(saved, policy, ref, base)


def _check_shared_layers(config: PPOConfig, policy: Any, ref: Any) -> None:
    """Raise RLHFError C17 if models.policy has changed layers that ppo.num_shared_layers shares with models.sft."""
    if not (config.models.policy and config.ppo.num_shared_layers):
        return
    try:
        sharding.layers_to_share(policy, ref, config.ppo.num_shared_layers)
    except ValueError as error:
        hint = "remove ppo.num_shared_layers, or lower it to that of the policy's own training"
        raise RLHFError("C17", f"models.policy: {error}", where=config.where("models.policy"), hint=hint) from error


def _compile(trainer: PPOTrainer, scorers: list[Any]) -> None:
    """Compile the layers of all models, and the arithmetic of sampling, when they are first used."""
    terminal.say("ppo      layers and log-probs are compiled in the first update: up to a minute")
    if isinstance(trainer.engine, HFEngine):
        trainer.engine.compiles = True
    for model in (*trainer.model_runner.trained_backbones, trainer.ref, *scorers):
        compiled.enable(model)


def restore_policy(config: PPOConfig, options: Options, components: PPOComponents, folder: Path) -> None:
    """Load the weights saved in `folder` into the policy, for good. Raises RLHFError M01, M04."""
    trainer = components.trainer
    trainer.engine_is_current = False
    trainer.weight_average = None  # a snapshot has been averaged
    if components.base:
        lora.load_adapter_weights(components.policy, folder)
        return
    kwargs = load.load_kwargs(config.models, options.trust_remote_code)
    saved = trainer.parallel.loading.load_on_main(lambda empty: load.load_causal_lm(folder, **kwargs, empty=empty))
    trainer.parallel.load_full_state_dict(trainer.policy, saved.state_dict())


# Config


def load_run_config(folder: Path) -> PPOConfig:
    """Load the resolved config of a PPO run's folder. Raises RLHFError as `config.load` does.

    Reward functions are imported from the folder of the config that started the run, which is the run's folder unless
    `run:` is set.
    """
    config = configs.load("ppo", folder / "config.yaml")
    config._origin = replace(config._origin, file=folder.resolve().parent / "ppo.yaml")
    return config


def stop_token_id(config: PPOConfig, tokenizer: Any, sft: Parent, vocab_size: int) -> StopTokenId:
    """Return the ids that end a response. Raises RLHFError C06 if one exceeds the vocabulary."""
    settings = config.ppo
    if settings.stop_token == "none":
        return None
    if settings.stop_token_id is None:
        return model_loading.stop_token_id(tokenizer, sft, vocab_size)
    for stop in stop_ids(settings.stop_token_id):
        if stop >= vocab_size:
            text = f"ppo.stop_token_id {stop} is not a token of the model"
            hint = "see the tokenizer's eos_token_id"
            raise RLHFError("C06", text, where=config.where("ppo.stop_token_id"), hint=hint)
    return settings.stop_token_id


def check_hub_push(config: PPOConfig, sft: Parent | None) -> None:
    """Raise RLHFError C17 if ppo.push_to_hub_if_best cannot push, or would push adapters of a local base model."""
    repo = config.ppo.push_to_hub_if_best
    if not repo:
        return
    where = config.where("ppo.push_to_hub_if_best")
    if config.models.adapters and sft and not sft.hub:
        text = f"only adapters would be pushed to {repo}, and their base, models.sft, is a local folder"
        raise RLHFError("C17", text, where=where, hint="remove ppo.push_to_hub_if_best, or models.adapters")
    hub.require_token(repo, where)
