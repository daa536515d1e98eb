"""The four configs: sft.yaml, reward.yaml, ppo.yaml, eval.yaml."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from rlhf_cli.config.adapters import PPOAdapters, with_learning_rate
from rlhf_cli.config.base import Config, JudgePath, ModelPath, Name, Section
from rlhf_cli.config.keys import PathKey
from rlhf_cli.config.sections import (
    ATTENTION,
    DTYPE,
    OWN_STAGES,
    REVISION,
    Dtype,
    EvalData,
    PPOData,
    RewardData,
    RewardModel,
    SFTData,
    SFTModel,
)
from rlhf_cli.config.training import RewardSettings, SFTSettings
from rlhf_cli.errors import nearest
from rlhf_cli.ppo.settings import PPOSettings, WatchdogSettings
from rlhf_cli.sources import Source

STAGE = (
    "The stage that the file is for; optional, must match the command. "
    "[`pytest tests/test_check.py::test_the_stage_of_a_file`]"
)
TRAINER = (
    "Any other field of TRL's {}, by its own name, except what the pipeline sets itself; `rlhf explain trainer.NAME` "
    "tells of one. [TRL 1.16, trl/trainer/{}_config.py; its defaults stay in force]"
)
ENSEMBLE = "[`pytest tests/test_rewards.py`]"
ONE_KIND = "[`pytest tests/test_config_lines.py::test_a_bad_source_of_reward`]"
AS_TRAINED = "[`pytest tests/test_stage_ppo.py::test_a_foreign_policy_needs_its_sampling_told`]"
REMOTE = "[`pytest tests/test_rewards_url.py`]"
KINDS = ("model", "models", "function", "builtin", "url", "pipeline")
# The options of some kinds of source alone.
OPTIONS = {
    "combine": ("models",),
    "std_coef": ("models",),
    "parameters": ("builtin",),
    "timeout": ("url",),
    "retries": ("url",),
    "headers": ("url",),
    "label": ("pipeline",),
    "number": ("pipeline",),
    "reads": ("pipeline",),
    "batch_size": ("url", "pipeline"),
}


def _env_name(name: str) -> str:
    if not ENV_NAME.fullmatch(name):  # not shown: it may be the secret itself
        raise PydanticCustomError(
            "C16",
            "this is no name of an environment variable",
            {"hint": "put the value into the environment, and the variable's name here"},
        )
    return name


EnvName = Annotated[str, AfterValidator(_env_name)]
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
VALUE_WORDS = ("reward", "policy_head")
COMPARISON = re.compile(r"(>=|<=|==|>|<)\s*[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")


class SFTConfig(Config):
    """sft.yaml: supervised fine-tuning."""

    stage: Literal["sft"] = Field("sft", description=STAGE)
    model: SFTModel = Field(description="The model to start from.")
    data: SFTData = Field(description="The rows to train on.")
    sft: SFTSettings = Field(default_factory=SFTSettings, description="The numbers of the training.")
    trainer: dict[str, Any] = Field(default_factory=dict, description=TRAINER.format("SFTConfig", "sft"))

    @model_validator(mode="before")
    @classmethod
    def _adapters_learn_faster(cls, keys: Any) -> Any:
        return with_learning_rate(keys, "sft")

    def sources(self) -> dict[str, Source]:
        """Key path -> source, of all data that the stage reads."""
        found = self.data.sources(self.where)
        if self.model.new:
            key, name = "model.new.tokenizer.train", self.model.new.tokenizer.train
            # The very rows of data.train, of which data.subset and data.max_rows may be a part; else a source apart.
            same = found["data.train"] if name == self.data.train else Source(name)
            found[key] = replace(same, where=self.where(key), columns={}, share=None)
        return found


class RewardConfig(Config):
    """reward.yaml: reward modelling."""

    stage: Literal["reward"] = Field("reward", description=STAGE)
    model: RewardModel = Field(default_factory=RewardModel, description="The model to start from.")
    data: RewardData = Field(description="The pairs to train on.")
    reward: RewardSettings = Field(default_factory=RewardSettings, description="The numbers of the training.")
    trainer: dict[str, Any] = Field(default_factory=dict, description=TRAINER.format("RewardConfig", "reward"))

    @model_validator(mode="before")
    @classmethod
    def _adapters_learn_faster(cls, keys: Any) -> Any:
        return with_learning_rate(keys, "reward")

    @model_validator(mode="after")
    def _dropout_is_on(self) -> Self:
        adapters = self.model.adapters
        if adapters and adapters.lora_dropout and self.trainer.get("disable_dropout") is not False:
            text = "model.adapters.lora_dropout has no effect: reward training turns dropout off"
            hint = "set trainer.disable_dropout: false, or take lora_dropout out"
            raise PydanticCustomError("C17", text, {"hint": hint, "key": "model.adapters.lora_dropout"})
        return self

    def sources(self) -> dict[str, Source]:
        """Key path -> source, of all data that the stage reads."""
        return self.data.sources(self.where)


class PPOModels(Section):
    """The models that PPO works with. RUN is the run's folder."""

    sft: ModelPath = Field(
        "RUN/sft",
        description=(
            f"Start of the policy, and the frozen reference: a folder or a hub id; the SFT stage's result. {OWN_STAGES}"
        ),
    )
    reward: ModelPath = Field(
        "RUN/reward",
        description=f"The reward model: a folder or a hub id; the reward stage's result. {OWN_STAGES}",
    )
    value: Annotated[str, PathKey("value", VALUE_WORDS)] = Field(
        "reward",
        description=(
            "The value model: reward (starts as a copy of the reward model), policy_head (a head on the policy, zero "
            "at first: one forward pass for both and half the memory), or the start is a folder or a hub id. "
            "[Ouyang et al. 2022, arXiv 2203.02155, section 3.5]"
        ),
    )
    revision: str | None = Field(None, description=REVISION)
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description=DTYPE)
    attn_implementation: str | None = Field(None, description=ATTENTION)
    adapters: PPOAdapters | None = Field(
        None,
        description=(
            "Train adapters (LoRA) for policy and value model, and leave them alone on disk: the SFT model's frozen "
            "weights are there once for policy, reference, reward and value model; none: whole models are trained. "
            "docs/adapters.md tells more. [`pytest tests/test_one_base.py -k whole_models_unless`]"
        ),
    )


