"""Config of ppo.yaml: reward sources, models, and all options of PPO."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pkgutil import iter_modules
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from rlhf_cli.config.base import ModelPath, Name
from rlhf_cli.config.judges import OpenAIJudge
from rlhf_cli.config.machinery.fields import PathField
from rlhf_cli.config.machinery.section import (
    AboveOne,
    AtLeastOne,
    BelowOne,
    InsideUnitInterval,
    Section,
    UnitInterval,
    invalid,
)
from rlhf_cli.config.sections import LoRA, PPOData, Range, TrainingConfig
from rlhf_cli.errors import RLHFError

# Reward sources and models: `rewards` and `models`

VALUE_KEYWORDS = ("reward", "policy_head", "none")
KINDS = ("model", "models", "function", "builtin", "url", "pipeline", "openai")
# Names of modules, which are not imported here.
VERIFIERS = tuple(module.name for module in iter_modules([str(Path(__file__).parents[1] / "rewards/verifiers")]))
BUILTINS = (*VERIFIERS, "length", "keyword", "repetition")
# Option of a source -> the kinds that have it.
KINDS_WITH = {
    "combine": ("model", "models"),
    "std_coef": ("model", "models"),
    "parameters": ("builtin",),
    "protocol": ("url",),
    "timeout": ("url",),
    "retries": ("url",),
    "headers": ("url",),
    "batch_size": ("url", "pipeline"),
    "concurrency": ("url",),
    "output": ("url", "pipeline"),
    "label": ("pipeline",),
    "input": ("pipeline",),
}


def _env_name(name: str) -> str:
    if not (name.isidentifier() and name.isascii()):  # not shown: it may be the secret itself
        hint = "set the value in the environment, and write the variable's name here"
        raise invalid("not the name of an environment variable", hint, code="C16")
    return name


EnvName = Annotated[str, AfterValidator(_env_name)]


class RewardSourceSettings(Section):
    """Reward source. Its kind is the one key set among KINDS."""

    model: ModelPath | None = None
    models: dict[Name, ModelPath] = Field(default_factory=dict)
    function: str | None = Field(None, pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")
    builtin: str | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)
    url: str | None = Field(None, pattern=r"^https?://[^\s/@?#]+(/[^\s@#]*)?$")
    protocol: Literal["scores", "pooling", "classify", "rerank"] = "scores"
    timeout: PositiveFloat = 60.0
    retries: int = Field(3, ge=0, le=20)
    concurrency: int = Field(8, gt=0, le=256)
    headers: dict[str, EnvName] = Field(default_factory=dict)
    pipeline: ModelPath | None = None
    openai: OpenAIJudge | None = None
    label: str | None = None
    output: Literal["logit", "probability"] = "logit"
    input: Literal["response", "both"] = "response"
    batch_size: PositiveInt = 64
    combine: Literal["mean", "min", "mean_minus_std"] = "mean"
    std_coef: NonNegativeFloat = 1.0
    clip: PositiveFloat | None = None
    weight: float = 1.0

    @property
    def kind(self) -> str:
        """Return the key that sets the kind of the source."""
        return next(kind for kind in KINDS if getattr(self, kind))

    @model_validator(mode="after")
    def _check_kind_and_options(self) -> Self:
        if sum(bool(getattr(self, kind)) for kind in KINDS) != 1:
            text = f"set exactly one of {', '.join(KINDS[:-1])} and {KINDS[-1]}"
            raise invalid(text, "a source named `reward` without a kind is the reward model")
        if len(self.models) == 1:
            raise invalid("an ensemble needs at least two models", "use model for a single one")
        if self.clip is not None and self.weight == 0:
            raise invalid("clip has no effect on a source of weight 0", "remove it", "clip")

        for key in KINDS_WITH:
            missing = self._missing(key)
            if missing and not self.is_default(key):
                raise invalid(f"{key} has no effect without {missing}", "remove it", key)
        return self

    def _missing(self, key: str) -> str | None:
        """Return what an option needs to have an effect and this source lacks, or None."""
        if key == "std_coef" and self.combine != "mean_minus_std":
            return "combine: mean_minus_std"
        if key == "output" and self.kind == "url" and self.protocol == "scores":
            return "a protocol that can apply a sigmoid: pooling, classify or rerank"
        kinds = KINDS_WITH[key]
        return None if self.kind in kinds else " or ".join(kinds)


ServerAddress = Annotated[str, Field(pattern=r"^https?://[^\s/@?#]+$")]
ServerAddresses = Annotated[list[ServerAddress], Field(min_length=1)]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _require_different(urls: list[str]) -> list[str]:
    if len(set(urls)) < len(urls):
        raise invalid("url names a server twice", "give each server once")
    return urls


class VLLMServerSettings(Section):
    """vLLM servers that generate the responses. They must see the run's folder."""

    url: Annotated[
        ServerAddresses,
        BeforeValidator(_as_list, json_schema_input_type=ServerAddress | ServerAddresses),
        AfterValidator(_require_different),
    ]
    sync: Literal["lora", "disk"] | None = None
    timeout: PositiveFloat = 600.0
    retries: int = Field(3, ge=0, le=20)
    wait: NonNegativeFloat = 600.0
    sleep: bool = False


