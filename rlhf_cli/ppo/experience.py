"""Experience: a rollout with the scores, log-probs, values, rewards and advantages that an update trains on.

Shapes: B rows (episodes), R response width, T response tokens of the rollout, N of a micro-batch.
"""

import math
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from rlhf_cli.config.ppo import PPOSettings, RolloutCorrection
from rlhf_cli.models.batch import MicroBatch, Rollout
from rlhf_cli.ppo import losses
from rlhf_cli.ppo.scores import ScoreResult

Minibatch = tuple[Tensor, ...]  # its micro-batches, each as the indices (n,) int64 of its rows in the rollout
Stats = dict[str, float]  # metrics by name


def estimate_advantages(
    rollout: Rollout,
    rewards: Tensor,
    values: Tensor | None,
    settings: PPOSettings,
) -> tuple[Tensor | None, Tensor | None, float]:
    """Return advantages by ppo.advantage and returns, from rewards, (B, R) each, and the divisor of the advantages.

    It is their standard deviation with ppo.advantage_norm batch, else 1. Without `values` there are no returns, and
    advantages only for num_samples_per_prompt adjacent responses to each prompt.
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
        return None, None, 1.0
    if settings.advantage_norm == "none":
        return advantages, returns, 1.0
    return losses.masked_whiten(advantages, mask), returns, losses.whitening_scale(advantages, mask)


def kl_loss_coef(kl_coef: float, advantage_scale: float, settings: PPOSettings) -> float:
    """Return the coefficient of the KL in the loss, 0 without it.

    With kl_in both it is divided by what the advantages were divided by, as they have the KL of the later tokens.
    """
    if settings.kl_in == "both":
        return kl_coef / advantage_scale
    return kl_coef if settings.kl_in == "loss" else 0.0


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
    minibatches: tuple[Minibatch, ...]  # of the first epoch: the log-probs below come from the same micro-batches
    packed: bool  # their rows are concatenated without padding
    score_result: ScoreResult
    kl_coef: float  # used in this update
    kl_loss_coef: float  # of the KL in the loss, in units of the advantages; 0 without it
    logprobs: Tensor  # (B, R) float32: of the policy, at the sampling temperature
    ref_logprobs: Tensor  # (B, R) float32
    kl: Tensor  # (B, R) float32: by ppo.kl_estimator, nats
    rewards: Tensor  # (B, R) float32: final score, minus the KL penalty unless ppo.kl_in is loss
    advantages: Tensor | None  # (B, R) float32; None if ppo.advantage lacks its groups of responses to a prompt
    values: Tensor | None = None  # (B, R) float32: before each response token, if there is a value model
    returns: Tensor | None = None  # (B, R) float32: its targets
    weights: Tensor | None = None  # (B, R) float32: of the surrogate loss, by ppo.rollout_correction
    capped: Tensor | None = None  # bool: weights bounded by its cap, of the response tokens (T,) or of the rows (B,)

    @property
    def mask(self) -> Tensor:
        """The response mask, (B, R); `rollout.mask` is that of prompts and responses."""
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
