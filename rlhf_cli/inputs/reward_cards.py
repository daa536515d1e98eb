"""The report card that a reward stage left in its manifest, and what `ppo.require_reward` asks of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_cli import checkpoints
from rlhf_cli.checkpoints import FOREIGN, Parent
from rlhf_cli.config import PPOConfig
from rlhf_cli.errors import Problem, RLHFError, shown

KEY = "ppo.require_reward"


def no_card(stage: str, manifest: Mapping[str, Any]) -> str | None:
    """Why a reward model has no report card; None where it has one."""
    if "accuracy" in manifest.get("metrics", {}):
        return None
    return "no reward stage of ours made it" if stage == FOREIGN else "its stage had no evaluation pairs"


def require(config: PPOConfig, parents: Mapping[str, Parent]) -> None:
    """Hold every reward model among the rewards, as far as it is there, against ppo.require_reward.

    Raises RLHFError M11 with all that does not hold, C17 where no reward is a model.
    """
    if config.ppo.require_reward is None:
        return
    if not any(_is_reward(reference.key) for reference in checkpoints.references(config)):
        text = f"{KEY} has no effect: no reward is a model"
        raise RLHFError("C17", text, where=config.where(KEY), hint="take it out")
    models: dict[Path, Parent] = {}  # several keys may name one folder
    for key, parent in parents.items():
        if _is_reward(key):
            models.setdefault(parent.path, parent)
    problems = [problem for parent in models.values() for problem in _unmet(config, parent)]
    if problems:
        raise RLHFError.of(problems)


def _is_reward(key: str) -> bool:
    return key.startswith("rewards.")


def _unmet(config: PPOConfig, parent: Parent) -> list[Problem]:
    assert config.ppo.require_reward
    place, why = shown(parent.path), no_card(parent.stage, parent.manifest)
    if why:
        give = "give reward.yaml data.eval or data.eval_fraction and run rlhf reward --fresh"
        hint = "name the folder of a reward stage" if parent.stage == FOREIGN else give
        text = f"{KEY}: {place} has no report card: {why}"
        return [Problem("M11", text, config.where(KEY), f"{hint}; or take {KEY} out")]
    problems, metrics = [], parent.manifest["metrics"]
    found = {**metrics, "accuracy_low": metrics["accuracy_ci95"][0]}
    for name, bound in config.ppo.require_reward.model_dump(exclude_none=True).items():
        where, least = config.where(f"{KEY}.{name}"), name.startswith("accuracy")
        if name not in found:
            text = f"{KEY}.{name}: the report card of {place} has no {name}; an older version wrote it"
            problems.append(Problem("M11", text, where, "make it again: rlhf reward --fresh"))
        elif found[name] < bound if least else abs(found[name]) > bound:
            asked = f"{'at least' if least else 'at most'} {bound:g}"
            text = f"{KEY}.{name}: {place} has {found[name]:.4g}, required {asked}"
            hint = f"train a better reward model (docs/evaluation.md); or {'lower' if least else 'raise'} {KEY}.{name}"
            problems.append(Problem("M11", text, where, hint))
    return problems
