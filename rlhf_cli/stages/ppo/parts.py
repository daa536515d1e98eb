"""What a PPO run is made of: four models, prompts, reward sources, and the checks that they fit together."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlhf_cli import checkpoints, data
from rlhf_cli.checkpoints import Parent
from rlhf_cli.config import Options, PPOConfig
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import loading, reading, tokenizers
from rlhf_cli.ppo.records import Rollout
from rlhf_cli.ppo.rewards import FunctionReward, ModelReward, RewardSource, load_function
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.ppo.trainer import PPOTrainer

PROBE_TOLERANCE = 1e-3  # float32; another padding moves a score by about 1e-6


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
    """Load all that the run needs, checks first. Raises RLHFError: T04, T05, M01-M03, M09, D01-D05."""
    settings, sft = config.ppo, parents["models.sft"]
    tokenizer = tokenizers.load_tokenizer(sft.model, trust_remote_code=options.trust_remote_code)
    check_tokenizers(parents, config, trust_remote_code=options.trust_remote_code)
    stop_token_id = settings.stop_token_id
    if stop_token_id is None and settings.stop_token != "none":
        stop_token_id = data.stop_token_id(tokenizer)
    prompts, eval_prompts = (_prompts(config, key, tokenizer) for key in ("prompts", "eval_prompts"))

    def scorer(key: str) -> Any:
        return loading.load_scorer(parents[key].model, **_how(config, options)).to(loading.device())

    policy = loading.load_causal(sft.model, **_how(config, options)).to(loading.device())
    _check_context(config, policy, prompts + eval_prompts)
    reward = scorer("models.reward").eval().requires_grad_(False) if "models.reward" in parents else None
    value = copy.deepcopy(reward) if config.models.value == "reward" else scorer("models.value")
    if reward is not None:
        check_probes(reward, parents["models.reward"], where=config.where("models.reward"))
    sources: dict[str, RewardSource] = {}
    for name, spec in (config.rewards or {"reward": None}).items():
        if spec is not None and spec.function:
            where = config.where(f"rewards.{name}.function")
            sources[name] = FunctionReward(name, load_function(spec.function, folder=config.file.parent, where=where), tokenizer)
        else:
            model = scorer(f"rewards.{name}.model").eval().requires_grad_(False) if spec is not None and spec.model else reward
            sources[name] = ModelReward(model, settings.local_rollout_forward_batch_size or settings.per_device_train_batch_size)
    engine = HFEngine(
        policy, stop_token_id, tokenizer.pad_token_id or 0, settings.temperature, settings.local_rollout_forward_batch_size
    )
    updates = settings.num_updates(len(prompts))
    trainer = PPOTrainer(
        policy, copy.deepcopy(policy), value, sources, engine, settings, num_updates=updates, seed=config.seed,
        weights={name: config.rewards[name].weight for name in config.rewards} or None,
    )  # fmt: skip
    return Parts(tokenizer, stop_token_id, prompts, eval_prompts, trainer, updates)


def _how(config: PPOConfig, options: Options) -> dict[str, Any]:
    models = config.models
    return {"dtype": models.dtype, "attn_implementation": models.attn_implementation, "trust_remote_code": options.trust_remote_code}


def _prompts(config: PPOConfig, key: str, tokenizer: Any) -> list[data.Prompt]:
    path = getattr(config.data, key)
    if path is None:
        return []
    return data.prompt_rows(Path(path), tokenizer, columns=config.data.columns, max_length=None, where=config.where(f"data.{key}"))


def check_tokenizers(parents: Mapping[str, Parent], config: Any, *, trust_remote_code: bool) -> None:
    """Refuse parents that read text in another way than the SFT checkpoint (T04, T05)."""
    foreign = {}
    for key, parent in parents.items():
        if parent.stage == checkpoints.FOREIGN:
            tokenizer = tokenizers.load_tokenizer(parent.model, trust_remote_code=trust_remote_code)
            foreign[key] = {
                "tokenizer_sha256": tokenizers.tokenizer_sha256(tokenizer), "template_sha256": tokenizers.template_sha256(tokenizer)
            }  # fmt: skip
    first = parents["models.sft"]
    for key, parent in parents.items():
        if parent is not first:
            checkpoints.check_same_tokenizer(first, parent, where=config.where(key), foreign=foreign)


def _check_context(config: PPOConfig, policy: Any, prompts: list[data.Prompt]) -> None:
    """The longest prompt and the longest response must fit the model's context together (C13)."""
    context = getattr(policy.config.get_text_config(), "max_position_embeddings", None)
    longest, response = max(len(prompt.ids) for prompt in prompts), config.ppo.max_response_length
    if context is not None and longest + response > context:
        raise RLHFError(
            "C13",
            f"longest prompt ({longest}) + response_length ({response}) = {longest + response} tokens > the model's context of {context}",
            where=config.where("ppo.response_length"),
            hint=f"lower ppo.response_length by {longest + response - context}, or shorten the prompts",
        )


def check_probes(model: Any, parent: Parent, *, where: str) -> None:
    """The reward model must give the scores that its stage stored with it, read in PPO's own way (M09)."""
    probes = parent.manifest.get("probes", [])
    if not probes:
        return
    rollout = Rollout.from_lists([probe["prompt_ids"] for probe in probes], [probe["response_ids"] for probe in probes])
    device = next(model.parameters()).device
    rollout = Rollout(*(tensor.to(device) for tensor in (rollout.ids, rollout.mask, rollout.response_mask, rollout.ended)))
    scores = reading.rollout_scores(model, rollout, max_rows=len(probes))
    stored = torch.tensor([probe["score"] for probe in probes], device=device)
    off = ((scores - stored).abs() > PROBE_TOLERANCE).nonzero()[:, 0].tolist()
    if off:
        rows = ", ".join(f"row {row}: {scores[row]:.4f}, stored {stored[row]:.4f}" for row in off[:3])
        raise RLHFError(
            "M09",
            f"{len(off)} of {len(probes)} held-out rows get another score than the reward stage stored ({rows}); nothing was trained",
            where=where,
            hint=f"run the reward stage again: {checkpoints.shown(parent.path)} or a library under it changed",
        )
