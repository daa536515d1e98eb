"""The report card of the reward model that the chain was trained on, from the manifest that its stage left."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_cli import checkpoints, terminal
from rlhf_cli.checkpoints import Parent
from rlhf_cli.errors import shown
from rlhf_cli.inputs.reward_cards import no_card


def section(parents: Mapping[str, Parent]) -> dict[str, Any]:
    """{reward_model: the card} of models.reward, or of a reward model that PPO's manifest names; without one
    {no_reward_card: why}. What the card flagged is warned of, in the words of the reward stage."""
    reward = parents.get("models.reward")
    if reward is not None:
        return _card(reward.path, reward.stage, reward.manifest)
    for path, manifest in _behind(parents["models.ppo"]):
        return _card(path, "reward", manifest)
    return {"no_reward_card": "models.reward is null, and no stage of ours made a reward model that PPO names"}


def _behind(ppo: Parent) -> list[tuple[Path, Mapping[str, Any]]]:
    """The reward models that PPO was trained on, as they still are on disk: one made anew since says nothing of it."""
    found: list[tuple[Path, Mapping[str, Any]]] = []
    for key, told in ppo.manifest.get("parents", {}).items():
        path = ppo.path / told["path"]
        manifest, problem = checkpoints.read_manifest(path) if told["stage"] == "reward" else ({}, None)
        if key.startswith("rewards.") and not problem and manifest.get("model_sha256") == told["sha256"]:
            found.append((path, manifest))
    return found


def _card(path: Path, stage: str, manifest: Mapping[str, Any]) -> dict[str, Any]:
    metrics, card = manifest.get("metrics", {}), manifest.get("card", {})
    if why := no_card(stage, manifest):
        return {"no_reward_card": f"{shown(path)}: {why}"}
    for flag in card.get("flags", []):
        terminal.warn(flag["code"], flag["text"], where=shown(path))
    told = {key: value for key, value in {**metrics, **card}.items() if key != "accuracy_ci95"}
    return {"reward_model": {**told, "ci95": metrics["accuracy_ci95"]}}
