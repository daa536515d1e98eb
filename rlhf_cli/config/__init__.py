"""Configs: one YAML per stage, validated as a whole. Imports no torch, and its modules on first use."""

from typing import TYPE_CHECKING

from rlhf_cli import import_on_first_use

if TYPE_CHECKING:
    from rlhf_cli.config.json_schema import *  # noqa: F403
    from rlhf_cli.config.loading import *  # noqa: F403
    from rlhf_cli.config.stages import *  # noqa: F403

__getattr__ = import_on_first_use(
    __name__,
    {
        "config.json_schema": "schema",
        "config.loading": "accepts_key keys load",
        "config.base": "Config",
        "config.ppo": "PPOConfig",
        "config.stages": "CONFIGS",
    },
)
