"""Config of eval.yaml: comparison of the models before and after PPO."""

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from rlhf_cli.config.base import PROJECT, Config, JudgePath, ModelPath, Name, Section
from rlhf_cli.config.common import ATTENTION, DTYPE, STAGE, Dtype, EvalData
from rlhf_cli.config.sources import DataSource
from rlhf_cli.errors import closest_match

PAGE = "[docs/evaluation.md]"
COMPARISON = re.compile(r"(>=|<=|==|>|<)\s*([-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)")


class EvalModels(Section):
    """Models to compare. RUN is the run folder."""

    sft: ModelPath = Field(
        "RUN/sft",
        description=(
            "Model before PPO: a folder or an id on the Hugging Face Hub. RUN/sft is the result of the SFT stage. "
            f"{PROJECT}"
        ),
    )
    ppo: ModelPath = Field(
        "RUN/ppo",
        description=(
            "Model after PPO: a folder or an id on the Hugging Face Hub. RUN/ppo is the result of the PPO stage. "
            f"{PROJECT}"
        ),
    )
    reward: ModelPath | None = Field(
        "RUN/reward",
        description=(
            "Reward model that scores all models. Set null if PPO used functions only; judges.reward then names one "
            f"of them. RUN/reward is the result of the reward stage. {PROJECT}"
        ),
    )
    base: ModelPath | None = Field(
        None,
        description=(
            "Third model to compare, such as the one before SFT: a folder or an id on the Hugging Face Hub. Default: "
            f"only SFT and PPO are compared. {PAGE}"
        ),
    )
    dtype: Dtype = Field("auto", description=DTYPE)
    attn_implementation: str | None = Field(None, description=ATTENTION)


def _comparison(text: str) -> str:
    if not COMPARISON.fullmatch(text.strip()):
        raise PydanticCustomError("C07", "expected a comparison operator and a number", {"hint": 'e.g. ">= 0.6"'})
    return text


class Select(Section):
    """Selection of a policy from the frontier."""

    judge: Name = Field(
        description="Judge whose highest mean score selects the policy, preferably one that PPO was not trained on."
    )
    kl_max: float | None = Field(
        None,
        gt=0,
        description=(
            "Maximum KL from the SFT model, in nats per response, of the selected policy. Lower values select a "
            f"policy closer to SFT. Default: no limit. {PAGE}"
        ),
    )


class EvalSettings(Section):
    """Options of the comparison."""

    n: int = Field(
        512,
        gt=0,
        description=(
            "Number of prompts that each model answers, at most all prompts of the data. More prompts narrow the "
            f"confidence intervals and take more time. {PAGE}"
        ),
    )
    modes: list[Literal["sampled", "greedy"]] = Field(
        default=["sampled", "greedy"],
        min_length=1,
        description=(
            "Sampling modes of the answers: sampled (at the training temperature) and greedy (near-greedy, "
            f"temperature 0.01). Each mode takes a full round of answers. {PAGE}"
        ),
    )
    best_of: list[Annotated[int, Field(ge=2)]] = Field(
        default=[2, 4, 8],
        description=(
            "Values of n for best-of-n sampling from the SFT model by reward, the baseline that PPO has to beat. "
            f"Higher values are a stronger baseline and take more time; an empty list skips it. {PAGE}"
        ),
    )
    frontier: bool = Field(
        True,
        description=(
            "Evaluate the snapshots of the PPO run too, with one round of sampled answers each, for the "
            f"reward-against-KL curve. false saves that time. {PAGE}"
        ),
    )
    select: Name | Select | None = Field(
        None,
        description=(
            "Selection of a policy from the frontier: the name of a judge, or {judge, kl_max}. The policy with the "
            f"highest mean score is selected; ties go to the lower KL. Default: no selection. {PAGE}"
        ),
    )
    temperature: float | None = Field(
        None, gt=0, description=f"Sampling temperature. Default: the temperature of the PPO training. {PAGE}"
    )
    response_length: int | None = Field(
        None,
        gt=0,
        description=f"Maximum length of an answer in tokens. Default: the response length of the PPO training. {PAGE}",
    )
    per_device_batch_size: int = Field(
        64,
        gt=0,
        description=(
            "Number of answers generated together. Higher values are faster and need more memory. [TRL 1.12, "
            "trl/experimental/ppo/ppo_config.py; its local_rollout_forward_batch_size]"
        ),
    )
    require: dict[str, Annotated[str, AfterValidator(_comparison)]] = Field(
        default_factory=dict,
        description=(
            'Requirements on values of the report, for example {win_rate.ppo_vs_sft.gold.value: ">= 0.6"}. `rlhf '
            f"eval` exits with 1 if one is not met. The default requires nothing. {PAGE}"
        ),
    )

    @model_validator(mode="after")
    def _check_modes(self) -> Self:
        if "sampled" not in self.modes:
            raise PydanticCustomError(
                "C17", "the summary of the report needs sampled answers", {"hint": "add sampled to eval.modes"}
            )
        return self

    @property
    def selection(self) -> Select | None:
        """Return `select` as a Select."""
        return Select(judge=self.select) if isinstance(self.select, str) else self.select

    @model_validator(mode="after")
    def _check_selection(self) -> Self:
        if self.select is not None and not self.frontier:
            hint = "set eval.frontier: true, or remove eval.select"
            text = "eval.select needs the frontier"
            raise PydanticCustomError("C17", "{text}", {"text": text, "hint": hint, "key": "select"})
        selected_key = next((key for key in self.require if key.split(".")[0] in ("selected", "selected_step")), None)
        if selected_key is not None and self.select is None:
            context = {"text": f"eval.require: {selected_key} needs eval.select", "key": "require"}
            raise PydanticCustomError("C17", "{text}", {**context, "hint": "set eval.select to the name of a judge"})
        return self


