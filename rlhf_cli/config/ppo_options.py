"""Options of the `ppo` section: recipes, requirements on the reward model, and all PPO settings."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rlhf_cli.config.base import Range, Section, invalid
from rlhf_cli.config.ppo_algorithm import ObjectiveSettings, TrainingSettings, WatchdogSettings

TokenId = Annotated[int, Field(ge=0)]


class LengthRange(Range):
    """Response length, sampled uniformly from min..max (inclusive) for each update."""


class OverlongPenalty(Section):
    """Penalty -factor x max(0, length - (limit - tokens)) / tokens, which grows over the last `tokens`."""

    tokens: int = Field(ge=1)
    factor: float = Field(gt=0)


class RolloutSettings(Section):
    """Episodes of a run and of an update, and sampling."""

    total_episodes: int | None = Field(None, ge=1)
    num_train_epochs: float | None = Field(None, gt=0)
    per_device_train_batch_size: int = Field(16, ge=1)
    gradient_accumulation_steps: int = Field(4, ge=1)
    num_mini_batches: int = Field(1, ge=1)
    num_ppo_epochs: int = Field(4, ge=1)
    num_samples_per_prompt: int = Field(1, ge=1)
    micro_batch_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    packing: bool = True
    logits_at_a_time: Annotated[int, Field(ge=1)] | Literal["auto", "all"] = "auto"
    local_rollout_forward_batch_size: int | None = Field(None, ge=1)
    num_sample_generations: int = Field(10, ge=0)
    generate_ref_response: bool = False

    push_to_hub_if_best: str | None = Field(None, pattern=r"^[\w.-]+/[\w.-]+$")

    response_length: Annotated[int, Field(ge=1)] | LengthRange = 53
    temperature: float = Field(0.7, gt=0)
    stop_token: Literal["eos", "none"] = "eos"
    stop_token_id: TokenId | Annotated[list[TokenId], Field(min_length=1)] | None = None
    missing_eos_penalty: float | None = Field(1.0, ge=0)
    overlong_penalty: OverlongPenalty | None = None

    @model_validator(mode="after")
    def _check_rollouts(self) -> Self:
        if self.stop_token == "none" and self.stop_token_id is not None:
            raise invalid("stop_token none and stop_token_id cannot be combined", "remove one of them")
        limit = self.response_length.min if isinstance(self.response_length, LengthRange) else self.response_length
        if self.overlong_penalty and self.overlong_penalty.tokens > limit:
            text = f"overlong_penalty.tokens {self.overlong_penalty.tokens} is more than response_length {limit}"
            raise invalid(text, f"at most {limit}", code="C06")
        batch = self.episodes_per_update
        for key in ("num_mini_batches", "num_samples_per_prompt"):
            parts = getattr(self, key)
            if batch % parts:
                divisors = [divisor for divisor in range(1, batch + 1) if batch % divisor == 0]
                near = sorted(sorted(divisors, key=lambda divisor: abs(divisor - parts))[:2])
                sizes = f"{self.per_device_train_batch_size} x {self.gradient_accumulation_steps}"
                text = f"{sizes} = {batch} episodes per update cannot be divided by {key} {parts}"
                raise invalid(text, f"nearest values that fit: {' or '.join(map(str, near))}", key, code="C12")
        return self

    @property
    def episodes_per_update(self) -> int:
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def prompts_per_update(self) -> int:
        return self.episodes_per_update // self.num_samples_per_prompt

    @property
    def max_response_length(self) -> int:
        return self.response_length.max if isinstance(self.response_length, LengthRange) else self.response_length


class RewardRequirements(Section):
    """Bounds on the report card of every reward model in rewards; omitted keys are not checked."""

    accuracy: float | None = Field(None, ge=0, le=1)
    accuracy_low: float | None = Field(None, ge=0, le=1)
    ece: float | None = Field(None, ge=0, le=1)
    length_correlation: float | None = Field(None, ge=0, le=1)

    @model_validator(mode="after")
    def _check_not_empty(self) -> Self:
        if not self.model_dump(exclude_none=True):
            hint = f"set one of {', '.join(type(self).model_fields)}, or remove it"
            raise invalid("require_reward has no requirement", hint)
        return self


@dataclass(frozen=True)
class TimesLearningRate:
    """Default of another learning rate: a multiple of `learning_rate`."""

    factor: float

    def __str__(self) -> str:
        return f"{self.factor:g} x learning_rate"


_OPENRLHF = "OpenRLHF 021d1b09, openrlhf/cli/train_ppo_ray.py"
_OURS = "docs/ppo.md, section Recipes"

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
    # The most reward at a KL: its exact gradient at a high price, a value model that learns fast, averaged weights.
    "frontier": {
        "kl_in": ("loss", _OURS),
        "kl_estimator": ("full", _OURS),
        "kl_coef": (0.25, f"{_OURS}; 0.5 on scores that are not normalised, of a deviation of 2"),
        "lam": (0.8, _OURS),
        "cliprange_value": (0.5, _OURS),
        "value_learning_rate": (TimesLearningRate(5), _OURS),
        "average": (0.9, _OURS),
    },
}


# Keys that have no effect by themselves -> the switch that enables them.
BELONGS_TO = {
    "target": "adap_kl_ctrl",
    "horizon": "adap_kl_ctrl",
    "target_kl": "early_stopping",
    "use_score_norm": "use_score_scaling",
}
# Keys without effect if there is no value model.
VALUE_KEYS = (
    "gamma", "lam", "cliprange_value", "vf_coef", "value_learning_rate", "value_warmup_steps", "value_only_updates",
)  # fmt: skip


def recipe_defaults(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of the recipe in the keys of `ppo`, without those that these keys exclude."""
    recipe = keys.get("recipe")
    defaults = {key: value for key, (value, _) in RECIPES.get(recipe if isinstance(recipe, str) else "", {}).items()}
    if "warmup_steps" in keys or keys.get("lr_scheduler_type") == "constant":
        defaults.pop("warmup_ratio", None)
    without_effect = VALUE_KEYS if keys.get("advantage", "gae") != "gae" else ()
    for key in (*without_effect, *(["average"] if keys.get("fsdp") else [])):
        defaults.pop(key, None)
    return defaults


