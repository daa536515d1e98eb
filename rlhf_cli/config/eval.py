"""Config of eval.yaml: comparison of the models before and after PPO."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from rlhf_cli.config.base import Config, JudgePath, ModelPath, Name, Section, invalid
from rlhf_cli.config.common import Dtype, EvalData
from rlhf_cli.config.ppo import BUILTINS
from rlhf_cli.errors import did_you_mean

RESERVED_NAMES = re.compile(r"base|sft|ppo|reward|best_of_\d+|ppo_step_.*|interpolated_.*|.*_vs_.*")
DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")  # module.function, which is no hub id
COMPARISON = re.compile(r"(>=|<=|==|>|<)\s*([-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)")


class EvalModels(Section):
    """Models to compare. RUN is the run folder."""

    sft: ModelPath = "RUN/sft"
    ppo: ModelPath = "RUN/ppo"
    reward: ModelPath | None = "RUN/reward"
    base: ModelPath | None = None
    dtype: Dtype = "auto"
    attn_implementation: str | None = None


def _comparison(text: str) -> str:
    if not COMPARISON.fullmatch(text.strip()):
        raise invalid("expected a comparison operator and a number", 'e.g. ">= 0.6"', code="C07")
    return text


def _policy_name(name: str) -> str:
    if RESERVED_NAMES.fullmatch(name):
        raise invalid("the report uses this name", "rename the policy")
    return name


def _judge(path: str) -> str:
    if path in BUILTINS or DOTTED.fullmatch(path):
        other = "a function is written module:function, and a path ./folder"
        raise invalid(f"there is no folder {path}", f"write {{builtin: {path}}}" if path in BUILTINS else other)
    return path


class Select(Section):
    """Selection of a policy from the frontier."""

    judge: Name
    kl_max: float | None = Field(None, gt=0)


class Limit(Section):
    """Estimate of the highest reward at each KL from SFT."""

    samples: int = Field(64, ge=4)


class EvalSettings(Section):
    """Options of the comparison."""

    n: int = Field(512, gt=0)
    modes: list[Literal["sampled", "greedy"]] = Field(default=["sampled", "greedy"], min_length=1)
    best_of: list[Annotated[int, Field(ge=2)]] = Field(default=[2, 4, 8])
    limit: Limit | None = None
    frontier: bool = True
    interpolate: list[Annotated[float, Field(gt=0, lt=1)]] = Field(default=[])
    select: Name | Select | None = None
    by: str | None = Field(None, min_length=1)
    temperature: float | None = Field(None, gt=0)
    response_length: int | None = Field(None, gt=0)
    per_device_batch_size: int = Field(64, gt=0)
    bf16: bool | None = None
    require: dict[str, Annotated[str, AfterValidator(_comparison)]] = Field(default_factory=dict)

    @property
    def draws(self) -> int:
        """Return the number of SFT answers to each prompt, beside those that are compared with PPO's."""
        return max([*self.best_of, self.limit.samples if self.limit else 0])

    @property
    def selection(self) -> Select | None:
        """Return `select` as a Select."""
        return Select(judge=self.select) if isinstance(self.select, str) else self.select

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        if "sampled" not in self.modes:
            raise invalid("the summary of the report needs sampled answers", "add sampled to eval.modes")
        if self.select is not None and not self.frontier:
            raise invalid("eval.select needs the frontier", "set eval.frontier: true, or remove eval.select", "select")
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


class BuiltinJudge(Section):
    """A built-in reward function as a judge."""

    builtin: str
    parameters: dict[str, Any] = Field(default_factory=dict)


class EvalConfig(Config):
    """eval.yaml: comparison of the models before and after PPO."""

    stage: Literal["eval"] = "eval"
    models: EvalModels = Field(default_factory=EvalModels)
    policies: dict[Annotated[Name, AfterValidator(_policy_name)], ModelPath] = Field(default_factory=dict)
    judges: dict[Name, Annotated[JudgePath, AfterValidator(_judge)] | BuiltinJudge] = Field(default_factory=dict)
    data: EvalData
    eval: EvalSettings = Field(default_factory=EvalSettings)

    @model_validator(mode="after")
    def _check_judges(self) -> Self:
        if "reward" in self.judges and self.models.reward is not None:
            text = "judges.reward: the name reward is reserved for models.reward"
            raise invalid(text, "rename the judge, or set models.reward: null", "judges.reward")
        no_reward = self.models.reward is None and "reward" not in self.judges
        for key, value, off in (("best_of", self.eval.best_of, "[]"), ("limit", self.eval.limit, "null")):
            if value and no_reward:
                text = f"eval.{key} needs a reward, but models.reward is null"
                raise invalid(text, f"add a judge named `reward`, or set eval.{key}: {off}", f"eval.{key}")
        judges = {"reward", *self.judges} if self.models.reward else set(self.judges)
        references = [("eval.require", key, _judge_of(key)) for key in self.eval.require]
        if self.eval.selection:
            references.append(("eval.select", self.eval.selection.judge, self.eval.selection.judge))
        for location, key, judge in references:
            if judge is not None and judge not in judges:
                hint = did_you_mean(judge, judges) or f"available judges: {', '.join(sorted(judges)) or 'none'}"
                raise invalid(f"{location}: {key} does not name a judge of this file", hint, location)
        return self
