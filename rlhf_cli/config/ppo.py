"""Config of ppo.yaml: reinforcement learning."""

from pathlib import Path
from pkgutil import iter_modules
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationError, model_validator

from rlhf_cli.config.base import ModelPath, Name, Section, invalid
from rlhf_cli.config.machinery.fields import PathField
from rlhf_cli.config.ppo_algorithm import WatchdogSettings
from rlhf_cli.config.ppo_options import PPOSettings
from rlhf_cli.config.sections import LoRA, PPOData, TrainingConfig
from rlhf_cli.errors import RLHFError

VALUE_KEYWORDS = ("reward", "policy_head", "none")
KINDS = ("model", "models", "function", "builtin", "url", "pipeline")
# Names of modules, which are not imported here.
VERIFIERS = tuple(module.name for module in iter_modules([str(Path(__file__).parents[1] / "rewards/verifiers")]))
BUILTINS = (*VERIFIERS, "length", "keyword", "repetition")
# Kind of source -> its options. Only the kinds that list an option accept it.
OPTIONS = {
    "models": ("combine", "std_coef"),
    "builtin": ("parameters",),
    "url": ("protocol", "timeout", "retries", "headers", "batch_size", "concurrency", "output"),
    "pipeline": ("label", "output", "input", "batch_size"),
}


def _env_name(name: str) -> str:
    if not (name.isidentifier() and name.isascii()):  # not shown: it may be the secret itself
        hint = "set the value in the environment, and write the variable's name here"
        raise invalid("not the name of an environment variable", hint, code="C16")
    return name


EnvName = Annotated[str, AfterValidator(_env_name)]


class RewardSource(Section):
    """Reward source. Its kind is the one key set among model, models, function, builtin, url and pipeline."""

    model: ModelPath | None = None
    models: dict[Name, ModelPath] = Field(default_factory=dict)
    function: str | None = Field(None, pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")
    builtin: str | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)
    url: str | None = Field(None, pattern=r"^https?://[^\s/@?#]+(/[^\s@#]*)?$")
    protocol: Literal["scores", "pooling", "classify", "rerank"] = "scores"
    timeout: float = Field(60.0, gt=0)
    retries: int = Field(3, ge=0, le=20)
    concurrency: int = Field(8, gt=0, le=256)
    headers: dict[str, EnvName] = Field(default_factory=dict)
    pipeline: ModelPath | None = None
    label: str | None = None
    output: Literal["logit", "probability"] = "logit"
    input: Literal["response", "both"] = "response"
    batch_size: int = Field(64, gt=0)
    combine: Literal["mean", "min", "mean_minus_std"] = "mean"
    std_coef: float = Field(1.0, ge=0)
    clip: float | None = Field(None, gt=0)
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
        for key in (option for options in OPTIONS.values() for option in options):
            kinds = [kind for kind, options in OPTIONS.items() if key in options]
            needs = "combine: mean_minus_std" if key == "std_coef" else " or ".join(kinds)
            used = self.kind in kinds and (key != "std_coef" or self.combine == "mean_minus_std")
            if key == "output" and self.kind == "url" and self.protocol == "scores":
                needs, used = "a protocol that can apply a sigmoid: pooling, classify or rerank", False
            if not used and getattr(self, key) != type(self).model_fields[key].get_default(call_default_factory=True):
                raise invalid(f"{key} has no effect without {needs}", "remove it", key)
        return self


class VLLMServer(Section):
    """A vLLM server that generates the responses. It must see the run's folder."""

    url: str = Field(pattern=r"^https?://[^\s/@?#]+$")
    sync: Literal["lora", "disk"] | None = None
    timeout: float = Field(600.0, gt=0)
    retries: int = Field(3, ge=0, le=20)
    wait: float = Field(600.0, ge=0)


class ServerEngine(Section):
    """Rollout engine outside of this process."""

    vllm: VLLMServer


