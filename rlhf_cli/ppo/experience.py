"""Experience: a rollout with the scores, log-probs, values, rewards and advantages that an update trains on.

Scores are processed in this order, from the raw scores of the sources to the score at a response's last token:
clip each source -> weighted sum -> running normalisation -> clip -> missing_eos_penalty -> overlong_penalty

Shapes: B rows (episodes), R response width, N response tokens of a micro-batch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from rlhf_cli.config.ppo import PPOSettings, RolloutCorrection
from rlhf_cli.errors import RLHFError
from rlhf_cli.models.batch import EnsembleScores, MicroBatch, Record, Rollout
from rlhf_cli.models.parallel import ProcessGroup
from rlhf_cli.ppo import losses
from rlhf_cli.rewards.function import RolloutReward

MinibatchRows = tuple[Tensor, ...]  # micro-batches, each the rollout rows (n,) int64 in it
Stats = dict[str, float]  # metrics by name


# Scores


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
    """Return a source's scores of all rows, split over the ranks if the source `splits_rows`, else from rank 0."""
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
        raise RLHFError("R05", text, hint="return a number for each row from at least one of them")


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


# Experience


def estimate_advantages(
    rollout: Rollout,
    rewards: Tensor,
    values: Tensor | None,
    settings: PPOSettings,
) -> tuple[Tensor | None, Tensor | None]:
    """Return advantages by ppo.advantage, normalised by ppo.advantage_norm, and returns, from rewards; (B, R) each.

    Without `values` there are no returns, and advantages only for num_samples_per_prompt adjacent responses to each
    prompt.
    """
    mask = rollout.response_mask
    samples = settings.num_samples_per_prompt
    returns = None
    if values is not None:
        estimate = losses.VALUE_ADVANTAGES[settings.advantage]
        advantages, returns = estimate(rewards, values, mask, settings.gamma, settings.lam)
    elif rollout.has_groups(samples):
        advantages = losses.group_advantages(rewards, mask, samples, settings.advantage)
    else:
        return None, None
    if settings.advantage_norm == "batch":
        advantages = losses.masked_whiten(advantages, mask)
    return advantages, returns


@dataclass(frozen=True)
class TokenBatch:
    """Training targets of the N response tokens of a micro-batch, each (N,).

    Of the example at `Experience`, whose three response tokens are 8, 2 and 2:

        ids         [8, 2, 2]
        advantages  [0.94, 0.96, -1.05]
    """

    ids: Tensor  # int64
    logprobs: Tensor
    ref_logprobs: Tensor
    advantages: Tensor
    values: Tensor | None = None  # if there is a value model
    returns: Tensor | None = None  # if there is a value model
    weights: Tensor | None = None  # of the surrogate loss, by ppo.rollout_correction

    def __getitem__(self, part: slice) -> "TokenBatch":
        """Return consecutive tokens of the batch."""
        return TokenBatch(**{name: _part(tensor, part) for name, tensor in vars(self).items()})


def _part(tensor: Tensor | None, index: slice | tuple[Tensor, Tensor]) -> Any:
    return None if tensor is None else tensor[index]


