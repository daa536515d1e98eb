"""Config of ppo.yaml: reinforcement learning."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from rlhf_cli.config.base import ModelPath, Name, Section, invalid
from rlhf_cli.config.common import ATTENTION, DTYPE, REVISION, STAGE, PPOAdapters, PPOData, TrainingConfig
from rlhf_cli.config.fields import PathField
from rlhf_cli.config.ppo_algorithm import WatchdogSettings
from rlhf_cli.config.ppo_options import PPOSettings
from rlhf_cli.config.sources import DataSource

VALUE_KEYWORDS = ("reward", "policy_head")
KINDS = ("model", "models", "function", "builtin", "url", "pipeline")
# Options that only some kinds of source accept.
OPTIONS = {
    "combine": ("models",),
    "std_coef": ("models",),
    "parameters": ("builtin",),
    "timeout": ("url",),
    "retries": ("url",),
    "headers": ("url",),
    "label": ("pipeline",),
    "output": ("pipeline",),
    "input": ("pipeline",),
    "batch_size": ("url", "pipeline"),
}
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _env_name(name: str) -> str:
    if not ENV_NAME.fullmatch(name):  # not shown: it may be the secret itself
        hint = "set the value in the environment, and write the variable's name here"
        raise invalid("not the name of an environment variable", hint, code="C16")
    return name


EnvName = Annotated[str, AfterValidator(_env_name)]


class RewardSource(Section):
    """Reward source. Its kind is the one key set among model, models, function, builtin, url and pipeline."""

    model: ModelPath | None = None
    """Reward model: a folder or an id on the Hugging Face Hub. If its tokenizer or chat template differs from the
    policy's, responses are decoded and encoded again for it. [docs/rewards.md]"""
    models: dict[Name, ModelPath] = Field(default_factory=dict)
    """Ensemble: reward models by name, whose scores `combine` reduces to one. [docs/rewards.md]"""
    function: str | None = Field(None, pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")
    """Python function module:function. It takes two lists, prompts and responses, and returns one number per response;
    it may be async. [docs/rewards.md]"""
    builtin: str | None = None
    """Built-in reward function: length, regex, keyword or repetition. docs/rewards.md lists their parameters.
    [docs/rewards.md]"""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Parameters of `builtin` by name. Default: those of the function. [docs/rewards.md]"""
    url: str | None = Field(None, pattern=r"^https?://[^\s/@?#]+(/[^\s@#]*)?$")
    """URL of an HTTP endpoint that receives {"prompts": [...], "responses": [...]} and returns {"scores": [...]}.
    [docs/rewards.md]"""
    timeout: float = Field(60.0, gt=0)
    """Timeout of a request to `url`, in seconds. Higher values tolerate a slow endpoint and notice a dead one later.
    [docs/rewards.md]"""
    retries: int = Field(3, ge=0, le=20)
    """Number of retries if `url` cannot be reached, times out, or returns status 429 or 5xx. The waits are 1, 2, 4, ...
    seconds, at most 30. [docs/rewards.md]"""
    headers: dict[str, EnvName] = Field(default_factory=dict)
    """HTTP headers for `url`. The value of each is the NAME of an environment variable, for example {Authorization:
    REWARD_AUTHORIZATION}; a config must not contain secrets. [docs/rewards.md]"""
    pipeline: ModelPath | None = None
    """Text classifier: a folder or an id on the Hugging Face Hub, run by the text-classification pipeline of
    transformers. [docs/rewards.md]"""
    label: str | None = None
    """Label of `pipeline` whose output is the reward. Required if the model has several. Default: its only label.
    [docs/rewards.md]"""
    output: Literal["logit", "probability"] = "logit"
    """Output of `pipeline` that is used as the reward: logit or probability. A probability saturates if the classifier
    is certain, so its differences vanish. [TRL 0.11, examples/notebooks/gpt2-sentiment.ipynb]"""
    input: Literal["response", "both"] = "response"
    """Input of `pipeline`: the response, or prompt and response joined (both). [docs/rewards.md]"""
    batch_size: int = Field(64, gt=0)
    """Number of rows per request to `url` or per batch of `pipeline`. Higher values are faster and need more memory.
    [docs/rewards.md]"""
    combine: Literal["mean", "min", "mean_minus_std"] = "mean"
    """Reduction of the ensemble's scores: mean, min, or mean_minus_std, the mean minus std_coef times the standard
    deviation (Coste et al. 2023, arXiv 2310.02743, uses the variance). The standard deviation is logged as
    objective/disagreement/NAME. [docs/rewards.md]"""
    std_coef: float = Field(1.0, ge=0)
    """Coefficient of the standard deviation for combine: mean_minus_std. Higher values punish disagreement more.
    [docs/rewards.md]"""
    clip: float | None = Field(None, gt=0)
    """Limit of this source's raw score: clipped to -clip .. clip before weighting. Lower values limit the effect of
    outliers. Default: no clipping. [docs/rewards.md]"""
    weight: float = 1.0
    """Weight of this source in the sum. 0 makes it a held-out judge: scored, logged and watched by ppo.watchdog, but
    not optimised; the first held-out judge selects the best policy. [docs/rewards.md]"""

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
        for key, kinds in OPTIONS.items():
            needs = "combine: mean_minus_std" if key == "std_coef" else " or ".join(kinds)
            used = self.kind in kinds and (key != "std_coef" or self.combine == "mean_minus_std")
            if not used and getattr(self, key) != type(self).model_fields[key].get_default(call_default_factory=True):
                raise invalid(f"{key} has no effect without {needs}", "remove it", key)
        return self


class PPOModels(Section):
    """Models of PPO. RUN is the run folder."""

    sft: ModelPath = "RUN/sft"
    """Initial policy and frozen reference: a folder or an id on the Hugging Face Hub. RUN/sft is the result of the SFT
    stage. [project]"""
    reward: ModelPath = "RUN/reward"
    """Reward model: a folder or an id on the Hugging Face Hub. RUN/reward is the result of the reward stage.
    [project]"""
    value: Annotated[str, PathField("value", VALUE_KEYWORDS)] = "reward"
    """Value model. reward: a separate model, initialised from the reward model. policy_head: a linear head on the
    policy, initialised to zero; it needs one forward pass for both and half the memory. Otherwise a folder or an id on
    the Hugging Face Hub to initialise from. [Ouyang et al. 2022, arXiv 2203.02155, section 3.5]"""
    revision: str | None = Field(None, description=REVISION)
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description=DTYPE)
    attn_implementation: str | None = Field(None, description=ATTENTION)
    adapters: PPOAdapters | None = None
    """LoRA adapters to train for policy and value model instead of all weights. The frozen weights of the SFT model are
    loaded once for policy, reference, reward and value model, and only the adapters are saved. Default: all weights are
    trained. [TRL model; use_peft is false there]"""


class PPOConfig(TrainingConfig):
    """ppo.yaml: reinforcement learning."""

    stage: Literal["ppo"] = Field("ppo", description=STAGE)
    models: PPOModels = Field(default_factory=PPOModels)
    """Models that PPO uses."""
    data: PPOData
    """Prompts to train on."""
    rewards: dict[Name, RewardSource] = Field(default_factory=dict)
    """Reward sources by name; their weighted sum is the score. Default: the reward model of models.reward. [TRL PPO;
    its reward_model_path]"""
    ppo: PPOSettings
    """Options of PPO."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_reward(cls, keys: Any) -> Any:
        """Fill in the reward model if there are no sources, or if `reward` has no kind."""
        models = keys.get("models") if isinstance(keys, dict) else None
        path = models.get("reward") if isinstance(models, dict) else None
        if path is None or not isinstance(keys.get("rewards"), dict | None):
            return keys
        sources = keys.get("rewards") or {"reward": {}}
        source = {} if sources.get("reward", 0) is None else sources.get("reward")
        if isinstance(source, dict) and not source.keys() & set(KINDS):
            sources = {**sources, "reward": {"model": path, **source}}
        return {**keys, "rewards": sources}

    @model_validator(mode="after")
    def _check_sections(self) -> Self:
        if bool(self.ppo.ptx_coef) != bool(self.data.ptx_data):
            key, missing, example = "ppo.ptx_coef", "data.ptx_data", "the rows of SFT, e.g. data/sft.jsonl"
            if self.data.ptx_data:
                key, missing, example = missing, key, "e.g. 27.8, as in InstructGPT"
            raise invalid(f"{key} has no effect without {missing}", f"set {missing}: {example}", key)
        for key in ("num_shared_layers", "offload", "fsdp"):
            if self.models.adapters and getattr(self.ppo, key):
                text = f"{key} cannot be combined with models.adapters, which share all layers"
                raise invalid(text, "remove it", f"ppo.{key}")
        if self.rewards and len(self.held_out) == len(self.rewards):
            text = "all rewards have weight 0, so there is nothing to optimise"
            raise invalid(text, "set the weight of at least one of them", "rewards")
        ensembles = [name for name, source in self.rewards.items() if source.models]
        needs = {
            "judge": (self.held_out, "a source of weight 0 in rewards"),
            "disagreement": (ensembles, "an ensemble in rewards"),
        }
        if (watchdog := self.ppo.watchdog) is None:
            return self
        for signal, (sources, what) in needs.items():
            acts = signal in watchdog.actions
            if not sources and (acts or getattr(watchdog, signal) != WatchdogSettings.model_fields[signal].default):
                key = f"ppo.watchdog.{'actions.' if acts else ''}{signal}"
                raise invalid(f"{key} has no effect without {what}", "docs/rewards.md has an example", key)
        return self

    @property
    def held_out(self) -> list[str]:
        """Return the names of the held-out judges, the sources of weight 0."""
        return [name for name, source in self.rewards.items() if source.weight == 0]

    def sources(self) -> dict[str, DataSource]:
        """Return the data sources that the stage reads, by key path."""
        return self.data.sources(self.where)

    def identity(self) -> dict[str, Any]:
        """Return the identity without connection options, so that a run can resume with another timeout."""
        tree = super().identity()
        for source in tree["rewards"].values():
            for key in ("timeout", "retries", "headers"):
                del source[key]
        return tree

    def code(self) -> dict[str, Path]:
        """Return the Python files of reward functions next to the config, by key path."""
        return self._beside({f"rewards.{name}.function": source.function for name, source in self.rewards.items()})
