"""Set-up of `rlhf ppo`: load models, prompts and reward sources, and check that they fit together."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_cli import config as configs
from rlhf_cli import data, runs, system, terminal
from rlhf_cli.config.base import Options
from rlhf_cli.config.ppo import PPOConfig, check_num_shared_layers
from rlhf_cli.config.stages import adapter_kind
from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.errors import RLHFError, at_location, collect_errors, shown
from rlhf_cli.files import files_sha256, json_sha256
from rlhf_cli.http_client import HTTPClient
from rlhf_cli.models import compiled, devices, hub, load, lora, row_trial, save, sharding
from rlhf_cli.models.batch import Prompts, StopTokenId, stop_ids
from rlhf_cli.models.parallel import SINGLE_PROCESS, ProcessGroup
from rlhf_cli.planning import fits
from rlhf_cli.ppo import graph_engine
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.ppo.trainer import PPOTrainer
from rlhf_cli.ppo.vllm_engine import VLLMEngine, VLLMServer
from rlhf_cli.runs.parents import Parent
from rlhf_cli.stages.common import lifecycle, machine, model_loading, reading, scoring
from rlhf_cli.stages.ppo import shared_models

PROBE_ROWS, PROBE_TOKENS = 16, 32  # prompts and response tokens by which each sync of a rollout server is checked


@dataclass(frozen=True)
class PPOComponents:
    """A loaded PPO run. `policy` and `value` are as they are saved: with adapters, the peft models."""

    tokenizer: Any
    stop_token_id: StopTokenId
    prompts: list[data.Prompt]
    eval_prompts: list[data.Prompt]
    trainer: PPOTrainer
    ref_engine: HFEngine
    num_updates: int
    policy: Any
    value: Any  # None without a value model
    base: shared_models.SharedBaseModels | None


def load_components(
    config: PPOConfig, options: Options, parents: Mapping[str, Parent], process_group: ProcessGroup = SINGLE_PROCESS
) -> PPOComponents:
    """Load and check everything a run needs. `config` has the batch sizes of all ranks together.

    Raises RLHFError: C06, C07, C13, D01-D14, T04, T05, M01-M09.
    """
    settings, sft = machine.settings_for_this_machine(config.ppo), parents["models.sft"]
    check_hub_push(config, sft)
    model_loading.check_same_tokenization(config, options, parents)
    reward_fns = shared_models.build_reward_fns(config, options, parents)
    tokenizer = model_loading.load_tokenizer(config, options, sft)
    loading = process_group if settings.fsdp else SINGLE_PROCESS
    start, ref = _load_sft_model(config, options, sft, tokenizer, loading)
    base = shared_models.SharedBaseModels(config, options, sft, start) if config.models.adapters else None
    saved_policy = base.add_adapters(start, sft, "policy") if base else start
    policy = lora.unwrap(saved_policy)
    check_num_shared_layers(config, policy.config)
    row_trial.require_rows_alone(policy, config.where("models.sft"), loading)
    stop_id = stop_token_id(config, tokenizer, sft, policy.get_input_embeddings().weight.shape[0])
    read_prompts = partial(reading.read_prompts, response_length=settings.max_response_length)
    prompts, eval_prompts = read_prompts(config, "data.prompts", tokenizer, policy.config), None
    if "data.eval_prompts" in config.sources():
        eval_prompts = read_prompts(config, "data.eval_prompts", tokenizer, policy.config)
    check_prompt_counts(config, prompts, eval_prompts)
    shared_models.check_reward_columns(config, reward_fns, prompts, eval_prompts)
    policy_text = scoring.PolicyText(sft, tokenizer, stop_id, [*prompts, *(eval_prompts or [])])
    placement = settings.offload, bool(settings.bf16), loading
    cache = shared_models.RewardModelCache(config, options, parents, policy_text, base, *placement)
    cache.check_probes()
    batch_size, pad_id = settings.local_rollout_forward_batch_size, tokenizer.pad_token_id or 0
    sampling: Any = (stop_id, pad_id, settings.temperature, batch_size, settings.bf16)
    engine: Any
    if config.models.server:
        weights = ServerWeights(config, saved_policy, ref, tokenizer)
        engine = server_engine(config, weights, [prompt.ids for prompt in prompts], stop_id, bool(settings.bf16))
    else:
        engine = loading.run_on_main(lambda: engine_class(config, policy))(policy, *sampling)
    num_updates = settings.num_updates(len(prompts))
    saved_value = cache.value_model(policy)
    trainer = PPOTrainer(
        policy,
        ref if settings.offload or settings.fsdp else ref.to(devices.device()),
        lora.unwrap(saved_value),
        shared_models.build_reward_sources(config, reward_fns, cache),
        engine,
        settings,
        weights={name: source.weight for name, source in config.rewards.items()},
        clips={name: source.clip for name, source in config.rewards.items() if source.clip is not None},
        ptx=_read_ptx_pairs(config, tokenizer, policy.config),
        num_updates=num_updates,
        seed=config.seed,
        process_group=process_group,
    )
    if machine.compiles(config, policy):
        terminal.say("ppo      layers and log-probs are compiled in the first update: up to a minute")
        if isinstance(engine, HFEngine):
            engine.compiles = True
        scorers = [model for model, _ in cache.loaded.values()]
        for model in (*trainer.model_runner.trained_backbones, trainer.ref, *scorers):
            compiled.enable(model)
    return PPOComponents(
        tokenizer, stop_id, prompts, eval_prompts or [], trainer, HFEngine(ref, *sampling), num_updates, saved_policy,
        saved_value, base,
    )  # fmt: skip


def engine_class(config: PPOConfig, policy: Any) -> type[HFEngine]:
    """Return the class of models.engine; hf, with a line that says why, for a model that graph cannot sample from."""
    if config.engine_name(gpu=devices.device().type == "cuda") == "hf":
        return HFEngine
    if reason := graph_engine.reason_against(policy):
        terminal.say(f"ppo      models.engine: hf instead of graph for this {policy.config.model_type} model: {reason}")
        return HFEngine
    return graph_engine.GraphEngine


def server_weights_folder(config: PPOConfig, role: str, update: int) -> Path:
    """Return the folder of weights that the rollout server loads: of the "policy" or the "reference"."""
    return config.folder / "engine" / role / f"step_{update:06d}"


@dataclass(frozen=True)
class ServerWeights:
    """Writes the weights that the rollout server loads to RUN/ppo/engine; keeps those of the last three updates."""

    config: PPOConfig
    policy: Any  # with adapters the peft model
    ref: Any
    tokenizer: Any

    def __call__(self, role: str, update: int) -> tuple[str, Path]:
        """Write the weights of the "policy" or the "reference"; return their version and folder.

        A version is the name of one content: run, update and hash.
        """
        sync, folder = self.config.models.server_sync, server_weights_folder(self.config, role, update)

        def write(path: Path) -> None:
            if role == "policy" and sync == "lora":
                save.save_model(self.policy, self.tokenizer, path, "Adapters for a rollout server.")
            elif role == "policy" and lora.is_peft_model(self.policy):
                save.save_untied(lora.merge_and_unload(copy.deepcopy(self.policy)), self.tokenizer, path)
            else:
                save.save_untied(self.policy if role == "policy" else self.ref, self.tokenizer, path)

        path = runs.commit_state(folder.parent, folder.name, write, keep=3).resolve()
        content = files_sha256(sorted(path.glob("*.safetensors")))
        return f"{json_sha256(str(path.parents[1]))[:8]}-{role}-update-{update}-{content[:8]}", path


def server_engine(
    config: PPOConfig, weights: ServerWeights, prompts: list[list[int]], stop_id: StopTokenId, bf16: bool
) -> VLLMEngine:
    """Return the engine of models.engine.vllm. Its probe are some of the run's prompts."""
    section, settings, rows = config.models.server, config.ppo, prompts[:PROBE_ROWS]
    assert section
    text = f"the server at {section.url} generates the responses; `rlhf serve {shown(config.run)} --rollouts`"
    terminal.say(f"ppo      {text} prints its command")
    seeds = tuple(derive_seed(config.seed, "probe", row) for row in range(len(rows)))
    return VLLMEngine(
        VLLMServer(section.url, config.models.server_sync, HTTPClient(section.timeout, section.retries)),
        weights.ref,
        weights,
        replace(Prompts.from_lists(rows), seeds=seeds, response_length=min(PROBE_TOKENS, settings.max_response_length)),
        stop_id,
        weights.tokenizer.pad_token_id or 0,
        settings.temperature,
        bf16,
        settings.max_logprob_gap,
        section.wait,
        max(map(len, prompts)) + settings.max_response_length,
        lambda text: terminal.say(f"ppo      {text}"),
    )


