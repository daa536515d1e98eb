"""eval/report.json: the result of an evaluation, and the report card of a reward model, from file to page.

The order of the attributes is that of the keys in the file. What an evaluation does not have is None, and no key.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AliasChoices,
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    TypeAdapter,
    ValidationError,
    field_serializer,
    model_validator,
)

from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.files import read_json_object
from rlhf_cli.runs.layout import REPORT
from rlhf_cli.runs.strict_json import Bounds, Count, Interval, Share, StrictModel, describe_problem

PPO_OVER_SFT = "ppo_vs_sft"
JudgeKind = Literal["model", "function", "verifier", "openai", "people"]


# Policies and win rates


class JudgeMean(StrictModel):
    """A judge's mean score; on the frontier also its distance from the highest mean."""

    mean: float
    ci95: Interval = None  # None if all answers have the same score
    from_best: float | None = None
    from_best_ci95: Interval = None
    within_noise: bool | None = None


class Agreement(StrictModel):
    """On which share of the prompts that two judges decide they prefer the same answer."""

    value: Share
    ci95: Bounds


class WinRate(StrictModel):
    """The share of the prompts on which one policy scores above another by one judge; a tie counts half."""

    value: Share
    ci95: Interval = None
    n: int | None = None
    ties: int | None = None
    length_controlled: float | None = None
    length_controlled_ci95: Interval = None
    no_length_controlled: str | None = None  # the reason
    difference: float | None = None  # of the scores
    difference_ci95: Interval = None
    agrees_with_reward: Share | None = None
    agrees_with_reward_ci95: Interval = None
    agreement: dict[str, Agreement] | None = None  # of a pairwise judge or people with every other judge
    consistency: Share | None = None  # of a pairwise judge: both orders name the same answer, or both a tie
    consistency_ci95: Interval = None
    first_slot: Share | None = None  # how often the answer that is shown first wins
    first_slot_ci95: Interval = None


WinRates = dict[str, WinRate]  # by judge


class PolicyScores(StrictModel):
    """Means over the answers of a policy, or over SFT's best of n; which of them it is stands in the first four."""

    step: int | None = None  # number of PPO updates
    share: float | None = None  # of the way from SFT to PPO
    n: int | None = None  # of best of n
    kl_bound: float | None = None  # in place of the KL
    reward_mean: float | None = None
    reward_ci95: Interval = None
    kl: float | None = None  # from SFT, in nats; None for near-greedy answers
    kl_ci95: Interval = None
    response_length_mean: float
    eos_fraction: Share
    distinct_fraction: float | None = None
    judges: dict[str, JudgeMean]
    win_rate: WinRates | None = None  # over SFT
    win_rate_vs_sft: WinRates | None = None  # of best of n
    ppo_win_rate: WinRates | None = None  # over best of n


class BestOfN(PolicyScores):
    """SFT's best of n answers by the reward."""

    n: int
    kl_bound: float


class FrontierPoint(PolicyScores):
    """A snapshot of PPO."""

    step: int
    reward_mean: float | None = Field(None, alias="reward")
    kl: float
    win_rate: WinRates


class InterpolatedPolicy(PolicyScores):
    """A policy between SFT and PPO in the weights."""

    share: float
    reward_mean: float | None = Field(None, alias="reward")
    kl: float
    win_rate: WinRates


class RecommendedPolicy(StrictModel):
    """The policy to take, why, and its means over prompts that had no part in the choice.

    Older versions selected a snapshot, or none, and measured fewer of them.
    """

    judge: str
    rule: str  # why it was chosen
    policy: str | None = None  # its name in samples.jsonl
    chosen_on: int | None = None  # prompts
    reported_on: int | None = None  # other prompts, of which all figures below are
    step: int | None = None  # None of SFT
    share: float | None = None
    reward_mean: float | None = Field(None, alias="reward")
    reward_ci95: Interval = None
    kl: float | None = None
    kl_ci95: Interval = None
    response_length_mean: float | None = None
    eos_fraction: Share | None = None
    distinct_fraction: float | None = None
    judges: dict[str, JudgeMean] | None = None
    win_rate: WinRates | None = None  # over SFT
    over_last: WinRates | None = None  # over PPO's last policy, if that is not the recommended one

    @property
    def is_sft(self) -> bool:
        """Return True if the SFT model is the one to take."""
        return self.policy == "sft"


