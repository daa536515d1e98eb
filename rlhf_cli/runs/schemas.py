"""Schema of report.json, whose values may be of wrong types. Other keys may hold anything."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Bounds = Annotated[list[float], Field(min_length=2, max_length=2)]
Interval = Bounds | None
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(gt=0)]


class StrictModel(BaseModel):
    """Strict: no strings or booleans for numbers, and no infinite or NaN values."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class JudgeMean(StrictModel):
    mean: float
    ci95: Interval = None
    from_best: float | None = None
    from_best_ci95: Interval = None
    within_noise: bool | None = None


class WinRate(StrictModel):
    value: Share
    ci95: Interval = None
    n: int = 0
    ties: int = 0
    length_controlled: float | None = None
    length_controlled_ci95: Interval = None
    no_length_controlled: str = ""
    difference: float | None = None
    difference_ci95: Interval = None
    agrees_with_reward: Share | None = None
    agrees_with_reward_ci95: Interval = None


WinRates = dict[str, WinRate]


class ModelScores(StrictModel):
    judges: dict[str, JudgeMean]
    response_length_mean: float
    eos_fraction: Share
    distinct_fraction: float = 0.0
    reward_mean: float | None = None
    reward_ci95: Interval = None
    kl: float | None = None
    kl_ci95: Interval = None


class BestOf(ModelScores):
    n: int
    kl_bound: float
    win_rate_vs_sft: WinRates | None = None
    ppo_win_rate: WinRates | None = None


class FrontierPoint(ModelScores):
    step: int
    kl: float
    win_rate: WinRates


class Interpolation(ModelScores):
    share: float
    kl: float
    win_rate: WinRates


class SelectedPolicy(StrictModel):
    """The selected policy, or the reason why none was selected."""

    judge: str
    rule: str
    within_noise: list[int] = []
    optimism: float | None = None


class SampledResults(StrictModel):
    models: dict[str, ModelScores] = {}
    win_rate: dict[str, WinRates] = {}


class LimitPoint(StrictModel):
    """A point of the limit, a best of n, or a policy, which has an overhead, a bound of it, or the reason for none."""

    kl: float
    score: float
    score_ci95: Bounds
    kl_ci95: Interval = None
    step: int | None = None
    needed_kl: float | None = None
    needed_kl_ci95: Annotated[list[float | None], Field(min_length=2, max_length=2)] | None = None
    needed_kl_at_most: float | None = None
    overhead: float | None = None
    overhead_at_least: float | None = None
    no_overhead: str = ""


class Limit(StrictModel):
    samples: Count
    min_effective_samples: float
    missing_eos_penalty: float = 0.0
    points: Annotated[list[LimitPoint], Field(min_length=1)]
    best_of: list[LimitPoint]
    policies: dict[str, LimitPoint]


class Histogram(StrictModel):
    """Histogram of the margins between chosen and rejected."""

    edges: list[float]
    counts: list[int]

    @model_validator(mode="after")
    def _check_lengths(self) -> "Histogram":
        if len(self.counts) != len(self.edges) + 1 or 0.0 not in self.edges:
            raise ValueError("edges and counts do not fit")
        return self


class Bin(StrictModel):
    n: int
    confidence: Share
    accuracy: Share


class Probe(StrictModel):
    beats: Share
    ci95: Bounds
    margin: float


class Adversarial(StrictModel):
    n: Count
    probes: dict[str, Probe]


class LongerAnswer(StrictModel):
    n: int
    preferred: Share
    ci95: Bounds
    chosen: Share


class Flag(StrictModel):
    code: str
    text: str


class RewardModelCard(StrictModel):
    n: Count
    accuracy: Share
    ece: float
    calibration: Annotated[list[Bin], Field(min_length=1)]
    margin_histogram: Histogram
    length_correlation: float
    length_correlation_ci95: Bounds
    accuracy_ci95: Interval = None
    ci95: Interval = None
    ece_by_chance: float
    adversarial: Adversarial | None = None
    longer_answer: LongerAnswer | None = None
    flags: list[Flag] = []


class RewardModelReport(StrictModel):
    """The report's section on the reward model: its accuracy only, or the full card."""

    accuracy: Share
    ci95: Interval = None

    @model_validator(mode="after")
    def _check_card(self) -> "RewardModelReport":
        if "adversarial" in (self.model_extra or {}):
            RewardModelCard.model_validate(self.model_dump())
        return self


class Group(SampledResults):
    """Results for the prompts with one value of the column `eval.by`."""

    value: str
    n: int
    best_of: list[BestOf] = []


class Groups(StrictModel):
    """Results for each value of the column."""

    column: str
    groups: list[Group] = Field(min_length=1)


class Report(SampledResults):
    """eval/report.json."""

    n: int
    temperature: float | None = None
    response_length: int | None = None
    greedy: SampledResults | None = None
    best_of: list[BestOf] = []
    frontier: list[FrontierPoint] = []
    interpolated: list[Interpolation] = []
    selected_step: int | None = None
    selected: SelectedPolicy | None = None
    no_frontier: str | None = None
    by: Groups | None = None
    judge_kinds: dict[str, Literal["model", "function", "verifier"]] = {}
    limit: Limit | None = None
    reward_model: RewardModelReport | None = None
    no_reward_card: str | None = None
    warnings: list[str] = []

    @model_validator(mode="after")
    def _check_consistency(self) -> "Report":
        if self.selected_step is not None and (self.selected is None or self.selected.optimism is None):
            raise ValueError("it names a selected step and not how it was picked")
        policies: dict[str, Sequence[ModelScores]] = {"models": [*self.models.values()], "frontier": self.frontier}
        policies["interpolated"] = self.interpolated
        for section, scores in policies.items():
            if any(score.judges.keys() != scores[0].judges.keys() for score in scores):
                raise ValueError(f"not all {section} have the same judges")
        return self


def schema_error(value: Mapping[str, object]) -> str | None:
    """Return what is invalid in a report.json, or None."""
    try:
        Report.model_validate(value)
    except ValidationError as error:
        return problem_text("report.json", error)
    return None


def problem_text(name: str, error: ValidationError) -> str:
    """Return the first problem of a file that does not fit its schema, with the key."""
    first = error.errors(include_url=False, include_input=False)[0]
    key = ".".join(map(str, first["loc"]))
    message = first["msg"]
    return f"{name}: {key}: {message[:1].lower()}{message[1:]}"
