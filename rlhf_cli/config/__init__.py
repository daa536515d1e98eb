"""Configs: one YAML a stage, checked as a whole before anything is loaded. Imports no torch."""

from rlhf_cli.config.base import Config, Options
from rlhf_cli.config.eval import EvalConfig, Select
from rlhf_cli.config.json_schema import schema
from rlhf_cli.config.load import keys, load, load_what_is_sound, takes
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.stages import CONFIGS, RewardConfig, SFTConfig
from rlhf_cli.config.which import stage_of
from rlhf_cli.config.words import listed

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