def _load_sft_model(
    config: PPOConfig, options: Options, sft: Parent, tokenizer: Any, loading: ProcessGroup
) -> tuple[Any, Any]:
    """Return the model to train and the reference: two copies, or with adapters one base for both."""
    settings, kind = machine.settings_for_this_machine(config.ppo), adapter_kind(config)
    bf16 = bool(settings.bf16)
    start = model_loading.load_model(
        load.load_causal_lm, config, options, sft, tokenizer, loading, bf16_matrices=bf16 and kind == "lora"
    )
    copied = sharding.clone_sharing_storage if settings.fsdp else copy.deepcopy  # on the CPU: offload keeps it there
    ref = start if kind else copied(start)
    if not settings.fsdp:
        start.to(devices.device())
    if kind == "qlora":
        with at_location(config.where("models.adapters.kind")):
            lora.quantize(start, devices.device(), bf16=bf16)
    return start, ref


def set_rollout_rows(config: PPOConfig, parents: Mapping[str, Parent], components: PPOComponents) -> None:
    """Choose how many responses are generated at a time on a GPU; no token depends on it. Logs the choice.

    By default they are as many as fit, once all models are loaded. `config` has the batch sizes of all ranks together.
    """
    engine, world_size = components.trainer.engine, components.trainer.process_group.world_size
    if config.ppo.local_rollout_forward_batch_size or config.models.server:
        return
    longest = max(len(each.ids) for each in components.prompts)
    episodes = -(-config.ppo.episodes_per_update // world_size)
    fitting = fits.rollout_rows(config, parents, longest, episodes)
    if fitting is None:
        return
    assert isinstance(engine, HFEngine)
    engine.batch_size = fitting.rows
    size = system.format_bytes(fitting.available)
    terminal.say(f"ppo      {fitting.rows} of {episodes} responses are generated at a time: what fits in {size}")


def restore_policy(config: PPOConfig, options: Options, components: PPOComponents, folder: Path) -> None:
    """Load the weights saved in `folder` into the policy, for good. Raises RLHFError M01, M04."""
    components.trainer.engine_has_weights = False
    components.trainer.average = None  # a snapshot has been averaged
    if components.base:
        lora.load_adapter_weights(components.policy, folder)
    else:
        kwargs, parallel = load.load_kwargs(config.models, options.trust_remote_code), components.trainer.parallel
        saved = parallel.loading.load_on_main(lambda empty: load.load_causal_lm(folder, **kwargs, empty=empty))
        parallel.load_full_state_dict(components.trainer.policy, saved.state_dict())


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
    if settings.stop_token_id is None:
        return None if settings.stop_token == "none" else model_loading.stop_token_id(tokenizer, sft, vocab_size)
    for stop in stop_ids(settings.stop_token_id):
        if stop >= vocab_size:
            text, hint = f"ppo.stop_token_id {stop} is not a token of the model", "see the tokenizer's eos_token_id"
            raise RLHFError("C06", text, where=config.where("ppo.stop_token_id"), hint=hint)
    return settings.stop_token_id


def check_hub_push(config: PPOConfig, sft: Parent | None) -> None:
    """Raise RLHFError C17 if ppo.push_to_hub_if_best cannot push, or would push adapters of a local base model."""
    if not (repo := config.ppo.push_to_hub_if_best):
        return
    where = config.where("ppo.push_to_hub_if_best")
    if config.models.adapters and sft and not sft.hub:
        text = f"only adapters would be pushed to {repo}, and their base, models.sft, is a local folder"
        raise RLHFError("C17", text, where=where, hint="remove ppo.push_to_hub_if_best, or models.adapters")
    hub.require_token(repo, where)


# Prompts and ptx rows


def check_prompt_counts(config: PPOConfig, prompts: data.Rows[Any], eval_prompts: data.Rows[Any] | None) -> None:
    """Raise RLHFError D11 or C17 if the prompts make no update, or none after value_only_updates. Warns D13, C14."""
    if eval_prompts is not None:
        data.warn_shared(prompts, eval_prompts, where=config.where("data.eval_prompts"))
    num_updates = config.ppo.num_updates(len(prompts))

    def check_value_only_updates() -> None:
        if problem := config.ppo.value_only_problem(num_updates):
            raise RLHFError("C17", problem[0], where=config.where("ppo.value_only_updates"), hint=problem[1])

    collect_errors(lambda: _check_prompts_per_update(config, prompts), check_value_only_updates)
    lifecycle.warn_long_intervals(config, num_updates)


def _check_prompts_per_update(config: PPOConfig, prompts: data.Rows[Any]) -> None:
    settings, needed = config.ppo, config.ppo.prompts_per_update
    if len(prompts) >= needed:
        return
    product = f"{settings.per_device_train_batch_size} x {settings.gradient_accumulation_steps} episodes"
    product += f" / {settings.num_samples_per_prompt} per prompt" if settings.num_samples_per_prompt > 1 else ""
    text = f"{prompts.source.shown()} has {len(prompts)} usable prompts, fewer than one update takes"
    hint = f"lower ppo.gradient_accumulation_steps or per_device_train_batch_size, or bring {needed} prompts"
    where = config.where("ppo.per_device_train_batch_size")
    raise RLHFError("D11", f"{text} ({product} = {needed})", where=where, hint=hint)


def read_ptx(config: PPOConfig, tokenizer: Any, model_config: Any) -> data.Rows[dict[str, list[int]]]:
    """Read data.ptx_data, which must be set, as rows of `data.sft_rows`.

    Warns D16. Raises RLHFError D01-D10, D12, D14, D16.
    """
    key, max_length = "data.ptx_data", None if model_config is None else load.context_length(model_config)
    hint = f"use a model with a longer context than {max_length} positions, or shorten the rows"
    source, on_long = config.sources()[key], config.data.on_long
    return reading.read_rows(
        config, key, hint, partial(data.sft_rows, source, tokenizer, max_length=max_length, on_long=on_long)
    )


def _read_ptx_pairs(config: PPOConfig, tokenizer: Any, model_config: Any) -> list[tuple[list[int], list[int]]]:
    """Return (prompt ids, completion ids) per row of data.ptx_data; without a prompt, the first token is one."""
    if config.data.ptx_data is None:
        return []
    rows = read_ptx(config, tokenizer, model_config)
    starts = [max(1, row["completion_mask"].index(1)) for row in rows]
    pairs = [(row["input_ids"][:start], row["input_ids"][start:]) for row, start in zip(rows, starts, strict=True)]
    return [pair for pair in pairs if pair[1]]


def describe_batches(config: PPOConfig, prompts: Sequence[data.Prompt], world_size: int = 1) -> str:
    """Return the batch arithmetic as one line; `config` has the batch sizes of all processes together."""
    settings, num_updates = config.ppo, config.ppo.num_updates(len(prompts))
    rows, episodes = settings.per_device_train_batch_size, settings.episodes_per_update
    update = lifecycle.batch_product(rows, settings.gradient_accumulation_steps // world_size, world_size, "episodes")
    epochs, minibatches = settings.num_ppo_epochs, settings.num_mini_batches
    return (
        f"{reading.describe_rows(prompts, 'prompts')}; "
        f"an update: {update}, {settings.num_samples_per_prompt} per prompt; "
        f"{epochs} epochs x {minibatches} minibatches = {epochs * minibatches} optimizer steps; "
        f"in all {num_updates} updates, {num_updates * episodes} episodes"
    )