# Means of a policy that its choice can bias.
REPORTED = (
    "reward_mean",
    "reward_ci95",
    "kl",
    "kl_ci95",
    "response_length_mean",
    "eos_fraction",
    "distinct_fraction",
    "judges",
    "win_rate",
)


def policy_label(step: int | None, share: float | None) -> str:
    """Return the display name of a policy of PPO, or between it and SFT."""
    if step is None:
        return "the SFT model" if share is None else f"share {share:g}"
    return f"update {step}" if share is None else f"share {share:g} of update {step}"


class SampledResults(StrictModel):
    """Results of the policies in one mode of sampling."""

    models: dict[str, PolicyScores] = Field(default_factory=dict)
    win_rate: dict[str, WinRates] = Field(default_factory=dict)  # by pair, such as ppo_vs_sft

    @property
    def ppo_over_sft(self) -> WinRates:
        """Return PPO's win rates over SFT by judge; empty without a comparison."""
        return self.win_rate.get(PPO_OVER_SFT, {})


class PromptGroup(StrictModel):
    """Results for the prompts with one value of the column `eval.by`."""

    value: str
    n: int
    models: dict[str, PolicyScores] = Field(default_factory=dict)
    win_rate: dict[str, WinRates] = Field(default_factory=dict)
    best_of: list[BestOfN] | None = None


class PromptGroups(StrictModel):
    """Results for each value of a column."""

    column: str
    groups: list[PromptGroup] = Field(min_length=1)


# The highest score at each KL


class LimitPoint(StrictModel):
    """KL and score of a policy, which has an overhead, a bound of it, or the reason for none."""

    beta: float | None = None  # of a point of the limit
    n: int | None = None  # of best of n
    step: int | None = None  # of a snapshot of PPO
    kl: float
    kl_ci95: Interval = None
    score: float
    score_ci95: Bounds
    effective_samples: float | None = None
    needed_kl: float | None = None
    needed_kl_ci95: Annotated[list[float | None], Field(min_length=2, max_length=2)] | None = None
    no_overhead: str | None = None
    needed_kl_at_least: float | None = None
    needed_kl_at_most: float | None = None
    overhead_at_least: float | None = None
    overhead: float | None = None


class KLLimit(StrictModel):
    """The highest score at each KL from SFT, and the KL that policies pay beyond it."""

    samples: Count  # of SFT for each prompt
    missing_eos_penalty: float | None = None
    min_effective_samples: float
    points: Annotated[list[LimitPoint], Field(min_length=1)]
    best_of: list[LimitPoint]
    policies: dict[str, LimitPoint]


# The reward model


class MarginHistogram(StrictModel):
    """Numbers of pairs by their margin, from below the first edge to above the last."""

    edges: list[float]
    counts: list[int]

    @model_validator(mode="after")
    def _check_lengths(self) -> "MarginHistogram":
        if len(self.counts) != len(self.edges) + 1 or 0.0 not in self.edges:
            raise ValueError("edges and counts do not fit")
        return self


class CalibrationBin(StrictModel):
    """Pairs whose scores imply a similar confidence."""

    low: float | None = Field(None, alias="from")
    high: float | None = Field(None, alias="to")
    n: int
    confidence: Share
    accuracy: Share


class ProbeResult(StrictModel):
    """How often a constructed bad answer scores above the chosen one."""

    beats: Share
    ci95: Bounds
    margin: float


class Adversarial(StrictModel):
    """Results of all probes on n prompts."""

    n: Count
    probes: dict[str, ProbeResult]


class LongerAnswer(StrictModel):
    """How often the longer answer of a pair scores higher, and how often people chose it."""

    n: int
    preferred: Share
    ci95: Bounds
    chosen: Share


class LengthResult(StrictModel):
    """Accuracy and length bias of one kind of scores on the evaluation pairs."""

    accuracy: Share
    accuracy_ci95: Bounds
    length_correlation: float
    length_correlation_ci95: Bounds


