"""Reward sources. A source is any callable `Rollout -> (B,) float32`, or `Rollout -> EnsembleScores`.

One file a kind, named as its key in ppo.yaml. A kind that reads text has a `make` of the config's section and `Place`;
the stage and `rlhf check` find it by the key's name.
"""

from rlhf_cli.ppo.rewards.function import (
    FunctionReward,
    answers,
    call_text_reward,
    leaving_no_bytecode,
    load_function,
)
from rlhf_cli.ppo.rewards.model import COMBINE, EnsembleReward, ModelReward, RetoldReward
from rlhf_cli.ppo.rewards.source import Place, RewardSource, TextReward, make

__all__ = [
    "COMBINE",
    "EnsembleReward",
    "FunctionReward",
    "ModelReward",
    "Place",
    "RetoldReward",
    "RewardSource",
    "TextReward",
    "answers",
    "call_text_reward",
    "leaving_no_bytecode",
    "load_function",
    "make",
]