class RewardSource(Section):
    """One source of reward; the key that is set of model, models, function, builtin, url and pipeline is its kind."""

    model: ModelPath | None = Field(
        None,
        description=(
            "A reward model: a folder or a hub id. One of another tokenizer or chat template than the policy's reads "
            f"its text, encoded anew. {ONE_KIND}"
        ),
    )
    models: dict[Name, ModelPath] = Field(
        default_factory=dict,
        description=f"An ensemble: reward models by name, whose scores `combine` makes one of. {ENSEMBLE}",
    )
    function: str | None = Field(
        None,
        pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$",
        description=(
            "A Python function module:function of two lists, prompts and responses, that gives one number for each "
            f"response; it may be async. {ONE_KIND}"
        ),
    )
    builtin: str | None = Field(
        None,
        description=(
            f"A ready function: length, regex, keyword or repetition; docs/rewards.md has their parameters. {ONE_KIND}"
        ),
    )
    parameters: dict[str, Any] = Field(
        default_factory=dict,
        description="The parameters of `builtin`, by name. [`pytest tests/test_rewards_builtin.py`]",
    )
    url: str | None = Field(
        None,
        pattern=r"^https?://[^\s/@?#]+(/[^\s@#]*)?$",
        description=(
            'An HTTP endpoint: it is sent {"prompts": [...], "responses": [...]} and answers {"scores": [...]}. '
            f"{ONE_KIND}"
        ),
    )
    timeout: float = Field(60.0, gt=0, description=f"Seconds that `url` may take for an answer. {REMOTE}")
    retries: int = Field(
        3,
        ge=0,
        le=20,
        description=(
            "How often `url` is asked again where it cannot be reached, is too slow, or answers 429 or 5xx; after 1 "
            f"second, then 2, 4 and so on, 30 at most. {REMOTE}"
        ),
    )
    headers: dict[str, EnvName] = Field(
        default_factory=dict,
        description=(
            "HTTP headers for `url`, each with the NAME of the environment variable that holds its value, e.g. "
            f"{{Authorization: REWARD_AUTHORIZATION}}; a config holds no secrets. {REMOTE}"
        ),
    )
    pipeline: ModelPath | None = Field(
        None,
        description=(
            f"A text classifier: a folder or a hub id, read by transformers' text-classification pipeline. {ONE_KIND}"
        ),
    )
    label: str | None = Field(
        None,
        description=(
            "The label of `pipeline` whose number is the reward; none: the only one that the model has. "
            "[`pytest tests/test_rewards_pipeline.py`]"
        ),
    )
    number: Literal["logit", "probability"] = Field(
        "logit",
        description=(
            "Which number of `pipeline` is taken. A probability has next to no slope where the classifier is sure. "
            "[TRL 0.11, examples/notebooks/gpt2-sentiment.ipynb]"
        ),
    )
    reads: Literal["response", "both"] = Field(
        "response",
        description=(
            "What `pipeline` reads: the response, or the prompt and the response as one text. "
            "[`pytest tests/test_rewards_pipeline.py`]"
        ),
    )
    batch_size: int = Field(64, gt=0, description=f"Rows that `url` or `pipeline` gets at once. {REMOTE}")
    combine: Literal["mean", "min", "mean_minus_std"] = Field(
        "mean",
        description=(
            "How an ensemble's scores become one: their mean, the least, or the mean less std_coef times their "
            "standard deviation (Coste et al. 2023, arXiv 2310.02743, with the variance). The deviation is logged as "
            f"objective/disagreement/NAME. {ENSEMBLE}"
        ),
    )
    std_coef: float = Field(
        1.0, ge=0, description=f"Weight of the disagreement with combine: mean_minus_std. {ENSEMBLE}"
    )
    clip: float | None = Field(
        None, gt=0, description=f"This source's raw score is clipped to -clip .. clip before it is weighted. {ENSEMBLE}"
    )
    weight: float = Field(
        1.0,
        description=(
            "Factor of this source in the sum. 0 makes it a held-out judge: scored, logged, and watched by "
            "ppo.watchdog, but not optimised; the first of them says which policy is the best. "
            "[`pytest tests/test_config.py::test_rewards_default_to_the_reward_model`]"
        ),
    )

    @property
    def kind(self) -> str:
        """The key that says what the source is."""
        return next(kind for kind in KINDS if getattr(self, kind))

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if sum(bool(getattr(self, kind)) for kind in KINDS) != 1:
            raise PydanticCustomError(
                "C17",
                "give one of {kinds}",
                {
                    "kinds": f"{', '.join(KINDS[:-1])} and {KINDS[-1]}",
                    "hint": "the name `reward` alone means the reward model",
                },
            )
        if len(self.models) == 1:
            raise PydanticCustomError("C17", "an ensemble needs two models", {"hint": "write model: for a single one"})
        if self.clip is not None and self.weight == 0:
            text = "clip has no effect on a source of weight 0"
            raise PydanticCustomError("C17", text, {"hint": "take it out", "key": "clip"})
        for key, kinds in OPTIONS.items():
            needs = "combine: mean_minus_std" if key == "std_coef" else " or ".join(kinds)
            used = self.kind in kinds and (key != "std_coef" or self.combine == "mean_minus_std")
            if not used and getattr(self, key) != type(self).model_fields[key].get_default(call_default_factory=True):
                text = f"{key} has no effect without {needs}"
                raise PydanticCustomError("C17", "{text}", {"text": text, "hint": "take it out", "key": key})
        return self


