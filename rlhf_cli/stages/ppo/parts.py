"""What a PPO run is made of: four models, prompts, reward sources, and the checks that they fit together."""

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlhf_cli import data
from rlhf_cli.checkpoints import Parent
from rlhf_cli.config import Options, PPOConfig
from rlhf_cli.inputs import machine, models, one_base
from rlhf_cli.inputs import ppo as inputs
from rlhf_cli.inputs.one_base import OneBase
from rlhf_cli.models import adapters, devices, loading, offload, reading
from rlhf_cli.models.parallel import SINGLE_PROCESS, ProcessGroup
from rlhf_cli.ppo.rewards import EnsembleReward, FunctionReward, ModelReward, RewardSource, TextReward
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.ppo.trainer import PPOTrainer


@dataclass(frozen=True)
class Parts:
    """The loaded run. `policy` and `value` are the trainer's as they are saved: adapters are, in peft's models."""

    tokenizer: Any
    stop_token_id: int | None
    prompts: list[data.Prompt]
    eval_prompts: list[data.Prompt]
    trainer: PPOTrainer
    ref_engine: HFEngine
    updates: int
    policy: Any
    value: Any
    base: OneBase | None


def load(
    config: PPOConfig, options: Options, parents: Mapping[str, Parent], process_group: ProcessGroup = SINGLE_PROCESS
) -> Parts:
    """Load all that the run needs, checks first. `config` has the batch sizes of all processes.

    Raises RLHFError: C06, C07, C13, D01-D14, T04, T05, M01-M09.
    """
    settings, sft = machine.usable_here(config.ppo), parents["models.sft"]
    inputs.require_hub(config, sft)
    models.check_alike(config, options, parents)
    texts = inputs.text_rewards(config, options, parents)
    tokenizer = models.tokenizer(config, options, sft)
    start = models.causal(config, options, sft, tokenizer)
    ref = start if config.models.adapters else copy.deepcopy(start)  # with offload, a GPU never holds it for long
    if not settings.fsdp:
        start.to(devices.device())
    base = one_base.of(config, options, sft, start)
    saved_policy = base.policy() if base else start
    policy = adapters.inside(saved_policy)
    inputs.check_layers(config, policy.config)
    stop_token_id = inputs.stop_token(config, tokenizer, policy.get_input_embeddings().weight.shape[0])
    prompts = inputs.read(config, "prompts", tokenizer, policy.config)
    held_out = "data.eval_prompts" in config.sources()
    eval_prompts = inputs.read(config, "eval_prompts", tokenizer, policy.config) if held_out else None
    inputs.check_rows(config, prompts, eval_prompts)
    writing = models.Writing(sft, tokenizer, stop_token_id, [*prompts, *(eval_prompts or [])])
    scorers = Scorers(config, options, parents, writing, base, settings.offload, settings.fsdp)
    for key, parent in parents.items():
        if parent.manifest.get("probes"):
            model = scorers.frozen(key)
            with offload.visiting(model, devices.device()) if settings.offload else nullcontext():
                models.check_probes(model, parent, where=config.where(key))
    batch = settings.local_rollout_forward_batch_size
    pad = tokenizer.pad_token_id or 0
    engine = HFEngine(policy, stop_token_id, pad, settings.temperature, batch, bf16=settings.bf16)
    updates = settings.num_updates(len(prompts))
    saved_value = scorers.value(policy)
    trainer = PPOTrainer(
        policy,
        ref if settings.offload or settings.fsdp else ref.to(devices.device()),
        adapters.inside(saved_value),
        sources(config, texts, scorers),
        engine,
        settings,
        weights={name: source.weight for name, source in config.rewards.items()},
        clips={name: source.clip for name, source in config.rewards.items() if source.clip is not None},
        ptx=_ptx(config, tokenizer, policy.config),
        num_updates=updates,
        seed=config.seed,
        process_group=process_group,
    )
    ref_engine = replace(engine, model=ref)
    return Parts(
        tokenizer,
        stop_token_id,
        prompts,
        eval_prompts or [],
        trainer,
        ref_engine,
        updates,
        saved_policy,
        saved_value,
        base,
    )