@dataclass(frozen=True)
class Experience:
    """Everything an update needs, computed before it starts; 0 outside the response mask.

    Of the example at `Rollout`, with kl_coef 0.1, values of 0, gamma 1 and lam 1, and no whitening:

        scores      [1, -1]
        kl          [[0.2, 0.4], [0.5, 0]]
        rewards     [[-0.02, 0.96], [-1.05, 0]]
        advantages  [[0.94, 0.96], [-1.05, 0]]
    """

    rollout: Rollout
    minibatches: tuple[MinibatchRows, ...]  # of the first epoch: the log-probs below come from the same micro-batches
    packed: bool  # their rows are concatenated without padding
    score_result: ScoreResult
    kl_coef: float  # used in this update
    logprobs: Tensor  # (B, R) float32: of the policy, at the sampling temperature
    ref_logprobs: Tensor  # (B, R) float32
    kl: Tensor  # (B, R) float32: by ppo.kl_estimator, nats
    rewards: Tensor  # (B, R) float32: final score, minus the KL penalty if ppo.kl_in is reward
    advantages: Tensor | None  # (B, R) float32; None if ppo.advantage lacks its groups of responses to a prompt
    values: Tensor | None = None  # (B, R) float32: before each response token, if there is a value model
    returns: Tensor | None = None  # (B, R) float32: its targets
    weights: Tensor | None = None  # (B, R) float32: of the surrogate loss, by ppo.rollout_correction
    capped: Tensor | None = None  # bool: weights bounded by its cap, of the response tokens (T,) or of the rows (B,)

    @property
    def mask(self) -> Tensor:
        return self.rollout.response_mask

    @property
    def scores(self) -> Tensor:
        """Final scores, (B,) float32."""
        return self.score_result.final

    @property
    def log_ratio(self) -> Tensor:
        """log pi - log ref of each response token, (B, R) float32, in nats: the k1 estimator of the KL."""
        return torch.where(self.mask, self.logprobs - self.ref_logprobs, 0)

    @property
    def logprob_gap(self) -> Tensor:
        """|log-prob here - log-prob of the engine| of each response token, (T,) float32; empty without the engine's."""
        drawn = self.rollout.logprobs
        if drawn is None:
            return self.logprobs.new_empty(0)
        return (self.logprobs - drawn)[self.mask].abs()

    def corrected(self, option: RolloutCorrection | None) -> "Experience":
        """Return the experience with the weights of rollout_correction.

        Raises ValueError if the rollout lacks its engine's log-probs.
        """
        if option is None:
            return self
        drawn = self.rollout.logprobs
        if drawn is None:
            raise ValueError("ppo.rollout_correction needs the engine's log-probs of the response tokens")
        log_ratio = self.logprobs - drawn
        weights, capped = losses.correction_weights(log_ratio, self.mask, option.mode, option.cap)
        return replace(self, weights=weights, capped=capped)

    def token_batch(self, micro_batch: MicroBatch) -> TokenBatch:
        """Return the targets of a micro-batch's response tokens."""
        assert self.advantages is not None
        index = micro_batch.response_index
        return TokenBatch(
            ids=micro_batch.response_ids,
            logprobs=self.logprobs[index],
            ref_logprobs=self.ref_logprobs[index],
            advantages=self.advantages[index],
            values=_part(self.values, index),
            returns=_part(self.returns, index),
            weights=_part(self.weights, index),
        )

    @property
    def forward_tokens(self) -> int:
        """Tokens of one forward pass over the minibatches, padding included unless rows are packed."""
        if self.packed:
            return int(self.rollout.mask.sum())
        total = 0
        for rows in chain.from_iterable(self.minibatches):
            width = int(self.rollout.lengths[rows].max())
            total += len(rows) * width
        return total

    def metrics(self, *, kl_in_reward: bool) -> Stats:
        """Return metrics by TRL's names: sums over a response's tokens, averaged over rows.

        `objective/non_score_reward` is the reward's KL penalty, 0 with kl_in loss.
        """
        rollout = self.rollout
        score = float(self.scores.mean())
        kl = self._mean_sum(self.kl)
        penalty = -self.kl_coef * kl if kl_in_reward else 0.0
        return {
            "objective/kl": kl,
            "objective/kl_k1": self._mean_sum(self.log_ratio),
            "objective/entropy": self._mean_sum(-self.logprobs),
            "objective/non_score_reward": penalty,
            "objective/rlhf_reward": penalty + score,
            "objective/scores": score,
            **self._source_metrics(),
            **self._engine_metrics(),
            "objective/kl_coef": self.kl_coef,
            "objective/response_length": float(rollout.response_lengths.float().mean()),
            "objective/eos_fraction": float(rollout.ended.float().mean()),
            "objective/repetition": float(rollout.repetition.mean()),
            "val/num_eos_tokens": int(rollout.ended.sum()),
            **self._value_metrics(),
            "tokens/real": int(rollout.mask.sum()),
            "tokens/padded": self.forward_tokens,
        }

    def _mean_sum(self, x: Tensor) -> float:
        """Return the sum of x (B, R) over a response's tokens, averaged over rows."""
        return float(torch.where(self.mask, x, 0).sum(1).mean())

    def _source_metrics(self) -> Stats:
        """Return the mean score of each reward source and of an ensemble's members, and the share without a score."""
        metrics: Stats = {}
        scored = self.score_result.scored
        for name, scores in scored.items():
            if len(scores):
                metrics[f"objective/score/{name}"] = float(scores.float().mean())

        for name, scores in scored.items():
            unscored = 1 - len(scores) / len(self.rollout)
            if unscored:
                metrics[f"objective/unscored/{name}"] = unscored

        for name, ensemble in self.score_result.ensembles.items():
            for member, scores in ensemble.members.items():
                metrics[f"objective/score/{name}/{member}"] = float(scores.mean())
            metrics[f"objective/disagreement/{name}"] = float(ensemble.disagreement.mean())
        return metrics

    def _engine_metrics(self) -> Stats:
        """Return how the engine's log-probs differ, and the weights that correct it."""
        metrics: Stats = {}
        gap = self.logprob_gap
        if len(gap):
            p99 = gap.kthvalue(math.ceil(0.99 * len(gap))).values  # torch's quantile takes at most 2^24 numbers
            metrics["rollout/logprob_gap"] = float(gap.mean())
            metrics["rollout/logprob_gap_p99"] = float(p99)

        if self.weights is not None and self.capped is not None:
            metrics["rollout/correction_mean"] = float(self.weights[self.mask].mean())
            metrics["rollout/correction_capped"] = float(self.capped.float().mean())
        return metrics

    def _value_metrics(self) -> Stats:
        if self.values is None or self.returns is None:
            return {}
        explained = losses.explained_variance(self.values, self.returns, self.mask)
        return {"val/explained_variance": float(explained)}

    def histograms(self) -> dict[str, list[float]]:
        """Return the values behind some of the means: one per response, and one advantage per response token."""
        histograms = {"rollout/scores": self.scores}
        for name, scores in self.score_result.scored.items():
            histograms[f"rollout/score/{name}"] = scores
        histograms["rollout/kl_k1"] = self.log_ratio.sum(1)
        histograms["rollout/response_length"] = self.rollout.response_lengths
        if self.advantages is not None:
            histograms["rollout/advantages"] = self.advantages[self.mask]
        return {name: values.float().tolist() for name, values in histograms.items()}
