"""PPO as a library: `from rlhf_cli.ppo import PPOTrainer, PPOSettings, formulas`.

Requires only torch, transformers and pydantic.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlhf_cli import import_on_first_use

if TYPE_CHECKING:
    from rlhf_cli.config.ppo import PPOSettings as PPOSettings
    from rlhf_cli.models.batch import Prompts as Prompts
    from rlhf_cli.models.batch import Rollout as Rollout
    from rlhf_cli.models.forward import ValueHead as ValueHead
    from rlhf_cli.ppo import losses
    from rlhf_cli.ppo.experience import Experience as Experience
    from rlhf_cli.ppo.graph_engine import GraphEngine as GraphEngine
    from rlhf_cli.ppo.monitor import Watchdog as Watchdog
    from rlhf_cli.ppo.rollout import HFEngine as HFEngine
    from rlhf_cli.ppo.rollout import RolloutEngine as RolloutEngine
    from rlhf_cli.ppo.trainer import PPOTrainer as PPOTrainer
    from rlhf_cli.rewards.function import FunctionReward as FunctionReward
    from rlhf_cli.rewards.function import RolloutReward as RolloutReward
    from rlhf_cli.rewards.model import ModelReward as ModelReward

    formulas = losses

_import_name = import_on_first_use(
    __name__,
    {
        "config.ppo": "PPOSettings",
        "models.batch": "Prompts Rollout",
        "models.forward": "ValueHead",
        "ppo.experience": "Experience",
        "ppo.monitor": "Watchdog",
        "ppo.rollout": "HFEngine RolloutEngine",
        "ppo.graph_engine": "GraphEngine",
        "ppo.trainer": "PPOTrainer",
        "rewards.function": "FunctionReward RolloutReward",
        "rewards.model": "ModelReward",
    },
)


def __getattr__(name: str) -> Any:
    """Import on first use, so that the config gets PPOSettings without torch. `formulas` is an alias of `losses`."""
    return import_module("rlhf_cli.ppo.losses") if name == "formulas" else _import_name(name)
