"""Config of eval.yaml: comparison of the models before and after PPO."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, PositiveFloat, PositiveInt, model_validator

from rlhf_cli.config.base import Config, FolderPath, JudgePath, ModelPath, Name
from rlhf_cli.config.judges import OpenAIJudge
from rlhf_cli.config.machinery.paths import FUNCTION
from rlhf_cli.config.machinery.section import AtLeastTwo, Section, invalid
from rlhf_cli.config.ppo import BUILTINS, VERIFIERS, EngineChoice, VLLMServerSettings, server_of
from rlhf_cli.config.sections import Dtype, EvalData
from rlhf_cli.config.sources import DataSource
from rlhf_cli.errors import did_you_mean
from rlhf_cli.files import read_json_object
from rlhf_cli.trees import at

RESERVED_NAMES = re.compile(r"base|sft|ppo|reward|best_of_\d+|ppo_step_.*|interpolated_.*|.*_vs_.*")
SHARES = (0.3, 0.5, 0.7)  # of `eval.interpolate` by default
AVERAGE_SHARES = (0.6, 1.25, 1.5)  # the same with `ppo.average`, which lags behind the last policy
MAX_SHARE = 2.0
Share = Annotated[float, Field(gt=0, le=MAX_SHARE)]  # of the way from SFT to PPO; above 1 it is beyond PPO
DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")  # module.function, which is no hub id
COMPARISON = re.compile(r"(>=|<=|==|>|<)\s*([-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)")


class EvalModels(Section):
    """Models to compare. RUN is the run folder."""

    sft: ModelPath = "RUN/sft"
    ppo: ModelPath = "RUN/ppo"
    reward: ModelPath | None = "RUN/reward"
    base: ModelPath | None = None
    previous: ModelPath | None = None
    dtype: Dtype = "auto"
    attn_implementation: str | None = None
    engine: EngineChoice = "auto"

    @property
    def server(self) -> VLLMServerSettings | None:
        """Return the server that generates the responses, None if this process does."""
        return server_of(self.engine)


def _comparison(value: Any) -> Any:
    text = "expected a comparison operator and a number"
    if COMPARISON.fullmatch(f"<= {value}"):  # a number alone
        raise invalid(text, f'write "<= {value}" or ">= {value}"', code="C07")
    if isinstance(value, str) and not COMPARISON.fullmatch(value.strip()):
        raise invalid(text, 'e.g. ">= 0.6"', code="C07")
    return value


def _policy_name(name: str) -> str:
    if RESERVED_NAMES.fullmatch(name):
        raise invalid("the report uses this name", "rename the policy")
    return name


def _judge(path: str) -> str:
    text = f"there is no folder {path}"
    if path in BUILTINS:
        raise invalid(text, f"write {{builtin: {path}}}")
    if DOTTED.fullmatch(path):
        raise invalid(text, "a function is written module:function, and a path ./folder")
    return path


class Select(Section):
    """The judge that chooses the recommended policy, and its own limit of the KL."""

    judge: Name
    kl_max: PositiveFloat | None = None


class LimitSettings(Section):
    """Estimate of the highest reward at each KL from SFT."""

    samples: int = Field(64, ge=4)


class EvalSettings(Section):
    """Options of the comparison."""

    n: PositiveInt = 512
    modes: list[Literal["sampled", "greedy"]] = Field(default=["sampled", "greedy"], min_length=1)
    best_of: list[AtLeastTwo] = Field(default=[2, 4, 8])
    limit: LimitSettings | None = None
    frontier: bool = True
    interpolate: list[Share] | None = None
    max_kl: PositiveFloat | None = 10.0
    select: Name | Select | None = None
    by: str | None = Field(None, min_length=1)
    temperature: PositiveFloat | None = None
    response_length: PositiveInt | None = None
    per_device_batch_size: PositiveInt = 64
    bf16: bool | None = None
    require: dict[str, Annotated[str, BeforeValidator(_comparison)]] = Field(default_factory=dict)

    @property
    def draws(self) -> int:
        """Return the number of SFT answers to each prompt, beside those that are compared with PPO's."""
        samples = self.limit.samples if self.limit else 0
        return max([*self.best_of, samples])

    @property
    def selection(self) -> Select | None:
        """Return `select` as a Select."""
        return Select(judge=self.select) if isinstance(self.select, str) else self.select

    @property
    def kl_limit(self) -> float | None:
        """Return the KL that the recommended policy may have: that of `select`, else `max_kl`."""
        own = self.selection.kl_max if self.selection else None
        return own or self.max_kl

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        if "sampled" not in self.modes:
            raise invalid("the summary of the report needs sampled answers", "add sampled to eval.modes")
        if self.interpolate and 1.0 in self.interpolate:
            text = "eval.interpolate has 1, PPO's own policy, which is evaluated anyway"
            raise invalid(text, "remove it", "interpolate")
        needed = {"eval.select": "select"} if self.select is not None else {}
        needed |= {f"eval.require: {key}": "require" for key in self.require if key.startswith("selected")}
        if not self.frontier and self.interpolate == []:
            for what, key in needed.items():
                hint = "set eval.frontier: true, or shares in eval.interpolate"
                raise invalid(f"{what} needs several policies to choose from", hint, key)
        return self