class LengthDebiasing(StrictModel):
    """What `reward.length_debias` does to a reward model's results, or would do if it is not applied."""

    slope: float  # of the raw score, per token
    applied: bool
    raw: LengthResult
    debiased: LengthResult
    accuracy_difference: float  # debiased - raw
    accuracy_difference_ci95: Interval = None


class CardFlag(StrictModel):
    """A limit that a card exceeds by more than chance."""

    code: str
    text: str


class EvaluatedStep(StrictModel):
    """The accuracy of a step of a training on the card's pairs, and whether that of the best one may be no higher."""

    step: int
    accuracy: Share
    within_noise: bool


class KeptStep(StrictModel):
    """The step of a training whose model was kept, of those that were evaluated; the last of them is the last step."""

    step: int
    evaluated: Annotated[list[EvaluatedStep], Field(min_length=2)]
    optimism: float | None = None  # by how much the card's accuracy is too high: its pairs chose the step


class LabelErrors(StrictModel):
    """The share of wrong labels among the training pairs, by those that were labelled more than once."""

    repeats: Count
    wrong: Share
    wrong_ci95: Bounds


# Keys of a card that are also the metrics of its stage, in their order there.
HEADLINE = (
    "accuracy",
    "accuracy_ci95",
    "n",
    "margin",
    "ece",
    "length_correlation",
    "length_correlation_ci95",
)


class RewardModelAccuracy(StrictModel):
    """A reward model's accuracy on held-out pairs, which is all that older versions measured."""

    n: int | None = None
    accuracy: Share
    accuracy_ci95: Interval = Field(None, validation_alias=AliasChoices("accuracy_ci95", "ci95"))

    def headline(self) -> dict[str, Any]:
        """Return the metrics of the reward stage."""
        values = self.to_json()
        return {name: values[name] for name in HEADLINE if name in values}


class EnsembleCard(StrictModel):
    """The members of an ensemble on the held-out pairs, with their scores as PPO sees them."""

    accuracies: list[Share]  # of each member
    accuracy: Share  # of the mean of their scores
    disagreement: float  # standard deviation over the members, mean over the answers


class RewardModelCard(RewardModelAccuracy):
    """The report card of a reward model: accuracy, calibration, length bias and probes on held-out pairs."""

    n: Count
    independent_pairs: float | None = None  # None on cards of older versions
    margin: float | None = None
    margin_histogram: MarginHistogram
    ece: float
    ece_by_chance: float
    calibration: Annotated[list[CalibrationBin], Field(min_length=1)]
    length_correlation: float
    length_correlation_ci95: Bounds
    longer_answer: LongerAnswer | None = None
    length_debiasing: LengthDebiasing | None = None  # None: not applied, and not needed or not known
    adversarial: Adversarial
    kept_step: KeptStep | None = None  # None: only the last step could be kept
    label_errors: LabelErrors | None = None  # None: too few repeated pairs, or none with two labels that differ
    ensemble: EnsembleCard | None = None
    flags: list[CardFlag] | None = None


def _kind_of_result(value: object) -> str:
    if isinstance(value, Mapping):
        return "card" if "adversarial" in value else "accuracy"
    return "card" if isinstance(value, RewardModelCard) else "accuracy"


RewardModelResult = Annotated[
    Annotated[RewardModelCard, Tag("card")] | Annotated[RewardModelAccuracy, Tag("accuracy")],
    Discriminator(_kind_of_result),
]
_RESULT: TypeAdapter[RewardModelCard | RewardModelAccuracy] = TypeAdapter(RewardModelResult)


def reward_model_result(
    card: RewardModelCard | None, metrics: Mapping[str, Any]
) -> RewardModelCard | RewardModelAccuracy | None:
    """Return the card of a reward stage, or else the accuracy in its metrics; None without held-out pairs."""
    if metrics.get("accuracy") is None:
        return None
    return _RESULT.validate_python({**(card.to_json() if card else {}), **metrics})


# The report


class JudgeCost(StrictModel):
    """What the answers of a pairwise judge cost, whenever they were given."""

    model: str
    answers: int
    calls: int
    prompt_tokens: int
    completion_tokens: int
    too_long: int | None = None  # pairs that have no answer