class ServerEngine(Section):
    """Rollout engine outside of this process."""

    vllm: VLLMServerSettings


EngineChoice = Literal["auto", "hf", "graph"] | ServerEngine


def server_of(engine: EngineChoice) -> VLLMServerSettings | None:
    """Return the servers that generate the responses, None if this process does."""
    return engine.vllm if isinstance(engine, ServerEngine) else None


def engine_name(engine: EngineChoice, *, gpu: bool, sharded: bool = False) -> Literal["hf", "graph", "vllm"]:
    """Return the name of the engine that a choice is on a GPU or a CPU."""
    if isinstance(engine, ServerEngine):
        return "vllm"
    if engine == "auto":
        return "graph" if gpu and not sharded else "hf"
    return engine


class PPOModelSettings(Section):
    """Models of PPO. RUN is the run folder."""

    sft: ModelPath = "RUN/sft"
    policy: ModelPath | None = None
    reward: ModelPath = "RUN/reward"
    value: Annotated[str, PathField("value", VALUE_KEYWORDS)] = "reward"
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    attn_implementation: str | None = None
    adapters: LoRA | None = None
    engine: EngineChoice = "auto"
    compile: Literal["auto"] | bool = "auto"

    @property
    def server(self) -> VLLMServerSettings | None:
        """Return the server that generates the responses, None if this process does."""
        return server_of(self.engine)

    @property
    def server_sync(self) -> Literal["lora", "disk"]:
        """Return how a server gets the weights."""
        assert self.server
        return self.server.sync or ("lora" if self.adapters else "disk")


# The section `ppo`


class RolloutCorrection(Section):
    """Importance weights of the policy loss, for engines whose draws differ slightly from the policy's."""

    mode: Literal["token_truncate", "sequence_mask"]
    cap: AboveOne = 3.0


