"""Every key of `ppo:`, defined once: type, bounds, default, meaning. Torch-free, so that a config loads in a blink.

Names are those of TRL's PPO. A validator that refuses a combination raises
`PydanticCustomError(CODE, text, {"hint": fix})`; the config floor turns it into `error[CODE]`.
"""

import math
from typing import Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from rlhf_cli.ppo.settings.objective import ObjectiveSettings
from rlhf_cli.ppo.settings.recipes import RECIPES
from rlhf_cli.ppo.settings.requirements import RewardRequirements
from rlhf_cli.ppo.settings.rollouts import LengthRange, OverlongPenalty, RolloutSettings
from rlhf_cli.ppo.settings.training import TrainingSettings
from rlhf_cli.ppo.settings.watchdog import WatchdogSettings

__all__ = ["RECIPES", "LengthRange", "OverlongPenalty", "PPOSettings", "RewardRequirements", "WatchdogSettings"]

# Keys that do nothing by themselves -> the switch that they belong to.
BELONGS_TO = {
    "target": "adap_kl_ctrl",
    "horizon": "adap_kl_ctrl",
    "target_kl": "early_stopping",
    "use_score_norm": "use_score_scaling",
}


class PPOSettings(TrainingSettings, ObjectiveSettings, RolloutSettings):
    """The numbers of PPO (Schulman et al. 2017, arXiv 1707.06347; for language models Ziegler et al. 2019, 1909.08593).

    Raises pydantic's ValidationError.
    """

    recipe: Literal["classic", "reasoning"] = Field(
        "classic",
        description=(
            "Defaults of the keys that are left out: classic, RLHF on human preferences as in TRL; reasoning, RL on "
            "rewards that can be checked as in OpenRLHF (one epoch, lambda 1, small KL penalty, quicker value "
            "model). [TRL 1.12, trl/experimental/ppo/ppo_config.py]"
        ),
    )

    require_reward: RewardRequirements | None = Field(
        None,
        description=(
            "{accuracy: 0.6, ...}: `rlhf ppo` and `rlhf check` refuse reward models whose report card shows less, or "
            "that have none; a trainer made in Python does not look. [`pytest tests/test_require_reward.py`]"
        ),
    )

    watchdog: WatchdogSettings | None = Field(
        default_factory=WatchdogSettings,
        description=(
            "Signs that the policy games its reward, and what is done about them (docs/rewards.md); null: "
            "nothing is watched. [`pytest tests/test_watchdog.py`]"
        ),
    )

    @model_validator(mode="before")
    @classmethod
    def _start_from_the_recipe(cls, keys: Any) -> Any:
        recipe = keys.get("recipe") if isinstance(keys, dict) else None
        if not isinstance(recipe, str) or recipe not in RECIPES:
            return keys
        defaults = {key: value for key, (value, _) in RECIPES[recipe].items()}
        if "warmup_steps" in keys or keys.get("lr_scheduler_type") == "constant":
            defaults.pop("warmup_ratio", None)
        return {**defaults, **keys}

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.total_episodes is None) == (self.num_train_epochs is None):
            raise PydanticCustomError(
                "C17", "give one of total_episodes and num_train_epochs", {"hint": "e.g. total_episodes: 10000"}
            )
        return self

    @model_validator(mode="after")
    def _nothing_without_effect(self) -> Self:
        for key, switch in BELONGS_TO.items():
            if getattr(self, key) != type(self).model_fields[key].default and not getattr(self, switch):
                text = f"{key} has no effect without {switch}"
                raise PydanticCustomError("C17", "{text}", {"text": text, "hint": f"add {switch}: true", "key": key})
        return self

    @model_validator(mode="after")
    def _the_watchdog_has_something_to_multiply(self) -> Self:
        acting = {self.watchdog.action, *self.watchdog.actions.values()} if self.watchdog else set()
        if self.kl_coef == 0 and "raise_kl_coef" in acting:
            text = "watchdog: raise_kl_coef multiplies kl_coef, and 0 stays 0"
            raise PydanticCustomError("C17", text, {"hint": "set kl_coef above 0, e.g. 0.01", "key": "watchdog"})
        return self

    @model_validator(mode="after")
    def _the_policy_gets_its_turn(self) -> Self:
        if self.total_episodes is not None and (told := self.no_turn(self.num_updates())):
            text, hint = told
            raise PydanticCustomError("C17", "{text}", {"text": text, "hint": hint, "key": "value_only_updates"})
        return self

    @model_validator(mode="after")
    def _penalty_stays_positive(self) -> Self:
        if self.adap_kl_ctrl and 5 * self.horizon <= self.episodes_per_update:
            episodes = self.episodes_per_update
            text = f"horizon {self.horizon} lets one update of {episodes} episodes make kl_coef negative"
            hint = f"at least {episodes // 5 + 1}"
            raise PydanticCustomError("C06", "{text}", {"text": text, "hint": hint, "key": "horizon"})
        return self

    def across(self, processes: int) -> Self:
        """The settings of so many processes together, each with its own per_device_train_batch_size rows at a time.

        Raises pydantic's ValidationError where their larger batches do not go with the other keys.
        """
        parts = self.gradient_accumulation_steps * processes
        return type(self).model_validate({**self.model_dump(exclude_unset=True), "gradient_accumulation_steps": parts})

    def num_updates(self, prompt_count: int | None = None) -> int:
        """Updates of the whole run; the last one is whole too. `prompt_count` is needed with num_train_epochs."""
        if self.total_episodes is not None:
            return math.ceil(self.total_episodes / self.episodes_per_update)
        if prompt_count is None or self.num_train_epochs is None:
            raise ValueError("num_train_epochs needs the number of prompts")
        return math.ceil(self.num_train_epochs * prompt_count / self.prompts_per_update)

    def no_turn(self, updates: int) -> tuple[str, str] | None:
        """What is wrong where value_only_updates leaves the policy none of `updates`, and how to mend it; else None."""
        if self.value_only_updates < updates:
            return None
        text = f"value_only_updates {self.value_only_updates} leaves the policy none of {updates} updates"
        longer = "total_episodes" if self.total_episodes is not None else "num_train_epochs"
        return text, f"at most {updates - 1}" if updates > 1 else f"raise {longer}"

    def num_warmup(self, updates: int, *, value: bool = False) -> int:
        """Updates of warm-up out of `updates`, of the policy or of the value model."""
        if value and self.value_warmup_steps is not None:
            return self.value_warmup_steps
        return self.warmup_steps if self.warmup_steps is not None else math.ceil((self.warmup_ratio or 0.0) * updates)
