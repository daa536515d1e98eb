"""Configs: one YAML per stage, validated as a whole before anything is loaded. Imports no torch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_cli.config.base import Config, Options
    from rlhf_cli.config.eval import EvalConfig, Select
    from rlhf_cli.config.json_schema import completion_values, schema
    from rlhf_cli.config.loading import accepts_key, keys, load, load_partial, stage_of
    from rlhf_cli.config.ppo import PPOConfig
    from rlhf_cli.config.training import CONFIGS, RewardConfig, SFTConfig

_MODULES = {
    "Config": "base",
    "Options": "base",
    "EvalConfig": "eval",
    "Select": "eval",
    "completion_values": "json_schema",
    "schema": "json_schema",
    "keys": "loading",
    "load": "loading",
    "load_partial": "loading",
    "stage_of": "loading",
    "accepts_key": "loading",
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
    "accepts_key",
    "completion_values",
    "keys",
    "load",
    "load_partial",
    "schema",
    "stage_of",
]


def __getattr__(name: str) -> Any:
    """Import on first use: PPO as a library gets PPOSettings without yaml."""
    from importlib import import_module

    if name in _MODULES:
        return getattr(import_module(f"rlhf_cli.config.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