class ObjectiveSettings(Section):
    """Scores, KL penalty, advantages, clipped losses and early stopping."""

    # Scores
    use_score_scaling: bool = False
    use_score_norm: bool = False
    score_clip: PositiveFloat | None = None

    # KL penalty
    kl_coef: NonNegativeFloat = 0.05
    kl_in: Literal["reward", "loss", "both"] = "reward"
    kl_estimator: Literal["k1", "k2", "k3", "abs", "full"] = "k1"
    adap_kl_ctrl: bool = False
    target: PositiveFloat = 6.0
    horizon: PositiveInt = 10000
    kl_stop: PositiveFloat | None = None
    max_logprob_gap: PositiveFloat = 0.1
    rollout_correction: RolloutCorrection | None = None

    # Rewards and advantages
    whiten_rewards: bool = False
    advantage: Literal["gae", "rloo", "grpo"] = "gae"
    advantage_norm: Literal["batch", "none"] = "batch"
    gamma: float = Field(1.0, gt=0, le=1)
    lam: UnitInterval = 0.95

    # Loss
    cliprange: InsideUnitInterval = 0.2
    cliprange_high: PositiveFloat | None = None
    dual_clip: AboveOne | None = None
    cliprange_value: PositiveFloat = 0.2
    vf_coef: NonNegativeFloat = 0.1
    entropy_coef: NonNegativeFloat = 0.0
    ptx_coef: NonNegativeFloat = 0.0

    # Early stopping
    early_stopping: bool = False
    target_kl: PositiveFloat = 1.0
    ratio_threshold: AboveOne | None = 10.0

    @property
    def kl_in_reward(self) -> bool:
        """True if the token rewards have the KL penalty."""
        return self.kl_in in ("reward", "both")

    @property
    def kl_in_loss(self) -> bool:
        """True if the loss has the KL penalty."""
        return self.kl_in in ("loss", "both")

    @property
    def exact_kl_in_loss(self) -> bool:
        """True if the loss compares all next tokens of policy and reference: it needs the reference's logits."""
        return self.kl_in_loss and self.kl_estimator == "full"

    @property
    def needs_value_model(self) -> bool:
        """True if the advantages are those of a value model, not of the other responses to a prompt."""
        return self.advantage == "gae"

    @model_validator(mode="after")
    def _check_kl(self) -> Self:
        if self.kl_in == "loss" and self.kl_estimator in ("k1", "abs"):
            text = f"kl_estimator {self.kl_estimator} in the loss does not have the gradient of the KL"
            raise invalid(f"{text} (that of k1 is zero on average)", "set kl_estimator: full, k2 or k3")
        if self.kl_in == "both":
            self._check_kl_in_both()
        if self.adap_kl_ctrl and self.kl_coef == 0:
            text = "adap_kl_ctrl multiplies kl_coef, which is 0"
            raise invalid(text, "set kl_coef: 0.2, the default of TRL's controller")
        return self

    def _check_kl_in_both(self) -> None:
        """Raise ValueError if the KL in the reward and that in the loss would not be one penalty."""
        if self.kl_estimator != "full":
            text = f"kl_in both with kl_estimator {self.kl_estimator} would count the KL of a token twice"
            raise invalid(text, "set kl_estimator: full")
        if self.advantage == "grpo":
            text = "kl_in both does not work with advantage grpo, which scales the reward of each group"
            raise invalid(text, "set kl_in: loss")
        if self.whiten_rewards:
            text = "kl_in both does not work with whiten_rewards, which scales the KL in the reward"
            raise invalid(text, "remove it")


SCHEDULERS = Literal[
    "linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt", "cosine_with_min_lr"
]


def _refuse_fp16(value: object) -> object:
    if value is True:
        text = "PPO cannot train in fp16: log-prob differences underflow, and there is no loss scaler"
        raise invalid(text, "set bf16: true")
    return value


class TrainingSettings(Section):
    """Options of AdamW, which trains policy and value model with separate learning rates."""

    learning_rate: NonNegativeFloat = 3e-6
    value_learning_rate: NonNegativeFloat | None = None
    lr_scheduler_type: SCHEDULERS = "linear"
    warmup_steps: NonNegativeInt | None = None
    warmup_ratio: BelowOne | None = None
    value_warmup_steps: NonNegativeInt | None = None
    value_only_updates: NonNegativeInt = 0
    weight_decay: NonNegativeFloat = 0.0
    optim: Literal["adamw_torch_fused", "adamw_torch", "adamw_8bit"] = "adamw_torch_fused"
    adam_beta1: BelowOne = 0.9
    adam_beta2: BelowOne = 0.999
    adam_epsilon: PositiveFloat = 1e-8
    max_grad_norm: PositiveFloat = 1.0
    average: InsideUnitInterval | None = None
    num_shared_layers: AtLeastOne | None = None
    gradient_checkpointing: bool = False
    offload: bool = False
    fsdp: bool | Literal["hybrid"] = False
    bf16: bool | None = None
    fp16: Annotated[bool, BeforeValidator(_refuse_fp16)] = False

    @model_validator(mode="after")
    def _check_training(self) -> Self:
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise invalid("warmup_steps and warmup_ratio cannot be combined", "remove warmup_ratio")
        warmup_keys = [key for key in ("warmup_steps", "warmup_ratio", "value_warmup_steps") if getattr(self, key)]
        if warmup_keys and self.lr_scheduler_type == "constant":
            raise invalid(f"{warmup_keys[0]} has no effect with lr_scheduler_type constant", "set constant_with_warmup")
        if self.fsdp and self.num_shared_layers:
            text = "fsdp shards layers and cannot be combined with num_shared_layers, which shares them between models"
            raise invalid(text, "remove one of them")
        if self.fsdp and self.optim == "adamw_8bit":
            raise invalid("fsdp cannot be combined with optim: adamw_8bit", "remove one of them")
        if self.fsdp and self.average:
            raise invalid("fsdp cannot be combined with average, which is of whole weights", "remove one of them")
        if self.offload and self.num_shared_layers:
            text = "offload cannot be combined with num_shared_layers, whose layers the policy uses"
            raise invalid(text, "remove offload; num_shared_layers saves more")
        return self


