"""The models of a chat, resolved from a run without loading weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_cli import config as configs
from rlhf_cli import runs
from rlhf_cli.config.base import Origin
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.errors import RLHFError, closest_match, shown
from rlhf_cli.files import file_sha256
from rlhf_cli.runs.discover import POLICY_STAGES
from rlhf_cli.runs.parents import Parent, verify_parents
from rlhf_cli.runs.resolve import resolve_model
from rlhf_cli.stages import setup
from rlhf_cli.stages.ppo_setup import load_run_config

REFERENCE = "models.sft"


@dataclass(frozen=True)
class ChatModel:
    """A model that replies."""

    name: str  # ppo or sft
    parent: Parent
    description: str
    sha256: str | None  # of its files; None for a PPO snapshot


@dataclass(frozen=True)
class ChatModels:
    """The models that reply, and everything their replies are scored with."""

    models: list[ChatModel]
    config: PPOConfig  # the sampling defaults and the rewards
    sft: Parent | None  # the reference of PPO's KL; None: no KL is measured
    parents: dict[str, Parent]  # of the rewards, by config key
    rewards: list[str]  # names of the config's rewards that are available
    missing: list[str]  # what is not available and why, a line per item
    written: setup.PromptForm | None  # how the training prompts were formatted; None: unknown


def resolve_models(folder: Path, stage: str | None, step: str, compare: str | None) -> ChatModels:
    """Return the models that the command line selects. In a comparison `sft` is the model that PPO started from.

    Raises RLHFError as `references.choose` and `config.load` do; C07, C11 for models that cannot chat or be compared;
    in a comparison also M01 or M10 if PPO's SFT model is missing or has changed.
    """
    names = _parse_compare(compare, stage)
    chosen = resolve_model(folder, "ppo" if names else stage, step)
    model = chosen.model
    if model.stage not in POLICY_STAGES:
        text = f"{shown(model.path)} is a {model.stage} model, which generates no text"
        raise RLHFError("C11", text, hint="leave --stage out, or name sft or ppo; its scores are below each reply")
    config = _config(model)
    parents, problems = _parents(config, model)
    main = ChatModel(model.stage, model, str(chosen), model.sha256 if chosen.last else None)
    models = [main]
    if names:
        if REFERENCE in problems:
            raise problems[REFERENCE]
        sft = parents[REFERENCE]
        models = [main if name == "ppo" else ChatModel("sft", sft, _name(sft), sft.sha256) for name in names]
    rewards, missing = _rewards(config, model, problems)
    if main.name == "sft" and stage is None and model.path != folder:
        missing.insert(0, "no PPO policy: PPO was not started, so the SFT model replies")
    if REFERENCE in problems:
        missing.append(f"no KL: {problems[REFERENCE].problems[0].text}")
    return ChatModels(
        models, config, parents.pop(REFERENCE, None), parents, rewards, missing, setup.training_prompt_form(model)
    )


def _parse_compare(compare: str | None, stage: str | None) -> list[str]:
    """Return the models that --compare names, in its order. Raises RLHFError C07, C11."""
    if compare is None:
        return []
    names = compare.split(",")
    for name in names:
        if name not in POLICY_STAGES:
            near = closest_match(name, POLICY_STAGES)
            hint = f"did you mean {near}?" if near else "--compare sft,ppo"
            raise RLHFError("C07", f"--compare {compare}: {name or 'nothing'} is not one of sft, ppo", hint=hint)
    if sorted(names) != sorted(POLICY_STAGES):
        raise RLHFError("C11", f"--compare {compare}: name two different models", hint="--compare sft,ppo")
    if stage is not None:
        raise RLHFError("C11", "--compare and --stage both select the models", hint="leave --stage out")
    return names


def _config(model: Parent) -> PPOConfig:
    """Return PPO's config of the model's run: of its ppo/, else of its ppo.yaml, else the defaults."""
    if model.stage == "ppo":
        return load_run_config(model.path)
    run = model.path.resolve().parent
    if (run / "ppo/config.yaml").is_file():
        return load_run_config(run / "ppo")
    if (run / "ppo.yaml").is_file():
        return configs.load("ppo", run / "ppo.yaml")
    models = {"sft": str(run / "sft"), "reward": str(run / "reward")}
    needed = {"data": {"prompts": "none"}, "ppo": {"total_episodes": 1}}  # required, but not used by a chat
    config = PPOConfig.model_validate({"run": str(run), "models": models, **needed})
    config._origin = Origin(run / "ppo.yaml", shown(run / "ppo.yaml"))
    return config


def _parents(config: PPOConfig, model: Parent) -> tuple[dict[str, Parent], dict[str, RLHFError]]:
    """Open the reference (not for an SFT model) and the reward models; return them and the errors, by config key.

    For a PPO policy they must be the models that it was trained with.
    """
    parents: dict[str, Parent] = {}
    problems: dict[str, RLHFError] = {}
    trained_with: dict[str, Any] = model.manifest["parents"] if model.stage == "ppo" else {}
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
        if trained_with.get(key, {}).get("sha256", parent.sha256) == parent.sha256:
            parents[key] = parent
        else:
            text = f"{_name(parent)} is no longer the model that PPO was trained with"
            problems[key] = RLHFError("M10", text, hint=f"run PPO again, or restore the old {key}")
    return parents, problems


def _rewards(config: PPOConfig, model: Parent, problems: dict[str, RLHFError]) -> tuple[list[str], list[str]]:
    """Return the names of the available rewards, and a line on each other one."""
    rewards: list[str] = []
    missing: list[str] = []
    trained_with, code = model.manifest.get("data", {}), config.code()
    for name, source in config.rewards.items():
        keys = [
            f"rewards.{name}.{inner}"
            for inner in ("model", "pipeline", *(f"models.{member}" for member in source.models))
        ]
        function = f"rewards.{name}.function"
        if errors := [problems[key] for key in keys if key in problems]:
            missing.append(f"no {name}: {errors[0].problems[0].text}")
        elif function in code and trained_with.get(function, sha256 := file_sha256(code[function])) != sha256:
            missing.append(f"no {name}: {shown(code[function])} has changed since PPO was trained with it")
        else:
            rewards.append(name)
    return rewards, missing


def _name(parent: Parent) -> str:
    return parent.hub or shown(parent.path)