class PPOConfig(Config):
    """ppo.yaml: reinforcement learning."""

    stage: Literal["ppo"] = Field("ppo", description=STAGE)
    models: PPOModels = Field(default_factory=PPOModels, description="The models to work with.")
    data: PPOData = Field(description="The prompts to train on.")
    rewards: dict[Name, RewardSource] = Field(
        default_factory=dict,
        description=(
            "Sources of reward by name, added up by weight; none: models.reward alone. "
            "[`pytest tests/test_config.py::test_rewards_default_to_the_reward_model`]"
        ),
    )
    ppo: PPOSettings = Field(description="The numbers of PPO.")

    @model_validator(mode="before")
    @classmethod
    def _adapters_learn_faster(cls, keys: Any) -> Any:
        return with_learning_rate(keys, "ppo")

    @model_validator(mode="before")
    @classmethod
    def _reward_by_default(cls, keys: Any) -> Any:
        """No sources, or `reward` without a kind: the reward model."""
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
    def _ptx_has_both(self) -> Self:
        if bool(self.ppo.ptx_coef) != bool(self.data.ptx_data):
            missing, given = (
                ("data.ptx_data", "ppo.ptx_coef") if self.ppo.ptx_coef else ("ppo.ptx_coef", "data.ptx_data")
            )
            hint = "name SFT's rows, e.g. data/sft.jsonl" if self.ppo.ptx_coef else "e.g. 27.8, as InstructGPT"
            context = {
                "text": f"{given} has no effect without {missing}",
                "hint": f"set {missing}: {hint}",
                "key": given,
            }
            raise PydanticCustomError("C17", "{text}", context)
        return self

    @model_validator(mode="after")
    def _layers_are_shared_once(self) -> Self:
        if self.models.adapters and self.ppo.num_shared_layers:
            text = "num_shared_layers has no effect with models.adapters, which share all layers"
            raise PydanticCustomError("C17", text, {"hint": "take it out", "key": "ppo.num_shared_layers"})
        return self

    @model_validator(mode="after")
    def _something_is_optimised(self) -> Self:
        if self.rewards and len(self.held_out) == len(self.rewards):
            text = "all rewards have weight 0: there is nothing to optimise"
            raise PydanticCustomError("C17", text, {"hint": "give one of them a weight", "key": "rewards"})
        return self

    @model_validator(mode="after")
    def _the_watchdog_has_what_it_watches(self) -> Self:
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
                context = {"text": text, "hint": "docs/reward-hacking.md shows one", "key": key}
                raise PydanticCustomError("C17", "{text}", context)
        return self

    @property
    def held_out(self) -> list[str]:
        """The held-out judges: sources of weight 0, which are scored and logged, and watched by the watchdog."""
        return [name for name, source in self.rewards.items() if source.weight == 0]

    def sources(self) -> dict[str, Source]:
        """Key path -> source, of all data that the stage reads."""
        return self.data.sources(self.where)

    def identity(self) -> dict[str, Any]:
        """Without how an endpoint is reached, too: where it fails, a run may go on with more patience."""
        tree = super().identity()
        for source in tree["rewards"].values():
            for key in ("timeout", "retries", "headers"):
                del source[key]
        return tree

    def code(self) -> dict[str, Path]:
        """Key path -> Python file, of each reward function whose module lies beside the config."""
        return self._beside({f"rewards.{name}.function": source.function for name, source in self.rewards.items()})


