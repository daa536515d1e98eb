"""eval.yaml: the comparison before and after."""

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from rlhf_cli.config.base import Config, JudgePath, ModelPath, Name, Section
from rlhf_cli.config.sections import ATTENTION, DTYPE, OWN_STAGES, STAGE, Dtype, EvalData
from rlhf_cli.config.sources import DataSource
from rlhf_cli.errors import nearest

AS_TRAINED = "[`pytest tests/test_stage_ppo.py::test_a_foreign_policy_needs_its_sampling_told`]"
COMPARISON = re.compile(r"(>=|<=|==|>|<)\s*([-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)")


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
            "[`pytest tests/test_eval_frontier.py -k snapshot_alone`]"
        ),
    )
    select: Name | Select | None = Field(
        None,
        description=(
            "Picks a policy of the frontier: the name of a judge, or {judge, kl_max}; the highest mean wins, and the "
            "smaller KL among equals. [`pytest tests/test_eval_frontier.py -k picked_unasked`]"
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

    def sources(self) -> dict[str, DataSource]:
        """Key path -> source, of all data that the stage reads."""
        return self.data.sources(self.where)

    def code(self) -> dict[str, Path]:
        """Key path -> Python file, of each judge that is a function whose module lies beside the config."""
        return self._beside({f"judges.{name}": judge for name, judge in self.judges.items()})