class Report(StrictModel):
    """eval/report.json."""

    n: int  # prompts
    temperature: float | None = None
    response_length: int | None = None
    models: dict[str, PolicyScores] = Field(default_factory=dict)
    win_rate: dict[str, WinRates] = Field(default_factory=dict)
    greedy: SampledResults | None = None
    best_of: list[BestOfN] | None = None
    judge_kinds: dict[str, JudgeKind] | None = None
    judge_costs: dict[str, JudgeCost] | None = None
    by: PromptGroups | None = None
    interpolated: list[InterpolatedPolicy] | None = None
    no_frontier: str | None = None  # the reason
    frontier: list[FrontierPoint] | None = None
    selected_step: int | None = None
    selected: RecommendedPolicy | None = None
    reward_model: RewardModelResult | None = None
    no_reward_card: str | None = None  # the reason
    warnings: list[str] | None = None
    limit: KLLimit | None = None

    @model_validator(mode="after")
    def _check_consistency(self) -> "Report":
        if self.selected_step is not None and self.selected is None:
            raise ValueError("it names a selected step and not how it was picked")
        policies: dict[str, Sequence[PolicyScores]] = {
            "models": list(self.models.values()),
            "frontier": self.frontier or [],
            "interpolated": self.interpolated or [],
        }
        for section, scores in policies.items():
            if any(each.judges.keys() != scores[0].judges.keys() for each in scores):
                raise ValueError(f"not all {section} have the same judges")
        return self

    @field_serializer("reward_model", mode="wrap")
    def _headline_first(self, result: RewardModelAccuracy, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return a card as the report has it: the headline first, and the interval of the accuracy last."""
        values: dict[str, Any] = result.headline() | serialize(result)
        interval = values.pop("accuracy_ci95", None)
        return values if interval is None else values | {"ci95": interval}

    @property
    def ppo_over_sft(self) -> WinRates:
        """Return PPO's win rates over SFT by judge; empty without a comparison."""
        return self.win_rate.get(PPO_OVER_SFT, {})

    @property
    def recommended(self) -> RecommendedPolicy | None:
        """Return the recommended policy; None without one, as if an older version selected no step."""
        selected = self.selected
        return selected if selected and (selected.is_sft or self.selected_step is not None) else None

    @property
    def recommendation(self) -> str:
        """Return the recommended policy and why as text; empty without one."""
        chosen = self.recommended
        return f"{policy_label(self.selected_step, chosen.share)} ({chosen.rule})" if chosen else ""

    def is_recommended(self, scores: PolicyScores) -> bool:
        """Return True for the means of the recommended policy: of one between SFT and PPO by share, else by step."""
        if scores.step is None and scores.share is None:
            return self.recommends_last and scores is self.models.get("ppo")
        if self.selected and self.selected.share is not None:
            return scores.share == self.selected.share
        return scores.step is not None and scores.step == self.selected_step

    @property
    def recommends_last(self) -> bool:
        """Return True if PPO's last policy is the recommended one."""
        chosen = self.recommended
        if chosen is None or chosen.policy is not None:
            return chosen is not None and chosen.policy == "ppo"
        return self.selected_step == max((point.step for point in self.frontier or []), default=None)

    def without_choice(self, scores: PolicyScores) -> PolicyScores:
        """Return means of a policy; of the recommended one those over the prompts that had no part in the choice."""
        if not self.is_recommended(scores):
            return scores
        figures = {name: getattr(self.selected, name) for name in REPORTED}
        return scores.with_changes(**{name: value for name, value in figures.items() if value is not None})


def read_report(folder: Path) -> Report:
    """Read the report.json of an eval folder. Raises RLHFError M05 if it is missing or corrupt, E08 if unreadable."""
    path = folder / REPORT
    contents = read_json_object(path)
    if contents is None:
        raise _damaged(f"{shown(path)} is missing or not readable")
    try:
        return Report.model_validate(contents)
    except ValidationError as error:
        raise _damaged(f"{shown(path)} is damaged: {describe_problem(REPORT, error)}") from error


def _damaged(text: str) -> RLHFError:
    return RLHFError("M05", text, hint="make it again: rlhf eval --fresh --config FILE")