REQUIRE = "eval.require"
SECTIONS = {
    "models", "win_rate", "selected", "selected_step", "limit", "reward_model", "n", "temperature", "response_length",
}  # fmt: skip


def _require_known(name: str, known: set[str], noun: str, *, key: str, location: str = REQUIRE) -> None:
    """Raise C17 unless `name`, which is the value or a part of `key`, is known."""
    if name not in known:
        available = ", ".join(sorted(known)) or "none"
        hint = did_you_mean(name, known) or f"available: {available}"
        raise invalid(f"{location}: {key} does not name a {noun}", hint, location)


class JudgeSettings(Section):
    """A judge that is no path: a built-in reward function, a language model that is asked, or labels of people."""

    builtin: str | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)
    openai: OpenAIJudge | None = None
    labels: FolderPath | None = None

    @model_validator(mode="after")
    def _check_one_kind(self) -> Self:
        kinds = [self.builtin, self.openai, self.labels]
        if kinds.count(None) != 2:
            raise invalid("a judge is either builtin, openai or labels", "set one of them", code="C05")
        if self.parameters and self.builtin is None:
            raise invalid("parameters belong to builtin", "move them below openai", "parameters")
        return self


def judge_kind(judge: str | JudgeSettings) -> Literal["model", "function", "verifier", "openai", "people"]:
    """Return what a judge is; built-in functions that know no right answer are functions."""
    if isinstance(judge, str):
        return "function" if FUNCTION.fullmatch(judge) else "model"
    if judge.openai is not None:
        return "openai"
    if judge.labels is not None:
        return "people"
    return "verifier" if judge.builtin in VERIFIERS else "function"


