"""Config of eval.yaml: comparison of the models before and after PPO."""

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from rlhf_cli.config.base import Config, JudgePath, ModelPath, Name, Section, invalid
from rlhf_cli.config.common import ATTENTION, DTYPE, STAGE, Dtype, EvalData
from rlhf_cli.config.sources import DataSource
from rlhf_cli.errors import closest_match

COMPARISON = re.compile(r"(>=|<=|==|>|<)\s*([-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)")


class EvalModels(Section):
    """Models to compare. RUN is the run folder."""

    sft: ModelPath = "RUN/sft"
    """Model before PPO: a folder or an id on the Hugging Face Hub. RUN/sft is the result of the SFT stage. [project]"""
    ppo: ModelPath = "RUN/ppo"
    """Model after PPO: a folder or an id on the Hugging Face Hub. RUN/ppo is the result of the PPO stage. [project]"""
    reward: ModelPath | None = "RUN/reward"
    """Reward model that scores all models. Set null if PPO used functions only; judges.reward then names one of them.
    RUN/reward is the result of the reward stage. [project]"""
    base: ModelPath | None = None
    """Third model to compare, such as the one before SFT: a folder or an id on the Hugging Face Hub. Default: only SFT
    and PPO are compared. [docs/evaluation.md]"""
    dtype: Dtype = Field("auto", description=DTYPE)
    attn_implementation: str | None = Field(None, description=ATTENTION)


def _comparison(text: str) -> str:
    if not COMPARISON.fullmatch(text.strip()):
        raise invalid("expected a comparison operator and a number", 'e.g. ">= 0.6"', code="C07")
    return text


class Select(Section):
    """Selection of a policy from the frontier."""

    judge: Name
    """Judge whose highest mean score selects the policy, preferably one that PPO was not trained on."""
    kl_max: float | None = Field(None, gt=0)
    """Maximum KL from the SFT model, in nats per response, of the selected policy. Lower values select a policy closer
    to SFT. Default: no limit. [docs/evaluation.md]"""


class EvalSettings(Section):
    """Options of the comparison."""

    n: int = Field(512, gt=0)
    """Number of prompts that each model answers, at most all prompts of the data. More prompts narrow the confidence
    intervals and take more time. [docs/evaluation.md]"""
    modes: list[Literal["sampled", "greedy"]] = Field(default=["sampled", "greedy"], min_length=1)
    """Sampling modes of the answers: sampled (at the training temperature) and greedy (near-greedy, temperature 0.01).
    Each mode takes a full round of answers. [docs/evaluation.md]"""
    best_of: list[Annotated[int, Field(ge=2)]] = Field(default=[2, 4, 8])
    """Values of n for best-of-n sampling from the SFT model by reward, the baseline that PPO has to beat. Higher values
    are a stronger baseline and take more time; an empty list skips it. [docs/evaluation.md]"""
    frontier: bool = True
    """Evaluate the snapshots of the PPO run too, with one round of sampled answers each, for the reward-against-KL
    curve. false saves that time. [docs/evaluation.md]"""
    select: Name | Select | None = None
    """Selection of a policy from the frontier: the name of a judge, or {judge, kl_max}. The policy with the highest
    mean score is selected; ties go to the lower KL. Default: no selection. [docs/evaluation.md]"""
    temperature: float | None = Field(None, gt=0)
    """Sampling temperature. Default: the temperature of the PPO training. [docs/evaluation.md]"""
    response_length: int | None = Field(None, gt=0)
    """Maximum length of an answer in tokens. Default: the response length of the PPO training. [docs/evaluation.md]"""
    per_device_batch_size: int = Field(64, gt=0)
    """Number of answers generated together. Higher values are faster and need more memory. [TRL PPO; its
    local_rollout_forward_batch_size]"""
    require: dict[str, Annotated[str, AfterValidator(_comparison)]] = Field(default_factory=dict)
    """Requirements on values of the report, for example {win_rate.ppo_vs_sft.gold.value: ">= 0.6"}. `rlhf eval` exits
    with 1 if one is not met. The default requires nothing. [docs/evaluation.md]"""

    @property
    def selection(self) -> Select | None:
        """Return `select` as a Select."""
        return Select(judge=self.select) if isinstance(self.select, str) else self.select

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        if "sampled" not in self.modes:
            raise invalid("the summary of the report needs sampled answers", "add sampled to eval.modes")
        if self.select is not None and not self.frontier:
            hint = "set eval.frontier: true, or remove eval.select"
            raise invalid("eval.select needs the frontier", hint, "select")
        selected_key = next((key for key in self.require if key.split(".")[0] in ("selected", "selected_step")), None)
        if selected_key is not None and self.select is None:
            text = f"eval.require: {selected_key} needs eval.select"
            raise invalid(text, "set eval.select to the name of a judge", "require")
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
    models: EvalModels = Field(default_factory=EvalModels)
    """Models to compare."""
    judges: dict[Name, JudgePath] = Field(default_factory=dict)
    """Additional judges by name: a Python function module:function, or the folder or Hub id of a reward model. The
    default is models.reward only. [docs/evaluation.md]"""
    data: EvalData
    """Prompts to answer."""
    eval: EvalSettings = Field(default_factory=EvalSettings)
    """Options of the comparison."""

    @model_validator(mode="after")
    def _check_judges(self) -> Self:
        if "reward" in self.judges and self.models.reward is not None:
            text = "judges.reward: the name reward is reserved for models.reward"
            raise invalid(text, "rename the judge, or set models.reward: null", "judges.reward")
        if self.eval.best_of and self.models.reward is None and "reward" not in self.judges:
            text = "eval.best_of needs a reward, but models.reward is null"
            raise invalid(text, "add a judge named `reward`, or set eval.best_of: []", "eval.best_of")
        judges = {"reward", *self.judges} if self.models.reward else set(self.judges)
        references = [("eval.require", key, _judge_of(key)) for key in self.eval.require]
        if self.eval.selection:
            references.append(("eval.select", self.eval.selection.judge, self.eval.selection.judge))
        for location, key, judge in references:
            if judge is not None and judge not in judges:
                near = closest_match(judge, judges)
                hint = f"did you mean {near}?" if near else f"available judges: {', '.join(sorted(judges)) or 'none'}"
                raise invalid(f"{location}: {key} does not name a judge of this file", hint, location)
        return self

    def sources(self) -> dict[str, DataSource]:
        """Return the data sources that the stage reads, by key path."""
        return self.data.sources(self.where)

    def code(self) -> dict[str, Path]:
        """Return the Python files of judge functions next to the config, by key path."""
        return self._beside({f"judges.{name}": judge for name, judge in self.judges.items()})
