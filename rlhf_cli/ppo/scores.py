"""Scores of a rollout, from the raw scores of the sources to the score at a response's last token, in this order:

clip each source -> weighted sum -> running normalisation -> clip -> missing_eos_penalty -> overlong_penalty

Shapes: B rows (episodes).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_cli.config.ppo import PPOSettings
from rlhf_cli.errors import RLHFError
from rlhf_cli.models.batch import EnsembleScores, Record, Rollout
from rlhf_cli.models.parallel import ProcessGroup
from rlhf_cli.ppo import losses
from rlhf_cli.rewards.function import RolloutReward


@dataclass(frozen=True)
class RunningMeanStd:
    """Mean and standard deviation of all values so far; `moments + RunningMeanStd.of(batch)` has the batch, too."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared deviations from the mean

    @classmethod
    def of(cls, values: Tensor) -> "RunningMeanStd":
        """Return the statistics of `values` (B,), computed in float64."""
        wide = values.double()
        mean = float(wide.mean())
        squares = float(((wide - mean) ** 2).sum())
        return cls(len(wide), mean, squares)

    def __add__(self, other: "RunningMeanStd") -> "RunningMeanStd":
        """Combine two sets of values (Chan, Golub and LeVeque 1983, equations 2.1)."""
        total = self.count + other.count
        delta = other.mean - self.mean
        return RunningMeanStd(
            total,
            self.mean + delta * other.count / total,
            self.squares + other.squares + delta**2 * self.count * other.count / total,
        )

    @property
    def std(self) -> float:
        """Unbiased standard deviation; 0 for fewer than two values."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0

    @property
    def standard_error(self) -> float:
        """Standard error of the mean; infinite for fewer than two values."""
        return self.std / math.sqrt(self.count) if self.count > 1 else math.inf


@dataclass(frozen=True)
class ScoreResult:
    """Scores of a rollout at each stage of processing, each (B,) float32."""

    raw: dict[str, Tensor]  # by reward source; an ensemble's combined score; NaN: a function gave the row no score
    ensembles: dict[str, EnsembleScores]  # by reward source, only those that are ensembles
    weighted_sum: Tensor  # clipped raw scores times their weights, before normalisation
    moments: RunningMeanStd  # of `weighted_sum` over the run, this rollout included
    final: Tensor  # normalised, clipped, less penalties: the reward at the last real token

    @property
    def scored(self) -> dict[str, Tensor]:
        """Raw scores of the rows that a source gave one, (b,) each."""
        return {name: raw[~raw.isnan()] for name, raw in self.raw.items()}


def as_row_scores(name: str, result: Any, rollout: Rollout) -> Tensor:
    """Return scores as (B,) float32 on the rollout's device. Raises RLHFError R05 for another shape."""
    if isinstance(result, EnsembleScores):
        result = result.score
    scores = torch.as_tensor(result, dtype=torch.float32, device=rollout.ids.device)
    num_rows = len(rollout)
    if scores.shape != (num_rows,):
        text = f"reward `{name}` gave scores of shape {tuple(scores.shape)} for {num_rows} responses"
        raise RLHFError("R05", text, hint="return one number per response")
    return scores


def call_source(source: RolloutReward, rollout: Rollout, process_group: ProcessGroup) -> Any:
    """Return a source's scores of all rows, split over the ranks if the source `splits_rows`, else from rank 0.

    A source that has `prepare` is prepared first, on all ranks.
    """
    prepare = getattr(source, "prepare", None)
    if prepare is not None:
        prepare(rollout)
    if process_group.world_size == 1:
        return source(rollout)
    if not getattr(source, "splits_rows", False):
        return process_group.run_on_main(lambda: _to_cpu(source(rollout)))

    def score_part(part: slice) -> Any:
        return _to_cpu(source(rollout.rows(part)))

    parts: list[Any] = process_group.map_rows(len(rollout), score_part)
    if isinstance(parts[0], EnsembleScores):
        return EnsembleScores.concat(parts)
    return torch.cat(parts)


def _to_cpu(scores: Any) -> Any:
    """Return the scores of a source on the CPU, if they are tensors."""
    return scores.cpu() if isinstance(scores, Tensor | EnsembleScores) else scores


def weighted_sum(
    raw: dict[str, Tensor], weights: dict[str, float], clips: dict[str, float], records: Sequence[Record] = ()
) -> Tensor:
    """Return sum_s weights[s] clip(raw[s], -clips[s], clips[s]), (B,), over the sources that score the row (not NaN).

    A source without a clip is not clipped. Raises RLHFError R05 for a row that no source with a weight scores.
    """
    _require_a_score(raw, weights, records)
    terms = []
    for name, scores in raw.items():
        if name in clips:
            scores = scores.clamp(-clips[name], clips[name])
        terms.append(torch.where(scores.isnan(), 0, weights[name] * scores))
    return torch.stack(terms).sum(0)


def _require_a_score(raw: dict[str, Tensor], weights: dict[str, float], records: Sequence[Record]) -> None:
    """Raise RLHFError R05 for a row that no source with a weight scores."""
    unscored = [scores.isnan() for name, scores in raw.items() if weights[name]]
    if not unscored:
        return

    rows = torch.stack(unscored).all(0).nonzero()
    if len(rows):
        row = int(rows[0])
        text = f"no reward has a score for row {row}: each function returned None"
        if records:
            prompt = str(records[row]["prompt"])
            text = f"{text} (prompt: {prompt[:60]!r})"
        hint = "return a number for each row from at least one of them; an answer that is too long for a judge has none"
        raise RLHFError("R05", text, hint=hint)


def normalize_scores(scores: Tensor, stats: RunningMeanStd, settings: PPOSettings) -> Tensor:
    """Divide scores (B,) by their running deviation and clip them, as set; a deviation of 0 leaves them unscaled."""
    if settings.use_score_scaling and stats.std > 0:
        shift = stats.mean if settings.use_score_norm else 0.0
        scores = (scores - shift) / stats.std
    if settings.score_clip is not None:
        scores = scores.clamp(-settings.score_clip, settings.score_clip)
    return scores


def apply_penalties(scores: Tensor, rollout: Rollout, limit: int, settings: PPOSettings) -> Tensor:
    """Subtract missing_eos_penalty and overlong_penalty from scores (B,); `limit` is the response length limit."""
    if settings.missing_eos_penalty and settings.stop_token != "none":
        scores = scores - settings.missing_eos_penalty * ~rollout.ended

    penalty = settings.overlong_penalty
    if penalty:
        fraction = losses.overlong_fraction(rollout.response_lengths, limit, penalty.tokens)
        scores = scores - penalty.factor * fraction.to(scores.dtype)
    return scores


def unscaled_scores(result: ScoreResult, settings: PPOSettings) -> Tensor:
    """Return the weighted sum less the penalties, (B,): comparable over updates, unlike the final scores."""
    penalties = result.final - normalize_scores(result.weighted_sum, result.moments, settings)
    return result.weighted_sum + penalties