class PPOModels(Section):
    """Models of PPO. RUN is the run folder."""

    sft: ModelPath = "RUN/sft"
    reward: ModelPath = "RUN/reward"
    value: Annotated[str, PathField("value", VALUE_KEYWORDS)] = "reward"
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    attn_implementation: str | None = None
    adapters: LoRA | None = None
    engine: Literal["auto", "hf", "graph"] | ServerEngine = "auto"
    compile: Literal["auto"] | bool = "auto"

    @property
    def server(self) -> VLLMServer | None:
        """Return the server that generates the responses, None if this process does."""
        return self.engine.vllm if isinstance(self.engine, ServerEngine) else None

    @property
    def server_sync(self) -> Literal["lora", "disk"]:
        """Return how a server gets the weights."""
        assert self.server
        return self.server.sync or ("lora" if self.adapters else "disk")


class PPOConfig(TrainingConfig):
    """ppo.yaml: reinforcement learning."""

    stage: Literal["ppo"] = "ppo"
    models: PPOModels = Field(default_factory=PPOModels)
    data: PPOData
    rewards: dict[Name, RewardSource] = Field(default_factory=dict)
    ppo: PPOSettings

    def engine_name(self, *, gpu: bool) -> Literal["hf", "graph", "vllm"]:
        """Return the name of the rollout engine on a GPU or a CPU."""
        if isinstance(self.models.engine, ServerEngine):
            return "vllm"
        if self.models.engine == "auto":
            return "graph" if gpu and not self.ppo.fsdp else "hf"
        return self.models.engine

    @model_validator(mode="before")
    @classmethod
    def _fill_in_value(cls, keys: Any) -> Any:
        """Fill in models.value: none if ppo.advantage needs no value model, policy_head if there is no reward model."""
        settings, models, rewards = keys.get("ppo"), keys.get("models") or {}, keys.get("rewards")
        if not isinstance(settings, dict) or not isinstance(models, dict):
            return keys
        if settings.get("advantage", "gae") != "gae":
            return {**keys, "models": {"value": "none", **models}}
        functions = isinstance(rewards, dict) and [source for source in rewards.values() if isinstance(source, dict)]
        if functions and not any({"model", "models"} & source.keys() for source in functions):
            return {**keys, "models": {"value": "policy_head", **models}}
        return keys

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
        if self.ppo.needs_value_model == (self.models.value == "none"):
            estimator, value = self.ppo.advantage, self.models.value
            text, hint = f"models.value {value} has no effect with ppo.advantage {estimator}", "remove it, or set none"
            if value == "none":
                text = f"ppo.advantage {estimator} needs a value model, and models.value is none"
                hint = "remove models.value, or set ppo.advantage: rloo"
            raise invalid(text, hint, "models.value")
        for key in ("num_shared_layers", "offload", "fsdp"):
            if self.models.adapters and getattr(self.ppo, key):
                text = f"{key} cannot be combined with models.adapters, which share all layers"
                raise invalid(text, "remove it", f"ppo.{key}")
        if self.models.engine not in ("auto", "hf") and self.ppo.fsdp:
            raise invalid("only engine: hf can sample from sharded weights", "set hf", "models.engine")
        if self.models.compile is True and self.ppo.fsdp:
            raise invalid("compile cannot be combined with ppo.fsdp", "set auto", "models.compile")
        if self.models.server and self.models.server_sync == "lora" and not self.models.adapters:
            text = "sync: lora sends adapters, and all weights are trained"
            raise invalid(text, "set disk, or models.adapters", "models.engine.vllm.sync")
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

    def identity(self) -> dict[str, Any]:
        """Return the keys that can change the result; a run can resume with a server at another address."""
        tree = super().identity()
        if self.models.server:
            tree["models"]["engine"] = {"vllm": {"sync": self.models.server_sync}}
        return tree

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
    count, layers = config.ppo.num_shared_layers or 0, model_config.get_text_config().num_hidden_layers
    if count >= layers:
        text = f"ppo.num_shared_layers {count} of {layers} layers leaves none to train"
        hint = f"set it to {layers - 1} at most" if layers > 1 else "remove it"
        raise RLHFError("C06", text, where=config.where("ppo.num_shared_layers"), hint=hint)
