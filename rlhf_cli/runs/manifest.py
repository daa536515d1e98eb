"""manifest.json: what a finished stage wrote, from what, and with what results. The last file of a stage."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, PrivateAttr, ValidationError

from rlhf_cli.files import read_checked_json, write_checked_json
from rlhf_cli.runs.layout import MANIFEST
from rlhf_cli.runs.report import RewardModelAccuracy, RewardModelCard, WinRates, reward_model_result
from rlhf_cli.runs.strict_json import Interval, Share, StrictModel, describe_problem

SCHEMA = 2


class KnownMetrics(StrictModel):
    """The metrics that the report reads. A stage may have others."""

    eval_loss: float | None = None
    accuracy: Share | None = None
    accuracy_ci95: Interval = None
    n: int | None = None
    margin: float | None = None
    ece: float | None = None
    length_correlation: float | None = None
    length_correlation_ci95: Interval = None
    response_length: float | None = Field(None, alias="objective/response_length")  # of PPO
    win_rate: dict[str, WinRates] = Field(default_factory=dict)  # of an evaluation, by pair of policies


def _check_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    KnownMetrics.model_validate(metrics)
    return metrics


class ParentEntry(StrictModel):
    """A model that the stage read: its path relative to the stage's folder, or its hub id."""

    path: str
    stage: str
    sha256: str
    revision: str | None = None  # of a hub id


class ScoredRow(StrictModel):
    """A held-out row and the score that the reward model gave it at the end of its training."""

    prompt_ids: list[int]
    response_ids: list[int]
    score: float


class BestStep(StrictModel):
    """The snapshot of PPO whose metric was the highest: a held-out judge's score, else the objective's."""

    step: int
    metric: str
    value: float | None = None  # None: the held-out judge scored no response


class Manifest(StrictModel):
    """The manifest of a finished stage; empty for a model that no stage wrote, and for an unfinished stage."""

    schema_version: int | None = Field(default=None, alias="schema")
    stage: str | None = None
    parents: dict[str, ParentEntry] = Field(default_factory=dict)  # by config key
    config_sha256: str | None = None
    data: dict[str, str] = Field(default_factory=dict)  # config key -> hash of the content
    seed: int | None = None
    run_name: str | None = None
    versions: dict[str, str] = Field(default_factory=dict)  # of this package, Python and the libraries
    git: str | None = None  # revision of the folder of the config
    files: dict[str, Any] = Field(default_factory=dict)  # relative POSIX name -> {"sha256", "bytes"}
    model_sha256: str | None = None
    tokenizer_sha256: str | None = None
    template_sha256: str | None = None  # None: the tokenizer has no chat template
    special_tokens: dict[str, int | Sequence[int] | None] = Field(default_factory=dict)
    prompt_form: str | None = None  # of the training data: text, conversation or transcript
    metrics: Annotated[dict[str, Any], AfterValidator(_check_metrics)] = Field(default_factory=dict)
    card: RewardModelCard | None = None
    members: dict[str, ParentEntry] = Field(default_factory=dict)  # the others of reward.ensemble, by number
    probes: list[ScoredRow] = Field(default_factory=list)
    probes_dtype: str | None = None
    engine: str | None = None  # that generated PPO's responses
    model_is: str | None = None  # "the last step" or "the best step"
    stopped: str | None = None  # the reason why PPO ended early
    step: int | None = None
    reward_mean: float | None = None  # by which the scores of a reward model are normalized
    reward_std: float | None = None
    reward_length_slope: float | None = None  # raw score per token that `reward.length_debias` subtracts
    reward_length_mean: float | None = None
    trust_remote_code: bool = False
    best: BestStep | None = None

    _odd: str | None = PrivateAttr(None)

    @property
    def odd(self) -> str | None:
        """What is of another type than today's in a file that is as it was written; the object leaves it out."""
        return self._odd

    @property
    def start(self) -> ParentEntry | None:
        """The model that the stage trained from: the SFT model, of PPO the reference; of SFT its base."""
        return self.parents.get("models.sft") or self.parents.get("model.path")

    @cached_property
    def known_metrics(self) -> KnownMetrics:
        """The metrics that have a type; `metrics` has all."""
        return KnownMetrics.model_validate(self.metrics)

    @cached_property
    def reward_model(self) -> RewardModelCard | RewardModelAccuracy | None:
        """The card of a reward model, or else its accuracy; None without held-out pairs."""
        return reward_model_result(self.card, self.metrics)

    def records(self, field: str) -> bool:
        """Return True if the file has this field; older versions of this package wrote fewer."""
        return field in self.model_fields_set


def read_manifest(folder: Path) -> tuple[Manifest, str | None]:
    """Return a stage's manifest and the damage of its file, or None. Manifests of schema 1 have no checksum.

    Values of other types than today's are no damage, which would train the stage again: see `Manifest.odd`.
    """
    values, problem = read_checked_json(folder / MANIFEST)
    if values.get("schema") == 1:
        problem = None

    files = values.get("files")
    if not isinstance(files, dict):
        return Manifest(), problem or f"{MANIFEST} names no files"

    try:
        return Manifest.model_validate(values), problem
    except ValidationError as error:
        odd_keys = {each["loc"][0] for each in error.errors(include_url=False, include_input=False)}
        manifest = Manifest.model_validate({key: value for key, value in values.items() if key not in odd_keys})
        manifest._odd = describe_problem(MANIFEST, error)
        return manifest, problem


def write_manifest(folder: Path, entries: Mapping[str, Any]) -> None:
    """Write the manifest of these entries, in their order, which completes the stage."""
    Manifest.model_validate(entries)
    write_checked_json(folder / MANIFEST, entries)