def restore(config: PPOConfig, options: Options, parts: Parts, folder: Path) -> None:
    """Give the policy the weights that it was saved with in a folder. Raises RLHFError M01, M04."""
    if parts.base:
        adapters.take_over(parts.policy, folder)
    else:
        kept = loading.load_causal(folder, **loading.how(config.models, options.trust_remote_code))
        parts.trainer.parallel.load_full_state_dict(parts.trainer.policy, kept.state_dict())


@dataclass
class Scorers:
    """The run's reward models: each folder is loaded once, however many keys name it."""

    config: PPOConfig
    options: Options
    parents: Mapping[str, Parent]
    writing: models.Writing
    base: OneBase | None = None
    offload: bool = False
    fsdp: bool = False
    loaded: dict[Path, tuple[Any, Any]] = field(default_factory=dict)

    def load(self, key: str, theirs: Any = None) -> Any:
        """A model of one's own, that reads the policy's tokens unless it has a tokenizer of its own (`theirs`)."""
        tokenizer = theirs or self.writing.tokenizer
        if self.base:
            return one_base.reward(self.base, self.parents[key], tokenizer)
        return models.scorer(self.config, self.options, self.parents[key], tokenizer)

    def frozen(self, key: str) -> Any:
        """A model that is only read."""
        return self._read(key)[0]

    def reward(self, key: str) -> ModelReward:
        """A frozen model as a source, on the policy's tokens or on its own."""
        ours = self.config.ppo
        rows = ours.local_rollout_forward_batch_size or ours.per_device_train_batch_size
        return models.reward(
            self.config, key, self.writing, *self._read(key), rows=rows, packed=ours.packing, offloaded=self.offload
        )

    def _read(self, key: str) -> tuple[Any, Any]:
        """A frozen model, and its tokenizer where it is not the policy's."""
        parent = self.parents[key]
        if parent.model not in self.loaded:
            theirs = models.own_tokenizer(self.config, self.options, self.writing.sft, parent)
            model = self.load(key, theirs).eval().requires_grad_(False)
            if not self.offload:
                model.to(devices.device())
            self.loaded[parent.model] = model, theirs
            stop = data.stop_token_id(theirs) if theirs else self.writing.stop_token_id
            inputs.warn_pad(model.config, stop, self.config.where(key))
        return self.loaded[parent.model]

    def value(self, policy: Any) -> Any:
        """The value model, made as models.value says; with adapters peft's."""
        wish = self.config.models.value
        if wish == "policy_head":
            return reading.ValueHead(policy)
        key = "models.reward" if wish == "reward" else "models.value"
        if self.base:
            parent = self.parents[key]
            apart = self.base.apart(parent, self.writing.tokenizer)
            return self.base.beside(self.frozen(key), parent) if apart else self.base.scorer(parent)
        made = copy.deepcopy(self.frozen(key)).requires_grad_(True) if wish == "reward" else self.load(key)
        return made if self.fsdp else made.to(devices.device())


def _ptx(config: PPOConfig, tokenizer: Any, body: Any) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, completion ids) of each row of data.ptx_data; a text without prompt starts from its first token."""
    if config.data.ptx_data is None:
        return []
    rows = inputs.read_ptx(config, tokenizer, body)
    starts = [max(1, row["completion_mask"].index(1)) for row in rows]
    pairs = [(row["input_ids"][:start], row["input_ids"][start:]) for row, start in zip(rows, starts, strict=True)]
    return [pair for pair in pairs if pair[1]]


def sources(config: PPOConfig, texts: Mapping[str, TextReward], scorers: Scorers) -> dict[str, RewardSource]:
    """Every source of reward by name: `texts` are those that read text."""
    found: dict[str, RewardSource] = {}
    for name, source in config.rewards.items():
        if name in texts:
            found[name] = FunctionReward(name, texts[name], scorers.writing.tokenizer)
        elif source.models:
            members = {member: scorers.reward(f"rewards.{name}.models.{member}") for member in source.models}
            found[name] = EnsembleReward(members, source.combine, source.std_coef)
        else:
            found[name] = scorers.reward(f"rewards.{name}.model")
    return found