Signal = Literal["judge", "disagreement", "kl", "length", "repetition", "eos"]
Action = Literal["warn", "raise_kl_coef", "stop"]
SIGNALS: tuple[Signal, ...] = get_args(Signal)
# Message of each signal beyond its limit; the fields are those of a line in watchdog.jsonl.
SIGNAL_MESSAGES: dict[Signal, str] = {
    "judge": "the mean of the held-out judge `{source}` is {reading:.4g}, its best was {reference:.4g}; "
    "limit: {limit:g} standard errors",
    "disagreement": "the standard deviation between the members of `{source}` is {reading:.4g}, on the initial "
    "policy's responses {reference:.4g}; limit: {limit:g} times that",
    "kl": "KL to the SFT policy is {reading:.4g} nats per token; limit: {limit:g}",
    "length": "the mean response length is {reading:.4g} tokens, the initial policy's {reference:.4g}; limit: a factor "
    "of {limit:g}",
    "repetition": "{reading:.1%} of the 3-grams are repeated, the initial policy's {reference:.1%}; limit: "
    "+{limit:.1%}",
    "eos": "{reading:.1%} of the responses have a stop token, of the initial policy's {reference:.1%}; limit: "
    "{limit:.1%} less",
}


class WatchdogSettings(Section):
    """Limit of each signal (null: not watched), and the action if it is exceeded.

    A reading is the mean over the responses of the last `window` updates. It is compared with the initial policy,
    that is, with the responses of the first update.
    """

    action: Action = "warn"
    actions: dict[Signal, Action] = Field(default_factory=dict)
    window: AtLeastOne = 3
    kl_factor: AboveOne = 1.5
    judge: PositiveFloat | None = 4.0
    disagreement: AboveOne | None = 2.0
    kl: PositiveFloat | None = 0.5
    length: AboveOne | None = 2.0
    repetition: InsideUnitInterval | None = 0.1
    eos: InsideUnitInterval | None = 0.2

    def action_on(self, signal: Signal) -> Action:
        """Return the action for a signal beyond its limit."""
        return self.actions.get(signal, self.action)

    @model_validator(mode="after")
    def _check_actions(self) -> Self:
        for signal in self.actions:
            if getattr(self, signal) is None:
                text = f"watchdog.actions.{signal} has no effect: watchdog.{signal} is null"
                raise invalid(text, f"set a limit for {signal}")
        acting = {self.action_on(signal) for signal in SIGNALS if getattr(self, signal) is not None}
        if "raise_kl_coef" not in acting and not self.is_default("kl_factor"):
            text = "watchdog.kl_factor has no effect: no action is raise_kl_coef"
            raise invalid(text, "set watchdog.action: raise_kl_coef")
        return self


TokenId = NonNegativeInt


class LengthRange(Range):
    """Response length, sampled uniformly from min..max (inclusive) for each update."""


class OverlongPenalty(Section):
    """Penalty -factor x max(0, length - (limit - tokens)) / tokens, which grows over the last `tokens`."""

    tokens: AtLeastOne
    factor: PositiveFloat


