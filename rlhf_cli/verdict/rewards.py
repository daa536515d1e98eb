"""PPO's reward in words, the same wherever it is told: by whose answers. It is the score before the KL penalty."""

from collections.abc import Mapping
from typing import Any

LAST_UPDATE = "in the last update"  # of its sampled responses
TRAINING = "on training prompts"  # new responses of the finished policy
HELD_OUT = "held-out prompts"
UNPENALISED = "before the KL penalty"


def reward(metrics: Mapping[str, Any], of: str) -> str:
    """`reward 1.757 on training prompts`."""
    return f"reward {metrics['objective/scores']:.3f} {of}"
