"""PPO as a library: `from rlhf_cli.ppo import PPOTrainer, PPOSettings, formulas`.

Needs torch, transformers and pydantic alone.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_cli.models.forward import ValueHead
    from rlhf_cli.ppo import formulas
    from rlhf_cli.ppo.records import Experience, Prompts, Rollout
    from rlhf_cli.ppo.rollout import HFEngine
    from rlhf_cli.ppo.settings import PPOSettings
    from rlhf_cli.ppo.trainer import PPOTrainer
    from rlhf_cli.ppo.watchdog import Watchdog
    from rlhf_cli.rewards import FunctionReward, ModelReward

_HOMES = {
    "Experience": "ppo.records",
    "Prompts": "ppo.records",
    "Rollout": "ppo.records",
    "FunctionReward": "rewards",
    "ModelReward": "rewards",
    "HFEngine": "ppo.rollout",
    "PPOSettings": "ppo.settings",
    "PPOTrainer": "ppo.trainer",
    "ValueHead": "models.reading",
    "Watchdog": "ppo.watchdog",
}
__all__ = [
    "Experience",
    "FunctionReward",
    "HFEngine",
    "ModelReward",
    "PPOSettings",
    "PPOTrainer",
    "Prompts",
    "Rollout",
    "ValueHead",
    "Watchdog",
    "formulas",
]


def __getattr__(name: str) -> Any:
    """Loads on first use: the config needs PPOSettings without torch."""
    from importlib import import_module

    if name == "formulas":
        return import_module("rlhf_cli.ppo.formulas")
    if name in _HOMES:
        return getattr(import_module(f"rlhf_cli.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
