"""What a PPO run is made of: four models, prompts, reward sources, and the checks that they fit together."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rlhf_cli import checkpoints, data, terminal
from rlhf_cli.checkpoints import Parent
from rlhf_cli.config import Options, PPOConfig
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import loading, reading, tokenizers
from rlhf_cli.ppo.records import Rollout
from rlhf_cli.ppo.rewards import FunctionReward, ModelReward, RewardSource, load_function
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.ppo.trainer import PPOTrainer

# Another padding moves a score by about 1e-6 in float32; in bfloat16, with deviation 1, by some hundredths.
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}


@dataclass(frozen=True)
class Parts:
    """The loaded run."""

    tokenizer: Any
    stop_token_id: int | None
    prompts: list[data.Prompt]
    eval_prompts: list[data.Prompt]
    trainer: PPOTrainer
    updates: int


def load(config: PPOConfig, options: Options, parents: Mapping[str, Parent]) -> Parts:
    """Load all that the run needs, checks first. Raises RLHFError: C13, D01-D14, T04, T05, M01-M09."""
    settings, sft = config.ppo, parents["models.sft"]
    tokenizers.check_alike(parents, config.where, trust_remote_code=options.trust_remote_code)
    tokenizer = tokenizers.load_tokenizer(sft.model, trust_remote_code=options.trust_remote_code)
    stop_token_id = settings.stop_token_id
    if stop_token_id is None and settings.stop_token != "none":
        stop_token_id = data.stop_token_id(tokenizer)
    policy = loading.load_causal(sft.model, **loading.how(config.models, options.trust_remote_code)).to(
        loading.device()
    )
    prompts, eval_prompts = (_prompts(config, key, tokenizer, policy) for key in ("prompts", "eval_prompts"))
    scorers = _Scorers(config, options, parents, stop_token_id)
    for key, parent in parents.items():
        if parent.manifest.get("probes"):
            check_probes(scorers.frozen(key), parent, where=config.where(key))
    if stop_token_id is not None and stop_token_id >= policy.get_input_embeddings().weight.shape[0]:
        text = f"ppo.stop_token_id {stop_token_id} is no token of the model"
        raise RLHFError("C06", text, where=config.where("ppo.stop_token_id"), hint="see the tokenizer's eos_token_id")
    batch = settings.local_rollout_forward_batch_size
    engine = HFEngine(policy, stop_token_id, tokenizer.pad_token_id or 0, settings.temperature, batch)
    updates = settings.num_updates(len(prompts))
    trainer = PPOTrainer(
        policy,
        copy.deepcopy(policy),
        scorers.value(tokenizer.pad_token_id),
        _sources(config, tokenizer, scorers),
        engine,
        settings,
        weights={name: source.weight for name, source in config.rewards.items()},
        num_updates=updates,
        seed=config.seed,
    )
    return Parts(tokenizer, stop_token_id, prompts, eval_prompts, trainer, updates)


@dataclass
class _Scorers:
    """The run's reward models: each folder is loaded once, however many keys name it."""

    config: PPOConfig
    options: Options
    parents: Mapping[str, Parent]
    stop_token_id: int | None
    loaded: dict[Path, Any] = field(default_factory=dict)

    def load(self, key: str) -> Any:
        """A model of one's own."""
        return loading.load_scorer(
            self.parents[key].model, **loading.how(self.config.models, self.options.trust_remote_code)
        ).to(loading.device())

    def frozen(self, key: str) -> Any:
        """A model that is only read."""
        folder = self.parents[key].model
        if folder not in self.loaded:
            model = self.load(key).eval().requires_grad_(False)
            self.loaded[folder] = model
            if model.config.pad_token_id == self.stop_token_id:
                text = "the reward model's pad token ends a text: it is read at the token before, as it was trained"
                terminal.warn("T01", text, where=self.config.where(key))
        return self.loaded[folder]

    def value(self, pad_token_id: int | None) -> Any:
        """The value model, made as models.value says."""
        if self.config.models.value == "reward":
            return copy.deepcopy(self.frozen("models.reward"))
        if self.config.models.value != "policy_head":
            return self.load("models.value")
        how = loading.how(self.config.models, self.options.trust_remote_code)
        model = loading.value_from_causal(self.parents["models.sft"].model, **how)
        model.config.pad_token_id = pad_token_id
        return model.to(loading.device())


def _sources(config: PPOConfig, tokenizer: Any, scorers: _Scorers) -> dict[str, RewardSource]:
    rows = config.ppo.local_rollout_forward_batch_size or config.ppo.per_device_train_batch_size
    sources: dict[str, RewardSource] = {}
    for name, source in config.rewards.items():
        key = f"rewards.{name}"
        if source.function:
            function = load_function(source.function, folder=config.file.parent, where=config.where(f"{key}.function"))
            sources[name] = FunctionReward(name, function, tokenizer)
        else:
            sources[name] = ModelReward(scorers.frozen(f"{key}.model"), rows)
    return sources


def _prompts(config: PPOConfig, key: str, tokenizer: Any, policy: Any) -> list[data.Prompt]:
    """The prompts that leave room for a response in the model's context (C13 where none could)."""
    source = config.sources().get(f"data.{key}")
    if source is None:
        return []
    room = loading.prompt_room(policy.config, config.ppo.max_response_length, config.where("ppo.response_length"))
    return data.prompt_rows(source, tokenizer, max_length=room, on_long=config.data.on_long)


def check_probes(model: Any, parent: Parent, *, where: str) -> None:
    """The reward model must give the scores that its stage stored with it, read in PPO's own way (M09)."""
    probes = parent.manifest["probes"]
    rollout = Rollout.from_lists([probe["prompt_ids"] for probe in probes], [probe["response_ids"] for probe in probes])
    scores = reading.rollout_scores(model, rollout.to(model.device), max_rows=len(probes)).cpu()
    stored = torch.tensor([probe["score"] for probe in probes])
    off = ((scores - stored).abs() > PROBE_TOLERANCE[model.dtype]).nonzero()[:, 0].tolist()
    if off:
        rows = ", ".join(f"row {row}: {scores[row]:.4f}, stored {stored[row]:.4f}" for row in off[:3])
        raise RLHFError(
            "M09",
            f"{len(off)} of {len(probes)} held-out rows get another score than the reward stage stored ({rows}); "
            "nothing was trained",
            where=where,
            hint=f"run the reward stage again: {checkpoints.shown(parent.path)} or a library under it changed",
        )
