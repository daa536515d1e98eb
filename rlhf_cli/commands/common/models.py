"""Policies that answer, resolved from a run and loaded, and the sources that score answers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from rlhf_cli import config as configs
from rlhf_cli import runs
from rlhf_cli.config.base import Options
from rlhf_cli.config.machinery.section import Origin
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.data.tokens import Conversation
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.files import file_sha256
from rlhf_cli.models import devices, load, tokenizers
from rlhf_cli.models.batch import EnsembleScores, Rollout, StopTokenId
from rlhf_cli.ppo.experience import weighted_sum
from rlhf_cli.progress import Progress
from rlhf_cli.rewards.function import RolloutReward, may_skip_rows
from rlhf_cli.rewards.model import EnsembleReward, RetokenizingReward
from rlhf_cli.rewards.signature import RewardFn, check_columns
from rlhf_cli.runs.integrity import verify_parents
from rlhf_cli.runs.layout import COMPARED_STAGES, POLICY_STAGES
from rlhf_cli.runs.parents import Parent
from rlhf_cli.runs.resolve import resolve_model
from rlhf_cli.stages.common import prompt_forms, scoring
from rlhf_cli.stages.eval.policy_evaluator import sequence_kl
from rlhf_cli.stages.ppo import reward_sources, setup

REFERENCE = "models.sft"


@dataclass(frozen=True)
class ChatModel:
    """A model that replies."""

    name: str  # ppo or sft
    parent: Parent
    description: str
    sha256: str | None  # of its files; None for a PPO snapshot
    weights: Any = None  # once loaded


@dataclass(frozen=True)
class ChatModels:
    """The models that reply, and everything their replies are scored with."""

    models: list[ChatModel]
    config: PPOConfig  # the sampling defaults and the rewards
    sft: Parent | None  # the reference of PPO's KL; None: no KL is measured
    parents: dict[str, Parent]  # of the rewards, by config key
    rewards: list[str]  # names of the config's rewards that are available
    missing: list[str]  # what is not available and why, a line per item
    written: prompt_forms.PromptForm | None  # how the training prompts were formatted; None: unknown


# Resolving


def resolve_models(folder: Path, stage: str | None, step: str, compare: str | None) -> ChatModels:
    """Return the models that the command line selects. In a comparison `sft` is the model that PPO started from.

    Raises RLHFError as `resolve_model` and `config.load` do; C07, C11 for models that cannot chat or be compared; in a
    comparison also M01 or M10 if PPO's SFT model is missing or has changed.
    """
    names = _parse_compare(compare, stage)
    chosen = resolve_model(folder, "ppo" if names else stage, step)
    model = chosen.model
    if model.stage not in POLICY_STAGES:
        text = f"{shown(model.path)} is a {model.stage} model, which generates no text"
        raise RLHFError("C11", text, hint="omit --stage, or name sft, dpo or ppo; its scores are below each reply")
    config = _config(model)
    parents, problems = _parents(config, model)
    main = ChatModel(model.stage, model, str(chosen), model.sha256 if chosen.last else None)
    models = [main]
    if names:
        if REFERENCE in problems:
            raise problems[REFERENCE]
        sft = parents[REFERENCE]
        models = [main if name == "ppo" else ChatModel("sft", sft, display_name(sft), sft.sha256) for name in names]
    rewards, missing = _rewards(config, model, problems)
    if main.name == "sft" and stage is None and model.path != folder:
        missing.insert(0, "no PPO policy: PPO was not started, so the SFT model replies")
    if REFERENCE in problems:
        missing.append(f"no KL: {problems[REFERENCE].problems[0].text}")
    form, reference = prompt_forms.training_prompt_form(model), parents.pop(REFERENCE, None)
    return ChatModels(models, config, reference, parents, rewards, missing, form)


def _parse_compare(compare: str | None, stage: str | None) -> list[str]:
    """Return the models that --compare names, in its order. Raises RLHFError C07, C11."""
    names = [] if compare is None else compare.split(",")
    if unknown := [name for name in names if name not in COMPARED_STAGES]:
        text = f"--compare {compare}: {unknown[0] or 'nothing'} is not one of sft, ppo"
        raise RLHFError("C07", text, hint="--compare sft,ppo")
    if names and sorted(names) != sorted(COMPARED_STAGES):
        raise RLHFError("C11", f"--compare {compare}: name two different models", hint="--compare sft,ppo")
    if names and stage is not None:
        raise RLHFError("C11", "--compare and --stage both select the models", hint="omit --stage")
    return names


def _config(model: Parent) -> PPOConfig:
    """Return PPO's config of the model's run: of its ppo/, else of its ppo.yaml, else the defaults."""
    run = model.path.resolve().parent
    ppo = model.path if model.stage == "ppo" else run / "ppo"
    if model.stage == "ppo" or (ppo / "config.yaml").is_file():
        return setup.load_run_config(ppo)
    if (run / "ppo.yaml").is_file():
        return configs.load("ppo", run / "ppo.yaml")
    models = {"sft": str(run / "sft"), "reward": str(run / "reward")}
    required = {"data": {"prompts": "none"}, "ppo": {"total_episodes": 1}}  # not used by a chat
    config = PPOConfig.model_validate({"run": str(run), "models": models, **required})
    config._origin = Origin(run / "ppo.yaml", shown(run / "ppo.yaml"))
    return config


def _parents(config: PPOConfig, model: Parent) -> tuple[dict[str, Parent], dict[str, RLHFError]]:
    """Open the reference (not for an SFT model) and the reward models; return them and the errors, by config key.

    For a PPO policy they must be the models that it was trained with.
    """
    parents: dict[str, Parent] = {}
    problems: dict[str, RLHFError] = {}
    trained_with = model.manifest.parents if model.stage == "ppo" else {}
    for reference in runs.references(config):
        key = reference.key
        if not key.startswith("rewards.") and (key != REFERENCE or model.stage == "sft"):
            continue
        try:
            parent = runs.open_reference(config, reference)
            verify_parents({key: parent})
        except RLHFError as error:
            problems[key] = error
            continue
        if key not in trained_with or trained_with[key].sha256 == parent.sha256:
            parents[key] = parent
        else:
            text = f"{display_name(parent)} is no longer the model that PPO was trained with"
            problems[key] = RLHFError("M10", text, hint=f"run PPO again, or restore the old {key}")
    return parents, problems


def _rewards(config: PPOConfig, model: Parent, problems: Mapping[str, RLHFError]) -> tuple[list[str], list[str]]:
    """Return the names of the available rewards, and a line on each other one."""
    rewards: list[str] = []
    missing: list[str] = []
    trained_with = model.manifest.data
    code = config.code()

    def has_changed(key: str) -> bool:
        """Return True if PPO was trained with another version of the file of a function."""
        return key in code and key in trained_with and trained_with[key] != file_sha256(code[key])

    for name in config.rewards:
        function = f"rewards.{name}.function"
        errors = [error for key, error in problems.items() if key.startswith(f"rewards.{name}.")]
        if errors:
            missing.append(f"no {name}: {errors[0].problems[0].text}")
        elif has_changed(function):
            missing.append(f"no {name}: {shown(code[function])} has changed since PPO was trained with it")
        else:
            rewards.append(name)
    return rewards, missing


def display_name(parent: Parent) -> str:
    return parent.hub or shown(parent.path)


# Loading and scoring


def load_models(chat_models: ChatModels, options: Options) -> tuple[list[ChatModel], "ReplyScorer"]:
    """Load the models that reply, the SFT model and the reward sources.

    Raises RLHFError M01, M06-M08 if a model cannot be loaded.
    """
    trust = options.trust_remote_code
    first = chat_models.models[0].parent
    tokenizer = tokenizers.load_tokenizer(first.model, trust_remote_code=trust)
    parents = {info.parent.model: info.parent for info in chat_models.models}
    if chat_models.sft:
        parents[chat_models.sft.model] = chat_models.sft

    weights: dict[Path, Any] = {}
    with Progress("chat", len(parents) + len(chat_models.rewards), "model", brief=True) as bar:
        for folder, parent in parents.items():
            model = load.load_causal_lm(folder, **load.load_kwargs(chat_models.config.models, trust))
            tokenizers.check_vocabulary(model, tokenizer, shown(parent.path))
            weights[folder] = model.to(devices.device()).eval()
            bar.advance(note=shown(parent.path))

        sft = weights[chat_models.sft.model] if chat_models.sft else None
        loaded = [replace(info, weights=weights[info.parent.model]) for info in chat_models.models]
        vocab_size = loaded[0].weights.get_input_embeddings().weight.shape[0]
        stop = setup.stop_token_id(chat_models.config, tokenizer, first, vocab_size)
        scorer = ReplyScorer(chat_models, options, tokenizer, stop, sft)
        bar.advance(len(chat_models.rewards), note="rewards")
    return loaded, scorer


@dataclass(frozen=True)
class ReplyMetrics:
    """Scores and KL of a reply; empty if they could not be computed."""

    scores: Mapping[str, float] = field(default_factory=dict)  # raw, by source
    total: float | None = None  # weighted sum of the sources; None if it equals the only score
    kl: float | None = None  # sum over the tokens of log pi - log pi_sft, nats


class ReplyScorer:
    """Scores replies as PPO and the evaluation do. `sft` is the loaded SFT model; None: no KL is measured.

    Raises RLHFError as the stages do if a reward model cannot be loaded.
    """

    def __init__(
        self, chat_models: ChatModels, options: Options, tokenizer: Any, stop_token_id: StopTokenId, sft: Any
    ) -> None:
        self.config = chat_models.config
        self.tokenizer = tokenizer
        self.sft = sft
        self.stop_token_id = stop_token_id
        self.missing = [*chat_models.missing]

        functions: dict[str, RewardFn] = {}  # the sources that read text
        rewards: dict[str, Any] = {}
        for name in chat_models.rewards:
            section = {name: self.config.rewards[name]}
            config = self.config.model_copy(update={"rewards": section})
            try:
                built = reward_sources.build_reward_fns(config, options, chat_models.parents)
                check_columns(built, [], "a chat", str)
            except RLHFError as error:
                self.missing.append(f"no {name}: {error.problems[0].text}")
            else:
                functions |= built
                rewards |= section

        config = self.config.model_copy(update={"rewards": rewards})
        policy_text = scoring.PolicyText(chat_models.models[0].parent, tokenizer, stop_token_id, [])
        cache = reward_sources.RewardModelCache(config, options, chat_models.parents, policy_text)
        self.sources: dict[str, RolloutReward] = reward_sources.build_reward_sources(config, functions, cache)

    def score(self, policy: Any, prompt: str | Conversation, ids: list[int], response: list[int]) -> ReplyMetrics:
        """Return the metrics of one reply of `policy`, given as token ids. The KL is at the training temperature.

        Raises RLHFError R05 if a source fails or returns no finite number, R01 if the KL is not finite.
        """
        for source in self.sources.values():
            members = source.members.values() if isinstance(source, EnsembleReward) else [source]
            for model in members:
                if isinstance(model, RetokenizingReward):
                    model.add_prompt(ids, prompt)

        rollout = Rollout.from_lists([ids], [response], stop_token_id=self.stop_token_id).to(policy.device)
        rollout = replace(rollout, records=({"prompt": prompt},))
        found = {name: self._score(name, source, rollout) for name, source in self.sources.items()}
        scores = {name: score for name, score in found.items() if score is not None}

        kl = None
        if self.sft is not None and policy is not self.sft:
            (kl,) = sequence_kl(policy, self.sft, rollout, self.config.ppo.temperature, max_rows=1)
            if not math.isfinite(kl):
                raise RLHFError("R01", f"the KL of the reply is {kl}: the logits of a model are not finite")
        return ReplyMetrics(scores, self._total(scores), kl)

    def _score(self, name: str, source: RolloutReward, rollout: Rollout) -> float | None:
        scores = source(rollout)
        score = float(scores.score if isinstance(scores, EnsembleScores) else scores)
        if math.isnan(score) and may_skip_rows(source):
            return None
        if not math.isfinite(score):
            raise RLHFError("R05", f"reward `{name}` gave {score}", hint="return a finite number")
        return score

    def _total(self, scores: Mapping[str, float]) -> float | None:
        """Return the weighted sum that PPO maximizes; None if it equals the only score, or a term is missing."""
        terms = {name: source for name, source in self.config.rewards.items() if source.weight}
        is_plain = len(terms) == 1 and all(term.weight == 1 and not term.clip for term in terms.values())
        if is_plain or not terms.keys() <= scores.keys():
            return None
        raw = {name: torch.tensor([scores[name]]) for name in terms}
        weights = {name: source.weight for name, source in terms.items()}
        clips = {name: source.clip for name, source in terms.items() if source.clip is not None}
        return float(weighted_sum(raw, weights, clips))
