"""Policies that answer, resolved from a run and loaded, and the sources that score answers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from rlhf_cli import config as configs
from rlhf_cli import runs
from rlhf_cli.commands.common.share import load_between
from rlhf_cli.config.base import Options
from rlhf_cli.config.machinery.section import Origin
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.data.tokens import Conversation
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.files import file_sha256
from rlhf_cli.models import devices, load, lora, tokenizers
from rlhf_cli.models.batch import EnsembleScores, Rollout, StopTokenId
from rlhf_cli.ppo.scores import weighted_sum
from rlhf_cli.progress import Progress
from rlhf_cli.rewards.function import RolloutReward, may_skip_rows
from rlhf_cli.rewards.model import EnsembleReward, RetokenizingReward
from rlhf_cli.rewards.signature import check_columns
from rlhf_cli.runs.integrity import verify_parents
from rlhf_cli.runs.layout import COMPARED_STAGES, POLICY_STAGES
from rlhf_cli.runs.parents import Parent
from rlhf_cli.runs.resolve import resolve_model
from rlhf_cli.stages.common import scoring
from rlhf_cli.stages.eval.policy_evaluator import sequence_kl
from rlhf_cli.stages.ppo import reward_sources, setup

REFERENCE = "models.sft"


@dataclass
class ChatModel:
    """A model that replies."""

    name: str  # sft, dpo or ppo
    parent: Parent
    description: str
    sha256: str | None  # of its files; None for a PPO snapshot, and between SFT and PPO
    share: float | None = None  # of the way from SFT to it
    weights: Any = None  # once loaded


@dataclass(frozen=True)
class ReplyMetrics:
    """Scores and KL of a reply; empty if they could not be computed."""

    scores: Mapping[str, float] = field(default_factory=dict)  # raw, by source
    sum: float | None = None  # weighted sum of several sources
    kl: float | None = None  # sum over the tokens of log pi - log pi_sft, nats


@dataclass
class ReplyScorer:
    """Scores replies as PPO and the evaluation do."""

    config: PPOConfig
    tokenizer: Any
    stop_token_id: StopTokenId
    sources: dict[str, RolloutReward]
    policy: ChatModel  # in a comparison that of PPO
    sft: ChatModel | None  # the reference of PPO's KL; None: no KL is measured
    missing: list[str]  # what is not available and why, a line per item

    def score(self, model: ChatModel, prompt: str | Conversation, ids: list[int], response: list[int]) -> ReplyMetrics:
        """Return the metrics of one reply of a model, given as token ids. The KL is at the training temperature.

        Raises RLHFError R05 if a source fails or returns no finite number, R01 if the KL is not finite.
        """
        for source in self.sources.values():
            members = source.members.values() if isinstance(source, EnsembleReward) else [source]
            for member in members:
                if isinstance(member, RetokenizingReward):
                    member.add_prompt(ids, prompt)

        rollout = Rollout.from_lists([ids], [response], stop_token_id=self.stop_token_id).to(model.weights.device)
        rollout = replace(rollout, records=({"prompt": prompt},))
        found = {name: self._score(name, source, rollout) for name, source in self.sources.items()}
        scores = {name: score for name, score in found.items() if score is not None}

        kl = None
        if self.sft and model is not self.sft:
            temperature = self.config.ppo.temperature
            (kl,) = sequence_kl(model.weights, self.sft.weights, rollout, temperature, max_rows=1)
            if not math.isfinite(kl):
                raise RLHFError("R01", f"the KL of the reply is {kl}: the logits of a model are not finite")
        return ReplyMetrics(scores, self._sum(scores), kl)

    def _score(self, name: str, source: RolloutReward, rollout: Rollout) -> float | None:
        scores = source(rollout)
        score = float(scores.score if isinstance(scores, EnsembleScores) else scores)
        if math.isnan(score) and may_skip_rows(source):
            return None
        if not math.isfinite(score):
            raise RLHFError("R05", f"reward `{name}` gave {score}", hint="return a finite number")
        return score

    def _sum(self, scores: Mapping[str, float]) -> float | None:
        """Return the weighted sum that PPO maximizes; None of one term, or if a term is missing."""
        terms = {name: source for name, source in self.config.rewards.items() if source.weight}
        if len(terms) < 2 or not terms.keys() <= scores.keys():
            return None

        raw = {}
        weights = {}
        clips = {}
        for name, source in terms.items():
            raw[name] = torch.tensor([scores[name]])
            weights[name] = source.weight
            if source.clip is not None:
                clips[name] = source.clip
        return float(weighted_sum(raw, weights, clips))


def open_models(
    folder: Path, stage: str | None, step: str | None, compare: str | None, options: Options
) -> tuple[list[ChatModel], ReplyScorer]:
    """Load the models that the command line selects, and what scores their replies.

    In a comparison `sft` is the model that PPO started from. Raises RLHFError as `resolve_model` and `config.load` do;
    C07, C11 for models that cannot chat or be compared; in a comparison also M01 or M10 if PPO's SFT model is missing
    or has changed; M01, M06-M08 if a model cannot be loaded.
    """
    names = [] if compare is None else parse_compare(compare)
    if names and stage is not None:
        raise RLHFError("C11", "--compare and --stage both select the models", hint="omit --stage")

    policy = resolve_policy(folder, "ppo" if names else stage, step)
    config = run_config(policy.parent)
    missing = []
    is_started = (folder / "ppo/identity.json").is_file()
    if policy.name == "sft" and stage is None and policy.parent.path != folder and not is_started:
        missing.append("no PPO policy: PPO was not started, so the SFT model replies")

    sft = None
    try:
        sft = open_reference(config, policy)
    except RLHFError as error:
        if names:
            raise
        missing.append(f"no KL: {error.problems[0].text}")

    with Progress("chat", (2 if sft else 1) + len(config.rewards), "model", brief=True) as bar:
        tokenizer = tokenizers.load_tokenizer(policy.parent.model, trust_remote_code=options.trust_remote_code)
        load_weights([policy, sft] if sft else [policy], tokenizer, config, options, bar)
        scorer = load_scorer(config, policy, tokenizer, list(config.rewards), options, bar)
    scorer.sft = sft
    scorer.missing = missing + scorer.missing
    if not names or sft is None:
        return [policy], scorer
    return [policy if name == "ppo" else sft for name in names], scorer


def parse_compare(compare: str) -> list[str]:
    """Return the models that --compare names, in its order. Raises RLHFError C07 unless they are sft and ppo."""
    names = compare.split(",")
    if sorted(names) != sorted(COMPARED_STAGES):
        raise RLHFError("C07", f"--compare {compare}: not sft,ppo or ppo,sft", hint="--compare sft,ppo")
    return names


def resolve_policy(folder: Path, stage: str | None, step: str | None) -> ChatModel:
    """Return the policy of a run or stage folder, not loaded: of `stage`, else its newest.

    Raises RLHFError as `resolve_model` does, and C11 for a stage whose model generates no text.
    """
    chosen = resolve_model(folder, stage, step)
    parent = chosen.model
    if parent.stage not in POLICY_STAGES:
        text = f"{shown(parent.path)} is a {parent.stage} model, which generates no text"
        raise RLHFError("C11", text, hint="omit --stage, or name sft, dpo or ppo; its scores are below each reply")
    sha256 = parent.sha256 if chosen.is_as_written else None
    return ChatModel(parent.stage, parent, str(chosen), sha256, chosen.share)


def run_config(model: Parent) -> PPOConfig:
    """Return PPO's config of the model's run: of its ppo/, else of its ppo.yaml, else the defaults."""
    run = model.path.resolve().parent
    ppo = model.path if model.stage == "ppo" else run / "ppo"
    if (ppo / "config.yaml").is_file():
        return setup.load_run_config(ppo)
    if (run / "ppo.yaml").is_file():
        return configs.load("ppo", run / "ppo.yaml")
    models = {"sft": str(run / "sft"), "reward": str(run / "reward")}
    required = {"data": {"prompts": "none"}, "ppo": {"total_episodes": 1}}  # not used by a chat
    config = PPOConfig.model_validate({"run": str(run), "models": models, **required})
    config._origin = Origin(run / "ppo.yaml", shown(run / "ppo.yaml"))
    return config


def open_reference(config: PPOConfig, policy: ChatModel) -> ChatModel | None:
    """Return the SFT model that PPO started from; None for a model that is one itself."""
    if policy.name == "sft":
        return None
    (parent,) = _open_parents(config, policy, REFERENCE).values()
    name = parent.hub or shown(parent.path)
    return ChatModel("sft", parent, name, parent.sha256)


def _open_parents(config: PPOConfig, policy: ChatModel, start: str) -> dict[str, Parent]:
    """Open the models that keys with this start name.

    Raises RLHFError M10 if a PPO policy was trained with another model under the same key.
    """
    trained_with = policy.parent.manifest.parents if policy.name == "ppo" else {}
    parents = {}
    for reference in runs.references(config):
        key = reference.key
        if not key.startswith(start):
            continue
        parent = runs.open_reference(config, reference)
        verify_parents({key: parent})
        if key in trained_with and trained_with[key].sha256 != parent.sha256:
            text = f"{parent.hub or shown(parent.path)} is no longer the model that PPO was trained with"
            raise RLHFError("M10", text, hint=f"run PPO again, or restore the old {key}")
        parents[key] = parent
    return parents


def load_weights(
    models: Sequence[ChatModel], tokenizer: Any, config: PPOConfig, options: Options, bar: Progress
) -> None:
    """Load the weights of models of one vocabulary. Raises RLHFError M01, M06-M08."""
    load_kwargs = load.load_kwargs(config.models, options.trust_remote_code)
    for model in models:
        path = shown(model.parent.path)
        if model.share is None:
            weights = load.load_causal_lm(model.parent.model, **load_kwargs)
        else:
            weights = lora.merge_and_unload(load_between(model.parent, model.share, options.trust_remote_code))
        tokenizers.check_vocabulary(weights, tokenizer, path)
        model.weights = weights.to(devices.device()).eval()
        bar.advance(note=path)


def load_scorer(
    config: PPOConfig,
    policy: ChatModel,
    tokenizer: Any,
    rewards: Sequence[str],
    options: Options,
    bar: Progress,
) -> ReplyScorer:
    """Load each available reward for replies of the loaded `policy`; the others are in the scorer's `missing`."""
    vocab_size = policy.weights.get_input_embeddings().weight.shape[0]
    stop_token_id = setup.stop_token_id(config, tokenizer, policy.parent, vocab_size)
    policy_text = scoring.PolicyText(policy.parent, tokenizer, stop_token_id, [])

    sources: dict[str, RolloutReward] = {}
    missing = []
    for name in rewards:
        try:
            sources |= _load_reward(config, name, policy, policy_text, options)
        except RLHFError as error:
            missing.append(f"no {name}: {error.problems[0].text}")
        bar.advance(note=name)
    return ReplyScorer(config, tokenizer, stop_token_id, sources, policy=policy, sft=None, missing=missing)


def _load_reward(
    config: PPOConfig, name: str, policy: ChatModel, policy_text: scoring.PolicyText, options: Options
) -> dict[str, RolloutReward]:
    """Load one reward source. Raises RLHFError if it is missing, or has changed since PPO was trained with it."""
    if name in config.reward_judges:
        raise RLHFError("C11", "it compares an answer with the SFT model's, and does not score a single one")
    parents = _open_parents(config, policy, f"rewards.{name}.")
    only = config.model_copy(update={"rewards": {name: config.rewards[name]}})
    trained_with = policy.parent.manifest.data
    for key, file in only.code().items():
        if key in trained_with and trained_with[key] != file_sha256(file):
            raise RLHFError("M10", f"{shown(file)} has changed since PPO was trained with it")
    functions = reward_sources.build_reward_fns(only, options, parents)
    check_columns(functions, [], "a chat", str)
    cache = reward_sources.RewardModelCache(only, options, parents, policy_text)
    return reward_sources.build_reward_sources(only, functions, cache)
