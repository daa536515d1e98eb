"""Score processing: from the raw scores of the reward sources to the score at a response's last token.

clip each source -> weighted sum -> running normalisation -> clip -> missing_eos_penalty -> overlong_penalty
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_cli.config.ppo_options import PPOSettings
from rlhf_cli.models.batch import EnsembleScores, Rollout
from rlhf_cli.ppo import losses


@dataclass(frozen=True)
class RunningMeanStd:
    """Mean and standard deviation of all values so far, updated batch by batch (Welford)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared deviations from the mean; the key in checkpoints

    @classmethod
    def of(cls, values: Tensor) -> "RunningMeanStd":
        """Return the statistics of `values` (B,), computed in float64."""
        wide = values.double()
        mean = float(wide.mean())
        return cls(len(wide), mean, float(((wide - mean) ** 2).sum()))

    def __add__(self, other: "RunningMeanStd") -> "RunningMeanStd":
        """Combine two sets of values (Chan, Golub and LeVeque 1983, equations 2.1)."""
        total, delta = self.count + other.count, other.mean - self.mean
        return RunningMeanStd(
            total,
            self.mean + delta * other.count / total,
            self.squares + other.squares + delta**2 * self.count * other.count / total,
        )

    def updated(self, values: Tensor) -> "RunningMeanStd":
        """Return the statistics with `values` (B,) included."""
        return self + RunningMeanStd.of(values)

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

    raw: dict[str, Tensor]  # by reward source; an ensemble's combined score
    ensembles: dict[str, EnsembleScores]  # by reward source, only those that are ensembles
    weighted_sum: Tensor  # clipped raw scores times their weights, before normalisation
    stats: RunningMeanStd  # of `weighted_sum` over the run, this rollout included
    final: Tensor  # normalised, clipped, less penalties: the reward at the last real token


def weighted_sum(raw: dict[str, Tensor], weights: dict[str, float], clips: dict[str, float]) -> Tensor:
    """Return sum_s weights[s] clip(raw[s], -clips[s], clips[s]), (B,); a source without a clip is not clipped."""
    bounds = {name: clips.get(name, torch.inf) for name in raw}
    clipped = {name: scores.clamp(-bounds[name], bounds[name]) for name, scores in raw.items()}
    return torch.stack([weights[name] * scores for name, scores in clipped.items()]).sum(0)


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
    if penalty := settings.overlong_penalty:
        fraction = losses.overlong_fraction(rollout.response_lengths, limit, penalty.tokens)
        scores = scores - penalty.factor * fraction.to(scores.dtype)
    return scores


def unscaled_scores(result: ScoreResult, settings: PPOSettings) -> Tensor:
    """Return the weighted sum less the penalties, (B,): comparable over updates, unlike the final scores."""
    return result.weighted_sum + (result.final - normalize_scores(result.weighted_sum, result.stats, settings))