class RolloutSettings(Section):
    """Episodes of a run and of an update, and sampling."""

    total_episodes: AtLeastOne | None = None
    num_train_epochs: PositiveFloat | None = None
    per_device_train_batch_size: AtLeastOne = 16
    gradient_accumulation_steps: AtLeastOne = 4
    num_mini_batches: AtLeastOne = 1
    num_ppo_epochs: AtLeastOne = 4
    num_samples_per_prompt: AtLeastOne = 1
    micro_batch_tokens: AtLeastOne | Literal["auto"] = "auto"
    packing: bool = True
    logits_at_a_time: AtLeastOne | Literal["auto", "all"] = "auto"
    local_rollout_forward_batch_size: AtLeastOne | None = None
    num_sample_generations: NonNegativeInt = 10
    generate_ref_response: bool = False

    push_to_hub_if_best: str | None = Field(None, pattern=r"^[\w.-]+/[\w.-]+$")

    response_length: AtLeastOne | LengthRange = 53
    temperature: PositiveFloat = 0.7
    stop_token: Literal["eos", "none"] = "eos"
    stop_token_id: TokenId | Annotated[list[TokenId], Field(min_length=1)] | None = None
    missing_eos_penalty: NonNegativeFloat | None = 1.0
    overlong_penalty: OverlongPenalty | None = None

    @model_validator(mode="after")
    def _check_rollouts(self) -> Self:
        if self.stop_token == "none" and self.stop_token_id is not None:
            raise invalid("stop_token none and stop_token_id cannot be combined", "remove one of them")
        length = self.response_length
        shortest = length.min if isinstance(length, LengthRange) else length
        if self.overlong_penalty and self.overlong_penalty.tokens > shortest:
            text = f"overlong_penalty.tokens {self.overlong_penalty.tokens} is more than response_length {shortest}"
            raise invalid(text, f"at most {shortest}", code="C06")
        self._check_divides_the_batch("num_mini_batches", self.num_mini_batches)
        self._check_divides_the_batch("num_samples_per_prompt", self.num_samples_per_prompt)
        return self

    def _check_divides_the_batch(self, key: str, parts: int) -> None:
        batch = self.episodes_per_update
        if batch % parts == 0:
            return
        divisors = [divisor for divisor in range(1, batch + 1) if batch % divisor == 0]
        divisors.sort(key=lambda divisor: abs(divisor - parts))
        nearest = [str(divisor) for divisor in sorted(divisors[:2])]
        sizes = f"{self.per_device_train_batch_size} x {self.gradient_accumulation_steps}"
        text = f"{sizes} = {batch} episodes per update cannot be divided by {key} {parts}"
        raise invalid(text, f"nearest values that fit: {' or '.join(nearest)}", key, code="C12")

    @property
    def episodes_per_update(self) -> int:
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def prompts_per_update(self) -> int:
        return self.episodes_per_update // self.num_samples_per_prompt

    @property
    def max_response_length(self) -> int:
        length = self.response_length
        return length.max if isinstance(length, LengthRange) else length


class RewardRequirements(Section):
    """Bounds on the report card of every reward model in rewards; omitted keys are not checked."""

    accuracy: UnitInterval | None = None
    accuracy_low: UnitInterval | None = None
    ece: UnitInterval | None = None
    length_correlation: UnitInterval | None = None

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
        "kl_in": ("both", _OURS),
        "kl_estimator": ("full", _OURS),
        "kl_coef": (0.15, f"{_OURS}; 0.33 on scores that are not normalised, of a deviation of 2"),
        "lam": (0.8, _OURS),
        "cliprange_value": (0.5, _OURS),
        "value_learning_rate": (TimesLearningRate(5), _OURS),
        "average": (0.98, _OURS),
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
    changes = RECIPES.get(recipe, {}) if isinstance(recipe, str) else {}
    excluded: set[str] = set()
    if "warmup_steps" in keys or keys.get("lr_scheduler_type") == "constant":
        excluded.add("warmup_ratio")
    if keys.get("advantage", "gae") != "gae":
        excluded.update(VALUE_KEYS)
    if keys.get("fsdp"):
        excluded.add("average")
    return {key: value for key, (value, _) in changes.items() if key not in excluded}


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
                is_number = isinstance(rate, int | float)
                defaults[key] = float(f"{value.factor * rate:g}") if is_number else None
        return {**defaults, **keys}

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if (self.total_episodes is None) == (self.num_train_epochs is None):
            raise invalid("set exactly one of total_episodes and num_train_epochs", "e.g. total_episodes: 10000")
        for key, switch in BELONGS_TO.items():
            if not self.is_default(key) and not getattr(self, switch):
                raise invalid(f"{key} has no effect without {switch}", f"add {switch}: true", key)
        self._check_group_advantage()

        watchdog = self.watchdog
        acting = {watchdog.action, *watchdog.actions.values()} if watchdog else set()
        if self.kl_coef == 0 and "raise_kl_coef" in acting:
            text = "watchdog: raise_kl_coef multiplies kl_coef, which is 0"
            raise invalid(text, "set kl_coef above 0, e.g. 0.01", "watchdog")

        problem = self.value_only_problem(self.num_updates()) if self.total_episodes else None
        if problem:
            raise invalid(*problem, "value_only_updates")

        episodes = self.episodes_per_update
        if self.adap_kl_ctrl and 5 * self.horizon <= episodes:
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
            if not self.is_default(key):
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
        keys = self.model_dump(exclude_unset=True)
        keys["gradient_accumulation_steps"] = self.gradient_accumulation_steps * processes
        return type(self).model_validate(keys)

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
        if updates > 1:
            return text, f"at most {updates - 1}"
        return text, "raise total_episodes" if self.total_episodes else "raise num_train_epochs"

    def num_warmup(self, updates: int, *, value: bool = False) -> int:
        """Return the warm-up updates of the policy or of the value model, out of `updates`."""
        if value and self.value_warmup_steps is not None:
            return self.value_warmup_steps
        if self.warmup_steps is not None:
            return self.warmup_steps
        return math.ceil((self.warmup_ratio or 0.0) * updates)