class PPOSettings(TrainingSettings, ObjectiveSettings, RolloutSettings):
    """Options of PPO (Schulman et al. 2017, arXiv 1707.06347; for language models Ziegler et al. 2019, 1909.08593).

    Raises pydantic's ValidationError.
    """

    recipe: Literal["classic", "reasoning", "frontier"] = "classic"

    require_reward: RewardRequirements | None = None

    watchdog: WatchdogSettings | None = Field(default_factory=WatchdogSettings)

    @model_validator(mode="before")
    @classmethod
    def _fill_in_recipe(cls, keys: Any) -> Any:
        if not isinstance(keys, dict):
            return keys
        defaults = recipe_defaults(keys)
        for key, value in defaults.items():
            if isinstance(value, TimesLearningRate):
                rate = keys.get("learning_rate", cls.model_fields["learning_rate"].default)
                defaults[key] = float(f"{value.factor * rate:g}") if isinstance(rate, int | float) else None
        return {**defaults, **keys}

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if (self.total_episodes is None) == (self.num_train_epochs is None):
            raise invalid("set exactly one of total_episodes and num_train_epochs", "e.g. total_episodes: 10000")
        for key, switch in BELONGS_TO.items():
            if getattr(self, key) != type(self).model_fields[key].default and not getattr(self, switch):
                raise invalid(f"{key} has no effect without {switch}", f"add {switch}: true", key)
        self._check_group_advantage()
        acting = {self.watchdog.action, *self.watchdog.actions.values()} if self.watchdog else set()
        if self.kl_coef == 0 and "raise_kl_coef" in acting:
            text = "watchdog: raise_kl_coef multiplies kl_coef, which is 0"
            raise invalid(text, "set kl_coef above 0, e.g. 0.01", "watchdog")
        if self.total_episodes is not None and (problem := self.value_only_problem(self.num_updates())):
            raise invalid(*problem, "value_only_updates")
        if self.adap_kl_ctrl and 5 * self.horizon <= self.episodes_per_update:
            episodes = self.episodes_per_update
            text = f"horizon {self.horizon} lets one update of {episodes} episodes make kl_coef negative"
            raise invalid(text, f"at least {episodes // 5 + 1}", "horizon", code="C06")
        return self

    def _check_group_advantage(self) -> None:
        if self.needs_value_model:
            return
        if self.num_samples_per_prompt == 1:
            text = f"advantage {self.advantage} compares the responses to a prompt, and num_samples_per_prompt is 1"
            raise invalid(text, "set num_samples_per_prompt: 4, or another number of at least 2", "advantage")
        for key in VALUE_KEYS:
            if getattr(self, key) != type(self).model_fields[key].default:
                raise invalid(f"{key} has no effect with advantage {self.advantage}", "remove it", key)
        if self.whiten_rewards:  # it adds a constant to the reward of each token, and a return is the sum of them
            text = f"with advantage {self.advantage}, whiten_rewards would reward or penalize the length of a response"
            raise invalid(text, "remove it", "whiten_rewards")

    def usable(self, *, gpu: bool, processes: int, bf16: bool) -> Self:
        """Return the settings without what a machine does not support; bf16 is set."""
        supported = {"offload": self.offload and gpu, "fsdp": self.fsdp if processes > 1 else False}
        return self.model_copy(update={"bf16": bf16, **supported})

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
