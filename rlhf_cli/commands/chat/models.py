"""Which models take part in a chat, and what the run tells of them. Loads no weights."""

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
from rlhf_cli.runs.references import resolve_model
from rlhf_cli.stages import setup
from rlhf_cli.stages.ppo_setup import load_run_config
from rlhf_cli.stages.setup import PromptForm

REFERENCE = "models.sft"


@dataclass(frozen=True)
class Role:
    """A model that answers: its name in the chat, where its weights are, and what it is in words."""

    name: str  # ppo or sft
    model: Parent
    told: str
    sha256: str | None  # of its files; None for a point on PPO's way


@dataclass(frozen=True)
class Cast:
    """All that takes part. `config` says how PPO treats a reply."""

    roles: list[Role]
    config: PPOConfig
    sft: Parent | None  # what PPO's KL is measured from; None: nothing is
    parents: dict[str, Parent]  # of the rewards, by config key
    rewards: list[str]  # those of the config's that can be asked
    missing: list[str]  # what of all this is not there, and why: a line each
    written: PromptForm | None  # how the prompts in training were written; None: that cannot be seen


def cast(folder: Path, stage: str | None, step: str, compare: str | None) -> Cast:
    """The models that a command line names. In a comparison `sft` is the model that PPO started from.

    Raises RLHFError as `checkpoints.choose` does, and as `config.load` for the run's config; C07, C11 for what cannot
    be talked to or compared; in a comparison also where PPO's SFT model is gone (M01) or another by now (M10).
    """
    names = _compared(compare, stage)
    found = resolve_model(folder, "ppo" if names else stage, step)
    if found.model.stage not in POLICY_STAGES:
        text = f"{shown(found.model.path)} is a {found.model.stage} model, which writes no text"
        raise RLHFError("C11", text, hint="leave --stage out, or name sft or ppo; its scores stand below each reply")
    config = _config(found.model)
    parents, problems = _parents(config, found.model)
    own = Role(found.model.stage, found.model, str(found), found.model.sha256 if found.last else None)
    roles = [own]
    if names:
        if REFERENCE in problems:
            raise problems[REFERENCE]
        sft = parents[REFERENCE]
        roles = [own if name == "ppo" else Role("sft", sft, _named(sft), sft.sha256) for name in names]
    rewards, missing = _rewards(config, found.model, problems)
    if own.name == "sft" and stage is None and found.model.path != folder:
        missing.insert(0, "no PPO policy: none was begun, so the SFT model answers")
    if REFERENCE in problems:
        missing.append(f"no KL: {problems[REFERENCE].problems[0].text}")
    return Cast(
        roles, config, parents.pop(REFERENCE, None), parents, rewards, missing, setup.training_prompt_form(found.model)
    )


def _compared(compare: str | None, stage: str | None) -> list[str]:
    """The names in --compare, in its order; none without. Raises RLHFError C07, C11."""
    if compare is None:
        return []
    names = compare.split(",")
    for name in names:
        if name not in POLICY_STAGES:
            near = closest_match(name, POLICY_STAGES)
            hint = f"did you mean {near}?" if near else "--compare sft,ppo"
            raise RLHFError("C07", f"--compare {compare}: {name or 'nothing'} is not one of sft, ppo", hint=hint)
    if sorted(names) != sorted(POLICY_STAGES):
        raise RLHFError("C11", f"--compare {compare}: two different models are compared", hint="--compare sft,ppo")
    if stage is not None:
        raise RLHFError("C11", "--compare and --stage each say which models answer", hint="leave --stage out")
    return names


def _config(model: Parent) -> PPOConfig:
    """The config that PPO was run with; for an SFT model that of its run, begun or written, else every default."""
    if model.stage == "ppo":
        return load_run_config(model.path)
    run = model.path.resolve().parent
    if (run / "ppo/config.yaml").is_file():
        return load_run_config(run / "ppo")
    if (run / "ppo.yaml").is_file():
        return configs.load("ppo", run / "ppo.yaml")
    models = {"sft": str(run / "sft"), "reward": str(run / "reward")}
    needed = {"data": {"prompts": "none"}, "ppo": {"total_episodes": 1}}  # nothing here reads these two
    config = PPOConfig.model_validate({"run": str(run), "models": models, **needed})
    config._origin = Origin(run / "ppo.yaml", shown(run / "ppo.yaml"))
    return config


def _parents(config: PPOConfig, model: Parent) -> tuple[dict[str, Parent], dict[str, RLHFError]]:
    """The SFT model, which an SFT model itself does not need, and those of the rewards; and what is wrong with others.

    Of PPO's policy they must be the ones that it was trained with.
    """
    found: dict[str, Parent] = {}
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
            found[key] = parent
        else:
            text = f"{_named(parent)} is not the model any more that PPO was trained with"
            problems[key] = RLHFError("M10", text, hint=f"run PPO again, or bring the old {key} back")
    return found, problems


def _rewards(config: PPOConfig, model: Parent, problems: dict[str, RLHFError]) -> tuple[list[str], list[str]]:
    """The names of the rewards that can be asked, and why others cannot."""
    rewards: list[str] = []
    missing: list[str] = []
    data_then, code = model.manifest.get("data", {}), config.code()
    for name, source in config.rewards.items():
        keys = [f"rewards.{name}.{inner}" for inner in ("model", "pipeline", *(f"models.{m}" for m in source.models))]
        function = f"rewards.{name}.function"
        if wrong := [problems[key] for key in keys if key in problems]:
            missing.append(f"no {name}: {wrong[0].problems[0].text}")
        elif function in code and data_then.get(function, now := file_sha256(code[function])) != now:
            missing.append(f"no {name}: {shown(code[function])} has changed since PPO was trained with it")
        else:
            rewards.append(name)
    return rewards, missing


def _named(parent: Parent) -> str:
    return parent.hub or shown(parent.path)
