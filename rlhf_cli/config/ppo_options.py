"""Options of the `ppo` section: recipes, requirements on the reward model, and all PPO settings."""

import math
from typing import Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from rlhf_cli.config.base import Settings
from rlhf_cli.config.ppo_algorithm import ObjectiveSettings, WatchdogSettings
from rlhf_cli.config.ppo_batches import LengthRange, OverlongPenalty, RolloutSettings
from rlhf_cli.config.ppo_optimization import TrainingSettings

PAGE = "[docs/rewards.md]"


class RewardRequirements(Settings):
    """Bounds on the report card of every reward model in rewards; omitted keys are not checked."""

    accuracy: float | None = Field(
        None, ge=0, le=1, description=f"Minimum accuracy on the evaluation pairs. Default: not checked. {PAGE}"
    )
    accuracy_low: float | None = Field(
        None,
        ge=0,
        le=1,
        description=(
            "Minimum lower bound of the 95 % confidence interval of the accuracy; above 0.5 it excludes guessing. "
            f"Default: not checked. {PAGE}"
        ),
    )
    ece: float | None = Field(
        None,
        ge=0,
        le=1,
        description=(
            "Maximum expected calibration error (Guo et al. 2017, arXiv 1706.04599, equation 3). Default: not "
            f"checked. {PAGE}"
        ),
    )
    length_correlation: float | None = Field(
        None,
        ge=0,
        le=1,
        description=f"Maximum absolute rank correlation of score and answer length. Default: not checked. {PAGE}",
    )

    @model_validator(mode="after")
    def _check_not_empty(self) -> Self:
        if not self.model_dump(exclude_none=True):
            hint = f"set one of {', '.join(type(self).model_fields)}, or remove it"
            raise PydanticCustomError("C17", "require_reward has no requirement", {"hint": hint})
        return self


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


__all__ = ["RECIPES", "LengthRange", "OverlongPenalty", "PPOSettings", "RewardRequirements", "WatchdogSettings"]

# Keys that have no effect by themselves -> the switch that enables them.
BELONGS_TO = {
    "target": "adap_kl_ctrl",
    "horizon": "adap_kl_ctrl",
    "target_kl": "early_stopping",
    "use_score_norm": "use_score_scaling",
}


class PPOSettings(TrainingSettings, ObjectiveSettings, RolloutSettings):
    """Options of PPO (Schulman et al. 2017, arXiv 1707.06347; for language models Ziegler et al. 2019, 1909.08593).

    Raises pydantic's ValidationError.
    """

    recipe: Literal["classic", "reasoning"] = Field(
        "classic",
        description=(
            "Set of defaults for the keys that the config omits. classic: RLHF on human preferences, as in TRL. "
            "reasoning: RL with verifiable rewards, as in OpenRLHF (one epoch, lambda 1, small KL penalty, higher "
            "learning rate of the value model). [TRL 1.12, trl/experimental/ppo/ppo_config.py]"
        ),
    )

    require_reward: RewardRequirements | None = Field(
        None,
        description=(
            "Minimum quality of the reward models, for example {accuracy: 0.6}. `rlhf ppo` and `rlhf check` reject a "
            "reward model whose report card is worse or missing (M11); PPOTrainer in Python does not check it. "
            "Default: no requirement. [docs/rewards.md]"
        ),
    )

    watchdog: WatchdogSettings | None = Field(
        default_factory=WatchdogSettings,
        description=(
            "Detection of reward hacking: limits for six signals, and the action if one is exceeded "
            "(docs/rewards.md). null turns it off. [docs/rewards.md]"
        ),
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in_recipe(cls, keys: Any) -> Any:
        recipe = keys.get("recipe") if isinstance(keys, dict) else None
        if not isinstance(recipe, str) or recipe not in RECIPES:
            return keys
        defaults = {key: value for key, (value, _) in RECIPES[recipe].items()}
        if "warmup_steps" in keys or keys.get("lr_scheduler_type") == "constant":
            defaults.pop("warmup_ratio", None)
        return {**defaults, **keys}

    @model_validator(mode="after")
    def _check_run_length(self) -> Self:
        if (self.total_episodes is None) == (self.num_train_epochs is None):
            raise PydanticCustomError(
                "C17", "set exactly one of total_episodes and num_train_epochs", {"hint": "e.g. total_episodes: 10000"}
            )
        return self

    @model_validator(mode="after")
    def _check_switches(self) -> Self:
        for key, switch in BELONGS_TO.items():
            if getattr(self, key) != type(self).model_fields[key].default and not getattr(self, switch):
                text = f"{key} has no effect without {switch}"
                raise PydanticCustomError("C17", "{text}", {"text": text, "hint": f"add {switch}: true", "key": key})
        return self

    @model_validator(mode="after")
    def _check_watchdog_action(self) -> Self:
        acting = {self.watchdog.action, *self.watchdog.actions.values()} if self.watchdog else set()
        if self.kl_coef == 0 and "raise_kl_coef" in acting:
            text = "watchdog: raise_kl_coef multiplies kl_coef, which is 0"
            raise PydanticCustomError("C17", text, {"hint": "set kl_coef above 0, e.g. 0.01", "key": "watchdog"})
        return self

    @model_validator(mode="after")
    def _check_value_only_updates(self) -> Self:
        if self.total_episodes is not None and (problem := self.value_only_problem(self.num_updates())):
            text, hint = problem
            raise PydanticCustomError("C17", "{text}", {"text": text, "hint": hint, "key": "value_only_updates"})
        return self

    @model_validator(mode="after")
    def _check_horizon(self) -> Self:
        if self.adap_kl_ctrl and 5 * self.horizon <= self.episodes_per_update:
            episodes = self.episodes_per_update
            text = f"horizon {self.horizon} lets one update of {episodes} episodes make kl_coef negative"
            hint = f"at least {episodes // 5 + 1}"
            raise PydanticCustomError("C06", "{text}", {"text": text, "hint": hint, "key": "horizon"})
        return self

    def across(self, processes: int) -> Self:
        """Return the settings of the global batch over `processes` processes.

        Raises pydantic's ValidationError if that batch does not fit the other keys.
        """
        parts = self.gradient_accumulation_steps * processes
        return type(self).model_validate({**self.model_dump(exclude_unset=True), "gradient_accumulation_steps": parts})

    def num_updates(self, prompt_count: int | None = None) -> int:
        """Return the number of updates; the last one is full too. num_train_epochs needs `prompt_count`."""
        if self.total_episodes is not None:
            return math.ceil(self.total_episodes / self.episodes_per_update)
        if prompt_count is None or self.num_train_epochs is None:
            raise ValueError("num_train_epochs needs the number of prompts")
        return math.ceil(self.num_train_epochs * prompt_count / self.prompts_per_update)

    def value_only_problem(self, updates: int) -> tuple[str, str] | None:
        """Return (error, hint) if value_only_updates leaves none of the `updates` to the policy, else None."""
        if self.value_only_updates < updates:
            return None
        text = f"value_only_updates {self.value_only_updates} leaves no updates for the policy out of {updates} updates"
        longer = "total_episodes" if self.total_episodes is not None else "num_train_epochs"
        return text, f"at most {updates - 1}" if updates > 1 else f"raise {longer}"

    def num_warmup(self, updates: int, *, value: bool = False) -> int:
        """Return the warm-up updates of the policy or of the value model, out of `updates`."""
        if value and self.value_warmup_steps is not None:
            return self.value_warmup_steps
        return self.warmup_steps if self.warmup_steps is not None else math.ceil((self.warmup_ratio or 0.0) * updates)
