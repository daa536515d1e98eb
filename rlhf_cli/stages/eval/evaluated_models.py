"""The policies and judges of an evaluation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_cli import config as configs
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.ppo import RewardSourceSettings
from rlhf_cli.evaluation.responses import SnapshotSeries
from rlhf_cli.models import devices, interpolation, load, lora, row_trial
from rlhf_cli.rewards.function import score_texts
from rlhf_cli.rewards.model import EnsembleReward, ModelReward, RewardModels
from rlhf_cli.rewards.signature import RewardFn, TextRows
from rlhf_cli.runs.parents import Parent
from rlhf_cli.runs.resolve import other_member_keys
from rlhf_cli.stages.common import lifecycle, model_loading, scoring
from rlhf_cli.stages.common.shared_base import SharedBaseModels

JudgeFn = Callable[[TextRows], list[float]]


@dataclass(frozen=True)
class EvaluatedPolicy:
    """A policy that answers the prompts: its name in the report, and its model."""

    name: str
    parent: Parent
    modes: Sequence[str] = ("sampled",)
    step: int | None = None  # number of PPO updates, for a policy on the frontier
    share: float | None = None  # of the way from SFT to the model


def policies_to_evaluate(
    config: EvalConfig, parents: Mapping[str, Parent], series: SnapshotSeries, shares: Sequence[float]
) -> list[EvaluatedPolicy]:
    """Return the policies in the order of the report: base, SFT, PPO, those beside them, snapshots, interpolations."""
    ppo = parents["models.ppo"]
    modes = config.eval.modes
    policies = []
    for name in ("base", "sft", "ppo", "previous"):
        if f"models.{name}" in parents:
            step = series.step if name == "ppo" else None
            policies.append(EvaluatedPolicy(name, parents[f"models.{name}"], modes, step=step))
    for name in config.policies:
        policies.append(EvaluatedPolicy(name, parents[f"policies.{name}"], modes))
    for step, path in series.snapshots.items():
        policies.append(EvaluatedPolicy(f"ppo_{path.name}", replace(ppo, model=path), step=step))
    for share in shares:
        policies.append(interpolated_policy(ppo, share))
    return policies


def interpolated_policy(ppo: Parent, share: float) -> EvaluatedPolicy:
    """Return SFT + share * (PPO - SFT) under its name in the report."""
    return EvaluatedPolicy(f"interpolated_{share:g}", ppo, share=share)


class EvaluatedModels:
    """Loads the policies and reward models of an evaluation; adapters of models.sft share its weights.

    They are frozen; with bf16 their matrices are stored in bfloat16.
    """

    def __init__(self, config: EvalConfig, stage: lifecycle.StageRun, tokenizer: Any) -> None:
        self.config = config
        self.stage = stage
        self.tokenizer = tokenizer
        self.bf16 = devices.use_bf16(config.eval.bf16)
        self.sft_parent = stage.parents["models.sft"]
        self.sft = self._load(self.sft_parent)
        self.base = SharedBaseModels(config, stage.options, self.sft_parent, self.sft)

    def policy(self, parent: Parent, share: float | None = None) -> Any:
        """Return a policy: an adapter on the weights of models.sft, or a model with its own.

        With a share it is SFT + share * (policy - SFT): of an adapter by its scale, which copies no weights.
        """
        is_adapter = self.base.own_weights_reason(parent, self.tokenizer) is None
        if is_adapter and (share is None or interpolation.scales_exactly(parent)):
            policy = self.base.load_policy(parent)
            if share is not None:
                lora.scale_adapters(policy, share)
            return policy.requires_grad_(False).eval()
        if share is None:
            return self._load(parent)
        return model_loading.place_frozen(self.whole_policy(parent, share), bf16=self.bf16)

    def whole_policy(self, parent: Parent, share: float | None = None) -> Any:
        """Return a policy with its own weights, adapters merged, on the CPU."""
        policy = self._read(parent)
        if share is not None:
            sft = self._read(self.sft_parent) if self.bf16 else self.sft  # in bfloat16 the SFT model is rounded by now
            interpolation.interpolate(policy, sft, share)
        return policy

    def _load(self, parent: Parent) -> Any:
        """Return a frozen model on the device."""
        model = self._read(parent, bf16_matrices=self.bf16)
        row_trial.require_rows_alone(model, self.config.where(parent.key))
        return model_loading.place_frozen(model, bf16=self.bf16)

    def _read(self, parent: Parent, *, bf16_matrices: bool = False) -> Any:
        """Load a language model on the CPU."""
        return model_loading.load_model(
            load.load_causal_lm,
            self.config,
            self.stage.options,
            parent,
            self.tokenizer,
            bf16_matrices=bf16_matrices,
        )


def load_judges(
    loaded: EvaluatedModels, policy_text: scoring.PolicyText, functions: Mapping[str, RewardFn]
) -> dict[str, JudgeFn | RewardModels]:
    """Load the judges by name: reward models, and `functions`. `reward` is the model PPO was trained on."""
    judges: dict[str, JudgeFn | RewardModels] = {}
    if "models.reward" in loaded.stage.parents:
        judges["reward"] = _load_model_judge(loaded, policy_text, "models.reward")
    for name in loaded.config.judges:
        if name in functions:
            judges[name] = partial(score_texts, name, functions[name])
        elif name not in loaded.config.comparing_judges:
            judges[name] = _load_model_judge(loaded, policy_text, f"judges.{name}")
    return judges


def _load_model_judge(loaded: EvaluatedModels, policy_text: scoring.PolicyText, key: str) -> RewardModels:
    """Load a reward model that judges, or all members of an ensemble, combined as in PPO."""
    first = _load_reward_model(loaded, policy_text, key)
    others = other_member_keys(key, loaded.stage.parents)
    if not others:
        return first

    members = {"1": first}
    for number, other in others.items():
        members[number] = _load_reward_model(loaded, policy_text, other)
    source = _source_of_ppo(loaded, loaded.stage.parents[key].path)
    return EnsembleReward(members, source.combine, source.std_coef)


def _source_of_ppo(loaded: EvaluatedModels, path: Path) -> RewardSourceSettings:
    """Return PPO's reward source with this model, a default one if PPO had none."""
    ppo = loaded.stage.parents["models.ppo"]
    if ppo.stage == "ppo":
        config = configs.load("ppo", ppo.path / "config.yaml")
        for source in config.rewards.values():
            if source.model and Path(source.model) == path:
                return source
    return RewardSourceSettings(model=str(path))


def _load_reward_model(loaded: EvaluatedModels, policy_text: scoring.PolicyText, key: str) -> ModelReward:
    """Load a reward model, with its own tokenizer if it has another one."""
    config = loaded.config
    parent = loaded.stage.parents[key]
    own_tokenizer = scoring.load_own_tokenizer(config, loaded.stage.options, policy_text.sft, parent)
    model = loaded.base.load_frozen_scorer(parent, own_tokenizer or policy_text.tokenizer, bf16=loaded.bf16)
    return scoring.build_model_reward(
        config,
        key,
        policy_text,
        parent=parent,
        model=model,
        own_tokenizer=own_tokenizer,
        rows=config.eval.per_device_batch_size,
        bf16=loaded.bf16,
    )
