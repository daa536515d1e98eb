"""Configs: one YAML per stage, validated as a whole before anything is loaded. Imports no torch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_cli.config.base import Config, Options
    from rlhf_cli.config.eval import EvalConfig, Select
    from rlhf_cli.config.json_schema import listed, schema
    from rlhf_cli.config.loading import keys, load, load_what_is_sound, stage_of, takes
    from rlhf_cli.config.ppo import PPOConfig
    from rlhf_cli.config.training import CONFIGS, RewardConfig, SFTConfig

_MODULES = {
    "Config": "base",
    "Options": "base",
    "EvalConfig": "eval",
    "Select": "eval",
    "listed": "json_schema",
    "schema": "json_schema",
    "keys": "loading",
    "load": "loading",
    "load_what_is_sound": "loading",
    "stage_of": "loading",
    "takes": "loading",
    "PPOConfig": "ppo",
    "CONFIGS": "training",
    "RewardConfig": "training",
    "SFTConfig": "training",
}
__all__ = [
    "CONFIGS",
    "Config",
    "EvalConfig",
    "Options",
    "PPOConfig",
    "RewardConfig",
    "SFTConfig",
    "Select",
    "keys",
    "listed",
    "load",
    "load_what_is_sound",
    "schema",
    "stage_of",
    "takes",
]


def __getattr__(name: str) -> Any:
    """Import on first use: PPO as a library gets PPOSettings without yaml."""
    from importlib import import_module

    if name in _MODULES:
        return getattr(import_module(f"rlhf_cli.config.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
