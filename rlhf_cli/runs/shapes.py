"""The form of what pages, cards and exports read out of manifests and reports: whole files may hold other types.

Keys that are not named here may hold anything; a key that is absent is the reader's business unless it is required.
"""

from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Bounds = Annotated[list[float], Field(min_length=2, max_length=2)]
Interval = Bounds | None
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(gt=0)]


class StrictModel(BaseModel):
    """Strict: no text for a number, no true or false, nothing that is not finite."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class JudgeMean(StrictModel):
    """What a judge gives the answers of one model."""

    mean: float
    ci95: Interval = None
    from_best: float | None = None
    from_best_ci95: Interval = None
    within_noise: bool | None = None


class WinRate(StrictModel):
    """How often one model's answers win."""

    value: Share
    ci95: Interval = None
    n: int = 0
    ties: int = 0
    length_controlled: float | None = None
    length_controlled_ci95: Interval = None
    difference: float | None = None
    difference_ci95: Interval = None


WinRates = dict[str, WinRate]


class JudgeScores(StrictModel):
    """Scores and lengths of one model's answers."""

    judges: dict[str, JudgeMean]
    response_length_mean: float = 0.0
    eos_fraction: Share = 0.0
    distinct_fraction: float = 0.0
    reward_mean: float | None = None
    reward_ci95: Interval = None
    kl: float | None = None
    kl_ci95: Interval = None


class ModelScores(JudgeScores):
    """The answers of one model, with what its row on the page tells."""

    response_length_mean: float
    eos_fraction: Share


class BestOf(ModelScores):
    """The best of several answers."""

    n: int
    kl_bound: float
    win_rate_vs_sft: WinRates | None = None
    ppo_win_rate: WinRates | None = None


class FrontierPoint(JudgeScores):
    """A policy on PPO's way."""

    step: int
    kl: float
    win_rate: WinRates


class SelectedPolicy(StrictModel):
    """The policy that was picked, or why none was."""

    judge: str
    rule: str
    within_noise: list[int] = []
    optimism: float | None = None


class SampledResults(StrictModel):
    """The models and how often they win, by one way of drawing."""

    models: dict[str, ModelScores] = {}
    win_rate: dict[str, WinRates] = {}


class Histogram(StrictModel):
    """Margins between chosen and rejected."""

    edges: list[float]
    counts: list[int]

    @model_validator(mode="after")
    def _fits(self) -> "Histogram":
        if len(self.counts) != len(self.edges) + 1 or 0.0 not in self.edges:
            raise ValueError("edges and counts do not fit")
        return self


class Bin(StrictModel):
    """A bin of the calibration."""

    n: int
    confidence: Share
    accuracy: Share


class Probe(StrictModel):
    """How often a bad answer scores above a good one."""

    beats: Share
    ci95: Bounds
    margin: float


class Adversarial(StrictModel):
    """The probes of a reward model."""

    n: Count
    probes: dict[str, Probe]


class LongerAnswer(StrictModel):
    """Whether the longer answer is preferred."""

    n: int
    preferred: Share
    ci95: Bounds
    chosen: Share


class Flag(StrictModel):
    """A fault of a reward model."""

    code: str
    text: str


class RewardModelCard(StrictModel):
    """A reward model's report card."""

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
    """What a report tells of the reward model: its accuracy alone, or the whole card."""

    accuracy: Share
    ci95: Interval = None

    @model_validator(mode="after")
    def _whole(self) -> "RewardModelReport":
        if "adversarial" in (self.model_extra or {}):
            RewardModelCard.model_validate(self.model_dump())
        return self


class Report(SampledResults):
    """eval/report.json."""

    n: int
    temperature: float | None = None
    response_length: int | None = None
    greedy: SampledResults | None = None
    best_of: list[BestOf] = []
    frontier: list[FrontierPoint] = []
    selected_step: int | None = None
    selected: SelectedPolicy | None = None
    no_frontier: str | None = None
    reward_model: RewardModelReport | None = None
    no_reward_card: str | None = None
    warnings: list[str] = []

    @model_validator(mode="after")
    def _alike(self) -> "Report":
        if self.selected_step is not None and (self.selected is None or self.selected.optimism is None):
            raise ValueError("it names a selected step and not how it was picked")
        for what, found in (("models", list(self.models.values())), ("frontier", self.frontier)):
            if any(each.judges.keys() != found[0].judges.keys() for each in found):
                raise ValueError(f"not all {what} have the same judges")
        return self


class Metrics(StrictModel):
    """The numbers of a stage that its page begins with."""

    eval_loss: float | None = None
    accuracy: float | None = None
    accuracy_ci95: Interval = None
    n: int | None = None
    margin: float | None = None
    ece: float | None = None
    length_correlation: float | None = None
    length_correlation_ci95: Interval = None


class BestStep(StrictModel):
    """The best policy that PPO saw on its way."""

    step: int
    metric: str
    value: float


class ParentEntry(StrictModel):
    """What a stage was made from."""

    path: str
    stage: str
    sha256: str
    revision: str | None = None


class Manifest(StrictModel):
    """manifest.json of a stage."""

    stage: str | None = None
    parents: dict[str, ParentEntry] = {}
    data: dict[str, str] = {}
    seed: int | None = None
    run_name: str | None = None
    versions: dict[str, str] = {}
    git: str | None = None
    config_sha256: str | None = None
    model_sha256: str | None = None
    tokenizer_sha256: str | None = None
    template_sha256: str | None = None
    step: int | None = None
    stopped: str | None = None
    model_is: str | None = None
    best: BestStep | None = None
    card: RewardModelCard | None = None
    metrics: Metrics | None = None


SHAPES: dict[str, type[StrictModel]] = {"manifest.json": Manifest, "report.json": Report}


def schema_error(name: str, value: Mapping[str, object]) -> str | None:
    """What in a manifest.json or report.json is not of the form that its readers take; None where all is."""
    try:
        SHAPES[name].model_validate(value)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)[0]
        return f"{name}: {'.'.join(map(str, found['loc']))}: {found['msg'][:1].lower()}{found['msg'][1:]}"
    return None
