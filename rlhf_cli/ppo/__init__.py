"""PPO as a library: `from rlhf_cli.ppo import PPOTrainer, PPOSettings, formulas`.

Requires only torch, transformers and pydantic.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_cli.config.ppo_options import PPOSettings
    from rlhf_cli.models.batch import Prompts, Rollout
    from rlhf_cli.models.forward import ValueHead
    from rlhf_cli.ppo import losses as formulas
    from rlhf_cli.ppo.experience import Experience
    from rlhf_cli.ppo.monitor import Watchdog
    from rlhf_cli.ppo.rollout import HFEngine
    from rlhf_cli.ppo.trainer import PPOTrainer
    from rlhf_cli.rewards.function import FunctionReward
    from rlhf_cli.rewards.model import ModelReward

_MODULES = {
    "Experience": "ppo.experience",
    "Prompts": "models.batch",
    "Rollout": "models.batch",
    "FunctionReward": "rewards",
    "ModelReward": "rewards",
    "HFEngine": "ppo.rollout",
    "PPOSettings": "config.ppo_options",
    "PPOTrainer": "ppo.trainer",
    "ValueHead": "models.forward",
    "Watchdog": "ppo.monitor",
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
    """Import on first use, so that the config gets PPOSettings without torch. `formulas` is an alias of `losses`."""
    from importlib import import_module

    if name == "formulas":
        return import_module("rlhf_cli.ppo.losses")
    if name in _MODULES:
        return getattr(import_module(f"rlhf_cli.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