class EvalModels(Section):
    """The models to compare. RUN is the run's folder."""

    sft: ModelPath = Field(
        "RUN/sft", description=f"The model before PPO: a folder or a hub id; the SFT stage's result. {OWN_STAGES}"
    )
    ppo: ModelPath = Field(
        "RUN/ppo", description=f"The model after PPO: a folder or a hub id; the PPO stage's result. {OWN_STAGES}"
    )
    reward: ModelPath | None = Field(
        "RUN/reward",
        description=(
            "The reward model that both are scored with, the reward stage's result; null where PPO was trained on "
            f"functions alone: judges.reward then names one of them. {OWN_STAGES}"
        ),
    )
    base: ModelPath | None = Field(
        None,
        description=(
            "A third model to compare, such as the one before SFT: a folder or a hub id; none: two models. "
            "[`pytest tests/test_stage_ppo.py::test_eval_report_by_its_own_samples`]"
        ),
    )
    dtype: Dtype = Field("auto", description=DTYPE)
    attn_implementation: str | None = Field(None, description=ATTENTION)


def _comparison(text: str) -> str:
    if not COMPARISON.fullmatch(text.strip()):
        raise PydanticCustomError("C07", "expected a comparison and a number", {"hint": 'for example ">= 0.6"'})
    return text


