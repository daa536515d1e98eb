"""Schema of manifest.json, whose values may be of wrong types. Other keys may hold anything."""

from collections.abc import Mapping

from pydantic import Field, ValidationError

from rlhf_cli.runs.report import RewardModelCard
from rlhf_cli.runs.strict_json import Interval, Share, StrictModel, describe_problem


class Metrics(StrictModel):
    eval_loss: float | None = None
    accuracy: Share | None = None
    accuracy_ci95: Interval = None
    n: int | None = None
    margin: float | None = None
    ece: float | None = None
    length_correlation: float | None = None
    length_correlation_ci95: Interval = None


class BestStep(StrictModel):
    step: int
    metric: str
    value: float | None = None  # None: the held-out judge scored no response


class ParentEntry(StrictModel):
    path: str
    stage: str
    sha256: str
    revision: str | None = None


class Manifest(StrictModel):
    """manifest.json of a stage."""

    stage: str | None = None
    parents: dict[str, ParentEntry] = Field(default_factory=dict)
    data: dict[str, str] = Field(default_factory=dict)
    seed: int | None = None
    run_name: str | None = None
    versions: dict[str, str] = Field(default_factory=dict)
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


def schema_error(name: str, value: Mapping[str, object]) -> str | None:
    """Return what is invalid in a manifest.json, or None."""
    try:
        Manifest.model_validate(value)
    except ValidationError as error:
        return describe_problem(name, error)
    return None
