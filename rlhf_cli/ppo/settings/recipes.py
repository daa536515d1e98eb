"""Recipes of PPO: `ppo.recipe` selects the defaults of keys that a config omits."""

from typing import Any

_OPENRLHF = "OpenRLHF 021d1b09, openrlhf/cli/train_ppo_ray.py"

# Recipe -> key -> (default, source). classic, RLHF on human preferences, uses the keys' own defaults.
RECIPES: dict[str, dict[str, tuple[Any, str]]] = {
    "classic": {},
    # RL with verifiable rewards: one epoch per rollout, Monte Carlo returns, higher value learning rate.
    "reasoning": {
        "temperature": (1.0, _OPENRLHF),
        "response_length": (1024, _OPENRLHF),
        "missing_eos_penalty": (None, _OPENRLHF),
        "score_clip": (10.0, _OPENRLHF),
        "num_ppo_epochs": (1, _OPENRLHF),
        "num_mini_batches": (8, f"{_OPENRLHF}; batches of 128 out of 1024"),
        "kl_coef": (0.01, _OPENRLHF),
        "lam": (1.0, _OPENRLHF),
        "cliprange_value": (0.5, _OPENRLHF),
        "learning_rate": (1e-6, _OPENRLHF),
        "value_learning_rate": (9e-6, _OPENRLHF),
        "lr_scheduler_type": ("cosine_with_min_lr", _OPENRLHF),
        "warmup_ratio": (0.03, _OPENRLHF),
        "vf_coef": (1.0, f"{_OPENRLHF}; its value model has a separate optimizer"),
        "adam_beta2": (0.95, _OPENRLHF),
    },
}