# The file


class PPOConfig(TrainingConfig):
    """ppo.yaml: reinforcement learning."""

    stage: Literal["ppo"] = "ppo"
    models: PPOModelSettings = Field(default_factory=PPOModelSettings)
    data: PPOData
    rewards: dict[Name, RewardSourceSettings] = Field(default_factory=dict)
    ppo: PPOSettings

    @classmethod
    def chosen_defaults(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """Return the defaults that the recipe replaces."""
        return recipe_defaults(settings)

    def engine_name(self, *, gpu: bool) -> Literal["hf", "graph", "vllm"]:
        """Return the name of the rollout engine on a GPU or a CPU."""
        return engine_name(self.models.engine, gpu=gpu, sharded=bool(self.ppo.fsdp))

    @model_validator(mode="before")
    @classmethod
    def _fill_in_value(cls, keys: Any) -> Any:
        """Fill in models.value: none if ppo.advantage needs no value model, policy_head if there is no reward model."""
        settings = keys.get("ppo")
        models = keys.get("models") or {}
        rewards = keys.get("rewards")
        if not isinstance(settings, dict) or not isinstance(models, dict):
            return keys
        if settings.get("advantage", "gae") != "gae":
            return {**keys, "models": {"value": "none", **models}}

        sources = list(rewards.values()) if isinstance(rewards, dict) else []
        kinds = [source.keys() for source in sources if isinstance(source, dict)]
        has_reward_model = any("model" in kind or "models" in kind for kind in kinds)
        if kinds and not has_reward_model:
            return {**keys, "models": {"value": "policy_head", **models}}
        return keys

    @model_validator(mode="before")
    @classmethod
    def _fill_in_reward(cls, keys: Any) -> Any:
        """Fill in the reward model if there are no sources, or if `reward` has no kind."""
        models = keys.get("models")
        sources = keys.get("rewards")
        if sources is None or sources == {}:
            sources = {"reward": {}}
        if not isinstance(models, dict) or not isinstance(sources, dict) or models.get("reward") is None:
            return keys

        source = sources.get("reward", "absent")
        has_kind = isinstance(source, dict) and source.keys() & set(KINDS)
        if isinstance(source, dict | None) and not has_kind:
            sources = {**sources, "reward": {"model": models["reward"], **(source or {})}}
        return {**keys, "rewards": sources}

    @model_validator(mode="after")
    def _check_sections(self) -> Self:
        self._check_ptx()
        self._check_value_model()
        self._check_engine_and_sharding()
        if self.rewards and len(self.held_out) == len(self.rewards):
            text = "all rewards have weight 0, so there is nothing to optimise"
            raise invalid(text, "set the weight of at least one of them", "rewards")
        if self.ppo.watchdog is not None:
            self._check_signals(self.ppo.watchdog)
        return self

    def _check_ptx(self) -> None:
        if self.ppo.ptx_coef and not self.data.ptx_data:
            hint = "set data.ptx_data: the rows of SFT, e.g. data/sft.jsonl"
            raise invalid("ppo.ptx_coef has no effect without data.ptx_data", hint, "ppo.ptx_coef")
        if self.data.ptx_data and not self.ppo.ptx_coef:
            hint = "set ppo.ptx_coef: e.g. 27.8, as in InstructGPT"
            raise invalid("data.ptx_data has no effect without ppo.ptx_coef", hint, "data.ptx_data")

    def _check_value_model(self) -> None:
        estimator = self.ppo.advantage
        value = self.models.value
        if self.ppo.needs_value_model and value == "none":
            text = f"ppo.advantage {estimator} needs a value model, and models.value is none"
            raise invalid(text, "remove models.value, or set ppo.advantage: rloo", "models.value")
        if not self.ppo.needs_value_model and value != "none":
            text = f"models.value {value} has no effect with ppo.advantage {estimator}"
            raise invalid(text, "remove it, or set none", "models.value")

    def _check_engine_and_sharding(self) -> None:
        for key in ("num_shared_layers", "offload", "fsdp"):
            if self.models.adapters and getattr(self.ppo, key):
                text = f"{key} cannot be combined with models.adapters, which share all layers"
                raise invalid(text, "remove it", f"ppo.{key}")
        if self.models.engine == "graph" and self.ppo.fsdp:
            raise invalid("engine: graph cannot sample from sharded weights", "set hf", "models.engine")
        if self.models.compile is True and self.ppo.fsdp:
            raise invalid("compile cannot be combined with ppo.fsdp", "set auto", "models.compile")
        if self.models.server and self.models.server_sync == "lora" and not self.models.adapters:
            text = "sync: lora sends adapters, and all weights are trained"
            raise invalid(text, "set disk, or models.adapters", "models.engine.vllm.sync")

    def _check_signals(self, watchdog: WatchdogSettings) -> None:
        """Refuse settings of a signal that no source of the rewards gives."""
        ensembles = [name for name, source in self.rewards.items() if source.models or source.model]
        needs = {
            "judge": (self.held_out, "a source of weight 0 in rewards"),
            "disagreement": (ensembles, "an ensemble in rewards"),
        }
        for signal, (sources, what) in needs.items():
            if sources:
                continue
            has_action = signal in watchdog.actions
            if has_action or not watchdog.is_default(signal):
                key = f"ppo.watchdog.actions.{signal}" if has_action else f"ppo.watchdog.{signal}"
                raise invalid(f"{key} has no effect without {what}", "docs/reward-hacking.md has an example", key)

    def identity(self) -> dict[str, Any]:
        """Return the keys that can change the result; a run can resume with a server at another address."""
        tree = super().identity()
        if self.models.server:
            tree["models"]["engine"] = {"vllm": {"sync": self.models.server_sync}}
        for source in tree["rewards"].values():
            if source["openai"] is None:
                del source["openai"]  # as an older version recorded it
                continue
            for key in OpenAIJudge.OF_TRANSPORT:
                del source["openai"][key]
        return tree

    @property
    def reward_judges(self) -> dict[str, OpenAIJudge]:
        """Return the sources that are language models, by name."""
        return {name: source.openai for name, source in self.rewards.items() if source.openai is not None}

    @property
    def held_out(self) -> list[str]:
        """Return the names of the held-out judges, the sources of weight 0."""
        return [name for name, source in self.rewards.items() if source.weight == 0]


def scale_to_world_size(config: PPOConfig, world_size: int) -> PPOConfig:
    """Multiply the batch sizes by the number of processes. Raises RLHFError C06 if they conflict with other keys."""
    if world_size == 1:
        return config
    try:
        return config.model_copy(update={"ppo": config.ppo.across(world_size)})
    except ValidationError as error:
        text = f"in {world_size} processes: {error.errors()[0]['msg']}"
        raise RLHFError("C06", text, where=config.where("ppo"), hint="smaller batches, or fewer processes") from error


def check_num_shared_layers(config: PPOConfig, model_config: Any) -> None:
    """Raise RLHFError C06 if ppo.num_shared_layers leaves no layer to train."""
    count = config.ppo.num_shared_layers or 0
    layers = model_config.get_text_config().num_hidden_layers
    if count >= layers:
        text = f"ppo.num_shared_layers {count} of {layers} layers leaves none to train"
        hint = f"set it to {layers - 1} at most" if layers > 1 else "remove it"
        raise RLHFError("C06", text, where=config.where("ppo.num_shared_layers"), hint=hint)
