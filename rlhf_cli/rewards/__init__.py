"""Reward sources. A source is any callable `Rollout -> (B,) float32`, or `-> EnsembleScores` for an ensemble.

`source.py` has the protocol. `model.py` has reward models and ensembles; every other file has one kind of reward that
reads text, with a `make` that builds it from its section in ppo.yaml.
"""

from rlhf_cli.rewards.function import FunctionReward, call_reward_fn, load_function, no_bytecode_files, score_texts
from rlhf_cli.rewards.model import COMBINE, EnsembleReward, ModelReward, RetokenizingReward
from rlhf_cli.rewards.source import RewardContext, RewardFn, RewardSource, make_reward_fn

__all__ = [
    "COMBINE",
    "EnsembleReward",
    "FunctionReward",
    "ModelReward",
    "RetokenizingReward",
    "RewardContext",
    "RewardFn",
    "RewardSource",
    "call_reward_fn",
    "load_function",
    "make_reward_fn",
    "no_bytecode_files",
    "score_texts",
]