def _judge_of(required: str) -> str | None:
    """Return the judge that a key of `eval.require` names."""
    match required.removeprefix("greedy.").split("."):
        case ["win_rate", _, judge, *_] | ["selected", "win_rate" | "judges", judge, *_]:
            return judge
    return None


class EvalConfig(Config):
    """eval.yaml: comparison of the models before and after PPO."""

    stage: Literal["eval"] = Field("eval", description=STAGE)
    models: EvalModels = Field(default_factory=EvalModels, description="Models to compare.")
    judges: dict[Name, JudgePath] = Field(
        default_factory=dict,
        description=(
            "Additional judges by name: a Python function module:function, or the folder or Hub id of a reward model. "
            f"The default is models.reward only. {PAGE}"
        ),
    )
    data: EvalData = Field(description="Prompts to answer.")
    eval: EvalSettings = Field(default_factory=EvalSettings, description="Options of the comparison.")

    @model_validator(mode="after")
    def _check_reward_judge(self) -> Self:
        if "reward" in self.judges and self.models.reward is not None:
            raise PydanticCustomError(
                "C17",
                "judges.reward: the name reward is reserved for models.reward",
                {"hint": "rename the judge, or set models.reward: null", "key": "judges.reward"},
            )
        if self.eval.best_of and self.models.reward is None and "reward" not in self.judges:
            raise PydanticCustomError(
                "C17",
                "eval.best_of needs a reward, but models.reward is null",
                {"hint": "add a judge named `reward`, or set eval.best_of: []", "key": "eval.best_of"},
            )
        return self

    @model_validator(mode="after")
    def _check_judge_names(self) -> Self:
        judges = {"reward", *self.judges} if self.models.reward else set(self.judges)
        named = [("eval.require", key, _judge_of(key)) for key in self.eval.require]
        if self.eval.selection:
            named.append(("eval.select", self.eval.selection.judge, self.eval.selection.judge))
        for location, key, judge in named:
            if judge is not None and judge not in judges:
                near = closest_match(judge, judges)
                hint = f"did you mean {near}?" if near else f"available judges: {', '.join(sorted(judges)) or 'none'}"
                text = f"{location}: {key} does not name a judge of this file"
                raise PydanticCustomError("C17", "{text}", {"text": text, "hint": hint, "key": location})
        return self

    def sources(self) -> dict[str, DataSource]:
        """Return the data sources that the stage reads, by key path."""
        return self.data.sources(self.where)

    def code(self) -> dict[str, Path]:
        """Return the Python files of judge functions next to the config, by key path."""
        return self._beside({f"judges.{name}": judge for name, judge in self.judges.items()})