class Select(Section):
    """How a policy of the frontier is picked."""

    judge: Name = Field(description="The judge whose mean is to be highest; best one that PPO was not trained on.")
    kl_max: float | None = Field(
        None,
        gt=0,
        description=(
            "Nats from the SFT model that the policy may be away at most; none: any distance. "
            "[`pytest tests/test_eval_frontier.py::test_the_best_within_a_bound_is_picked`]"
        ),
    )


class EvalSettings(Section):
    """How the models are compared."""

    n: int = Field(
        512,
        gt=0,
        description=(
            "Prompts answered by each model, at most as many as there are; 512 tell a win rate to about 0.04. "
            "[`pytest tests/test_defaults.py::test_512_prompts_tell_a_win_rate_to_about_four_hundredths`]"
        ),
    )
    modes: list[Literal["sampled", "greedy"]] = Field(
        default=["sampled", "greedy"],
        min_length=1,
        description=(
            "How answers are made: sampled at the training temperature, and near-greedy. "
            "[`pytest tests/test_stage_ppo.py::test_eval_report_by_its_own_samples`]"
        ),
    )
    best_of: list[Annotated[int, Field(ge=2)]] = Field(
        default=[2, 4, 8],
        description=(
            "The SFT model's best of n answers by the reward: what PPO has to beat. An empty list leaves it out. "
            "[`pytest tests/test_defaults.py::test_the_best_of_eight_is_over_a_nat_away`]"
        ),
    )
    frontier: bool = Field(
        True,
        description=(
            "Whether PPO's snapshots answer too, a round of sampled answers each: what was won and lost on the way. "
            "[`pytest tests/test_eval_frontier.py::test_the_frontier_is_each_snapshot_alone`]"
        ),
    )
    select: Name | Select | None = Field(
        None,
        description=(
            "Picks a policy of the frontier: the name of a judge, or {judge, kl_max}; the highest mean wins, and the "
            "smaller KL among equals. [`pytest tests/test_eval_frontier.py::test_nothing_is_picked_unasked`]"
        ),
    )
    temperature: float | None = Field(
        None, gt=0, description=f"Sampling temperature; none: that of the PPO training. {AS_TRAINED}"
    )
    response_length: int | None = Field(
        None, gt=0, description=f"Most tokens of an answer; none: that of the PPO training. {AS_TRAINED}"
    )
    per_device_batch_size: int = Field(
        64,
        gt=0,
        description=(
            "Answers made at once. [TRL 1.12, trl/experimental/ppo/ppo_config.py; its local_rollout_forward_batch_size]"
        ),
    )
    require: dict[str, Annotated[str, AfterValidator(_comparison)]] = Field(
        default_factory=dict,
        description=(
            'Values of the report that must hold, e.g. {win_rate.ppo_vs_sft.gold.value: ">= 0.6"}; else the command '
            "exits with 1. [`pytest tests/test_defaults.py::test_nothing_is_required_of_a_result_unasked`]"
        ),
    )

    @model_validator(mode="after")
    def _headline_is_sampled(self) -> Self:
        if "sampled" not in self.modes:
            raise PydanticCustomError(
                "C17", "the report's headline is of sampled answers", {"hint": "add sampled to modes"}
            )
        return self

    @property
    def selection(self) -> Select | None:
        """`select` in full."""
        return Select(judge=self.select) if isinstance(self.select, str) else self.select

    @model_validator(mode="after")
    def _selected_of_something(self) -> Self:
        if self.select is not None and not self.frontier:
            hint = "set eval.frontier: true, or take eval.select out"
            text = "eval.select picks a policy of the frontier"
            raise PydanticCustomError("C17", "{text}", {"text": text, "hint": hint, "key": "select"})
        asked = next((key for key in self.require if key.split(".")[0] in ("selected", "selected_step")), None)
        if asked is not None and self.select is None:
            context = {"text": f"eval.require: {asked} needs eval.select", "key": "require"}
            raise PydanticCustomError("C17", "{text}", {**context, "hint": "set eval.select to the name of a judge"})
        return self


