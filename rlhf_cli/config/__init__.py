"""Configs: one YAML per stage, validated as a whole. Imports no torch, and its modules on first use."""

from typing import TYPE_CHECKING

from rlhf_cli import import_on_first_use

if TYPE_CHECKING:
    from rlhf_cli.config.machinery.json_schema import *  # noqa: F403
    from rlhf_cli.config.machinery.loading import *  # noqa: F403
    from rlhf_cli.config.stages import *  # noqa: F403

__getattr__ = import_on_first_use(
    __name__,
    {
        "config.machinery.json_schema": "completion_values schema",
        "config.machinery.loading": "accepts_key keys load",
        "config.stages": "CONFIGS Config PPOConfig",
    },
)