class EvalConfig(Config):
    """eval.yaml: comparison of the models before and after PPO."""

    stage: Literal["eval"] = "eval"
    models: EvalModels = Field(default_factory=EvalModels)
    policies: dict[Annotated[Name, AfterValidator(_policy_name)], ModelPath] = Field(default_factory=dict)
    judges: dict[Name, Annotated[JudgePath, AfterValidator(_judge)] | JudgeSettings] = Field(default_factory=dict)
    data: EvalData
    eval: EvalSettings = Field(default_factory=EvalSettings)

    @model_validator(mode="after")
    def _check_previous(self) -> Self:
        if self.models.previous and "previous" in self.policies:
            text = "policies.previous: the name is that of models.previous"
            raise invalid(text, "rename the policy, or remove models.previous", "policies.previous")
        return self

    @model_validator(mode="after")
    def _check_judges(self) -> Self:
        judges = set(self.judges)
        if self.models.reward is not None:
            if "reward" in judges:
                text = "judges.reward: the name reward is reserved for models.reward"
                raise invalid(text, "rename the judge, or set models.reward: null", "judges.reward")
            judges.add("reward")

        scoring = judges - self.comparing_judges
        self._check_comparing(scoring)
        for key, off in {"best_of": "[]", "limit": "null"}.items():
            if getattr(self.eval, key) and "reward" not in scoring:
                text = f"eval.{key} needs a reward, but models.reward is null"
                raise invalid(text, f"add a judge named `reward`, or set eval.{key}: {off}", f"eval.{key}")
        if self.eval.selection:
            judge = self.eval.selection.judge
            if judge in self.comparing_judges:
                text = f"eval.select: {judge} compares two answers, and the frontier needs scores"
                raise invalid(text, "select by a judge that scores answers", "eval.select")
            _require_known(judge, scoring, "judge of this file", key=judge, location="eval.select")
        for key in self.eval.require:
            self._check_required(key, judges)
        return self

    @property
    def pairwise_judges(self) -> dict[str, OpenAIJudge]:
        """Return the language models that compare two answers, by name."""
        sections = {name: judge.openai for name, judge in self.judges.items() if isinstance(judge, JudgeSettings)}
        return {name: section for name, section in sections.items() if section is not None}

    @property
    def people_judges(self) -> dict[str, str]:
        """Return the folders of labels of people, by name."""
        labels = {name: judge.labels for name, judge in self.judges.items() if isinstance(judge, JudgeSettings)}
        return {name: folder for name, folder in labels.items() if folder is not None}

    @property
    def comparing_judges(self) -> set[str]:
        """Return the names of the judges that compare two answers; all others score one answer."""
        return self.pairwise_judges.keys() | self.people_judges.keys()

    def sources(self) -> dict[str, DataSource]:
        """Return the data sources that the stage reads, by key path."""
        labels = {f"judges.{name}.labels": folder for name, folder in self.people_judges.items()}
        return super().sources() | {key: DataSource(folder, self.where(key)) for key, folder in labels.items()}

    def _check_comparing(self, scoring: set[str]) -> None:
        """Refuse judges that compare answers where a judge that scores single answers is needed."""
        for name in self.comparing_judges:
            key = f"judges.{name}"
            if name == "reward":
                raise invalid(f"{key}: a judge that compares two answers is no reward", "rename it", key)
            if not scoring:
                text = f"{key} compares answers, and the evaluation also needs a judge that scores them"
                raise invalid(text, "set models.reward, or add a function or built-in judge", key)

    def identity(self) -> dict[str, Any]:
        """Return the keys that can change the result, and output.snapshots of PPO, whose policies the frontier shows.

        An evaluation by other servers is the same. The snapshots are None if unknown.
        """
        tree = super().identity()
        if self.models.server:
            tree["models"]["engine"] = "vllm"
        of_ppo = read_json_object(Path(self.models.ppo) / "identity.json")
        tree["snapshots_of_ppo"] = at(of_ppo, "config.output.snapshots")
        for name in self.pairwise_judges:
            for key in OpenAIJudge.OF_TRANSPORT:
                del tree["judges"][name]["openai"][key]
        return tree

    def _check_required(self, key: str, judges: set[str]) -> None:
        """Refuse a key of `eval.require` for which the report will have no value."""
        others = [*self.policies, "previous"] if self.models.previous else list(self.policies)
        policies = {"ppo", "sft", *others}
        pairs = {f"{name}_vs_sft" for name in others}
        if self.models.base:
            policies.add("base")
            pairs.add("sft_vs_base")
        pairs |= {f"ppo_vs_{name}" for name in policies - {"ppo"}}

        parts = key.removeprefix("greedy.").split(".")
        _require_known(parts[0], SECTIONS, "section of the report", key=key)
        match parts:
            case ["models", policy, *_]:
                _require_known(policy, policies, "policy of this file", key=key)
            case ["win_rate", pair, *_]:
                _require_known(pair, pairs, "comparison of the report", key=key)
        match parts:
            case (
                ["win_rate", _, judge, *last]
                | ["models", _, "judges", judge, *last]
                | ["selected", "win_rate" | "judges", judge, *last]
            ):
                _require_known(judge, judges, "judge of this file", key=key)
                if judge in self.comparing_judges and not key.startswith("win_rate.ppo_vs_sft."):
                    text = f"{REQUIRE}: {judge} compares sampled answers of PPO and SFT alone"
                    raise invalid(text, f"write win_rate.ppo_vs_sft.{judge}.value", REQUIRE)
                if not last:
                    hint = f"write {key}.{'mean' if 'judges' in parts else 'value'}"
                    raise invalid(f"{REQUIRE}: {key} is no number of the report", hint, REQUIRE)
