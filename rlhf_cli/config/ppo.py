"""Config of ppo.yaml: reinforcement learning."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from rlhf_cli.config.adapters import PPOAdapters, TrainingConfig
from rlhf_cli.config.base import PROJECT, ModelPath, Name, Section
from rlhf_cli.config.common import ATTENTION, DTYPE, REVISION, STAGE, PPOData
from rlhf_cli.config.paths import PathField
from rlhf_cli.config.ppo_algorithm import WatchdogSettings
from rlhf_cli.config.ppo_options import PPOSettings
from rlhf_cli.config.rewards import KINDS, RewardSource
from rlhf_cli.config.sources import DataSource

VALUE_KEYWORDS = ("reward", "policy_head")


class PPOModels(Section):
    """Models of PPO. RUN is the run folder."""

    sft: ModelPath = Field(
        "RUN/sft",
        description=(
            "Initial policy and frozen reference: a folder or an id on the Hugging Face Hub. RUN/sft is the result of "
            f"the SFT stage. {PROJECT}"
        ),
    )
    reward: ModelPath = Field(
        "RUN/reward",
        description=(
            "Reward model: a folder or an id on the Hugging Face Hub. RUN/reward is the result of the reward stage. "
            f"{PROJECT}"
        ),
    )
    value: Annotated[str, PathField("value", VALUE_KEYWORDS)] = Field(
        "reward",
        description=(
            "Value model. reward: a separate model, initialised from the reward model. policy_head: a linear head on "
            "the policy, initialised to zero; it needs one forward pass for both and half the memory. Otherwise a "
            "folder or an id on the Hugging Face Hub to initialise from. [Ouyang et al. 2022, arXiv 2203.02155, "
            "section 3.5]"
        ),
    )
    revision: str | None = Field(None, description=REVISION)
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description=DTYPE)
    attn_implementation: str | None = Field(None, description=ATTENTION)
    adapters: PPOAdapters | None = Field(
        None,
        description=(
            "LoRA adapters to train for policy and value model instead of all weights. The frozen weights of the SFT "
            "model are loaded once for policy, reference, reward and value model, and only the adapters are saved. "
            "Default: all weights are trained. [TRL 1.16, trl/trainer/model_config.py; use_peft is false there]"
        ),
    )


class PPOConfig(TrainingConfig):
    """ppo.yaml: reinforcement learning."""

    stage: Literal["ppo"] = Field("ppo", description=STAGE)
    models: PPOModels = Field(default_factory=PPOModels, description="Models that PPO uses.")
    data: PPOData = Field(description="Prompts to train on.")
    rewards: dict[Name, RewardSource] = Field(
        default_factory=dict,
        description=(
            "Reward sources by name; their weighted sum is the score. Default: the reward model of models.reward. "
            "[TRL 1.12, trl/experimental/ppo/ppo_config.py; its reward_model_path]"
        ),
    )
    ppo: PPOSettings = Field(description="Options of PPO.")

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
    def _check_ptx(self) -> Self:
        if bool(self.ppo.ptx_coef) != bool(self.data.ptx_data):
            missing, given = (
                ("data.ptx_data", "ppo.ptx_coef") if self.ppo.ptx_coef else ("ppo.ptx_coef", "data.ptx_data")
            )
            hint = "the rows of SFT, e.g. data/sft.jsonl" if self.ppo.ptx_coef else "e.g. 27.8, as in InstructGPT"
            context = {
                "text": f"{given} has no effect without {missing}",
                "hint": f"set {missing}: {hint}",
                "key": given,
            }
            raise PydanticCustomError("C17", "{text}", context)
        return self

    @model_validator(mode="after")
    def _check_adapters(self) -> Self:
        for key in ("num_shared_layers", "offload", "fsdp"):
            if self.models.adapters and getattr(self.ppo, key):
                text = f"{key} cannot be combined with models.adapters, which share all layers"
                raise PydanticCustomError("C17", "{text}", {"text": text, "hint": "remove it", "key": f"ppo.{key}"})
        return self

    @model_validator(mode="after")
    def _check_reward_weights(self) -> Self:
        if self.rewards and len(self.held_out) == len(self.rewards):
            text = "all rewards have weight 0, so there is nothing to optimise"
            raise PydanticCustomError("C17", text, {"hint": "set the weight of at least one of them", "key": "rewards"})
        return self

    @model_validator(mode="after")
    def _check_watchdog_signals(self) -> Self:
        ensembles = [name for name, source in self.rewards.items() if source.models]
        needs = {
            "judge": (self.held_out, "a source of weight 0 in rewards"),
            "disagreement": (ensembles, "an ensemble in rewards"),
        }
        if (watchdog := self.ppo.watchdog) is None:
            return self
        for signal, (found, what) in needs.items():
            acts = signal in watchdog.actions
            if not found and (acts or getattr(watchdog, signal) != WatchdogSettings.model_fields[signal].default):
                key = f"ppo.watchdog.{'actions.' if acts else ''}{signal}"
                text = f"{key} has no effect without {what}"
                context = {"text": text, "hint": "docs/rewards.md has an example", "key": key}
                raise PydanticCustomError("C17", "{text}", context)
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