def _judge_of(required: str) -> str | None:
    """The judge that a key of `eval.require` names."""
    match required.removeprefix("greedy.").split("."):
        case ["win_rate", _, judge, *_] | ["selected", "win_rate" | "judges", judge, *_]:
            return judge
    return None


class EvalConfig(Config):
    """eval.yaml: the comparison before and after."""

    stage: Literal["eval"] = Field("eval", description=STAGE)
    models: EvalModels = Field(default_factory=EvalModels, description="The models to compare.")
    judges: dict[Name, JudgePath] = Field(
        default_factory=dict,
        description=(
            "Further judges by name: a Python function module:function, or a reward model's folder or hub id. "
            "[`pytest tests/test_defaults.py::test_the_reward_model_is_the_one_judge_unasked`]"
        ),
    )
    data: EvalData = Field(description="The prompts to answer.")
    eval: EvalSettings = Field(default_factory=EvalSettings, description="How they are compared.")

    @model_validator(mode="after")
    def _one_reward(self) -> Self:
        if "reward" in self.judges and self.models.reward is not None:
            raise PydanticCustomError(
                "C17",
                "judges.reward: the name reward belongs to models.reward",
                {"hint": "give the judge another name, or set models.reward: null", "key": "judges.reward"},
            )
        if self.eval.best_of and self.models.reward is None and "reward" not in self.judges:
            raise PydanticCustomError(
                "C17",
                "eval.best_of picks answers by the reward, and models.reward is null",
                {"hint": "name a judge `reward`, or set eval.best_of: []", "key": "eval.best_of"},
            )
        return self

    @model_validator(mode="after")
    def _named_judges_are_there(self) -> Self:
        judges = {"reward", *self.judges} if self.models.reward else set(self.judges)
        named = [("eval.require", key, _judge_of(key)) for key in self.eval.require]
        if self.eval.selection:
            named.append(("eval.select", self.eval.selection.judge, self.eval.selection.judge))
        for place, key, judge in named:
            if judge is not None and judge not in judges:
                near = nearest(judge, judges)
                hint = f"did you mean {near}?" if near else f"there are {', '.join(sorted(judges)) or 'none'}"
                text = f"{place}: {key} names no judge of this file"
                raise PydanticCustomError("C17", "{text}", {"text": text, "hint": hint, "key": place})
        return self

    def sources(self) -> dict[str, Source]:
        """Key path -> source, of all data that the stage reads."""
        return self.data.sources(self.where)

    def code(self) -> dict[str, Path]:
        """Key path -> Python file, of each judge that is a function whose module lies beside the config."""
        return self._beside({f"judges.{name}": judge for name, judge in self.judges.items()})


CONFIGS: dict[str, type[Config]] = {"sft": SFTConfig, "reward": RewardConfig, "ppo": PPOConfig, "eval": EvalConfig}
