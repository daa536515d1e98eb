"""Report cards of reward models, read from their stages' manifests: for report.json and `ppo.require_reward`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_cli import runs, terminal
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.errors import Problem, RLHFError, shown
from rlhf_cli.runs.parents import FOREIGN, Parent

KEY = "ppo.require_reward"


def missing_card_reason(stage: str, manifest: Mapping[str, Any]) -> str | None:
    """Return why a reward model has no report card, None if it has one."""
    if "accuracy" in manifest.get("metrics", {}):
        return None
    return "no reward stage of ours made it" if stage == FOREIGN else "its stage had no evaluation pairs"


def reward_model_section(parents: Mapping[str, Parent]) -> dict[str, Any]:
    """Return {reward_model: card} of models.reward, else of PPO's reward model; or {no_reward_card: reason}.

    The card's flags are repeated as warnings.
    """
    reward = parents.get("models.reward")
    if reward is not None:
        return _card_section(reward.path, reward.stage, reward.manifest)
    for path, manifest in _reward_models_of_ppo(parents["models.ppo"]):
        return _card_section(path, "reward", manifest)
    return {"no_reward_card": "models.reward is null, and no stage of ours made a reward model that PPO names"}


def _reward_models_of_ppo(ppo: Parent) -> list[tuple[Path, Mapping[str, Any]]]:
    """Return folder and manifest of the reward models PPO used, skipping those retrained since."""
    reward_models: list[tuple[Path, Mapping[str, Any]]] = []
    for key, entry in ppo.manifest.get("parents", {}).items():
        path = ppo.path / entry["path"]
        manifest, problem = runs.read_manifest(path) if entry["stage"] == "reward" else ({}, None)
        if key.startswith("rewards.") and not problem and manifest.get("model_sha256") == entry["sha256"]:
            reward_models.append((path, manifest))
    return reward_models


def _card_section(path: Path, stage: str, manifest: Mapping[str, Any]) -> dict[str, Any]:
    metrics, card = manifest.get("metrics", {}), manifest.get("card", {})
    if reason := missing_card_reason(stage, manifest):
        return {"no_reward_card": f"{shown(path)}: {reason}"}
    for flag in card.get("flags", []):
        terminal.warn(flag["code"], flag["text"], where=shown(path))
    fields = {key: value for key, value in {**metrics, **card}.items() if key != "accuracy_ci95"}
    return {"reward_model": {**fields, "ci95": metrics["accuracy_ci95"]}}


def check_required(config: PPOConfig, parents: Mapping[str, Parent]) -> None:
    """Compare the report card of every available reward model with ppo.require_reward.

    Raises RLHFError M11 with all unmet requirements, C17 if no reward is a model.
    """
    if config.ppo.require_reward is None:
        return
    if not any(_is_reward(reference.key) for reference in runs.references(config)):
        text = f"{KEY} has no effect: no reward is a model"
        raise RLHFError("C17", text, where=config.where(KEY), hint="take it out")
    models: dict[Path, Parent] = {}  # several keys may name one folder
    for key, parent in parents.items():
        if _is_reward(key):
            models.setdefault(parent.path, parent)
    problems = [problem for parent in models.values() for problem in _unmet_requirements(config, parent)]
    if problems:
        raise RLHFError.from_problems(problems)


def _is_reward(key: str) -> bool:
    return key.startswith("rewards.")


def _unmet_requirements(config: PPOConfig, parent: Parent) -> list[Problem]:
    assert config.ppo.require_reward
    folder, reason = shown(parent.path), missing_card_reason(parent.stage, parent.manifest)
    if reason:
        rerun = "give reward.yaml data.eval or data.eval_fraction and run rlhf reward --fresh"
        hint = "name the folder of a reward stage" if parent.stage == FOREIGN else rerun
        text = f"{KEY}: {folder} has no report card: {reason}"
        return [Problem("M11", text, config.where(KEY), f"{hint}; or take {KEY} out")]
    problems, metrics = [], parent.manifest["metrics"]
    values = {**metrics, "accuracy_low": metrics["accuracy_ci95"][0]}
    for name, bound in config.ppo.require_reward.model_dump(exclude_none=True).items():
        where, is_minimum = config.where(f"{KEY}.{name}"), name.startswith("accuracy")
        if name not in values:
            text = f"{KEY}.{name}: the report card of {folder} has no {name}; an older version wrote it"
            problems.append(Problem("M11", text, where, "make it again: rlhf reward --fresh"))
        elif values[name] < bound if is_minimum else abs(values[name]) > bound:
            required = f"{'at least' if is_minimum else 'at most'} {bound:g}"
            text = f"{KEY}.{name}: {folder} has {values[name]:.4g}, required {required}"
            change = "lower" if is_minimum else "raise"
            hint = f"train a better reward model (docs/evaluation.md); or {change} {KEY}.{name}"
            problems.append(Problem("M11", text, where, hint))
    return problems
