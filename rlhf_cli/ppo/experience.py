"""Experience: a rollout with the log-probs, values, rewards and advantages that an update trains on.

Shapes: B rows (episodes), R response width, N response tokens of a micro-batch.
"""

from dataclasses import dataclass, fields
from itertools import chain

from torch import Tensor

from rlhf_cli.models.batch import MicroBatch, Rollout
from rlhf_cli.ppo.scores import ScoreResult

Minibatch = tuple[Tensor, ...]  # micro-batches, each the rollout rows (n,) int64 in it


@dataclass(frozen=True)
class TokenBatch:
    """Training targets of the N response tokens of a micro-batch, each (N,)."""

    ids: Tensor  # int64
    logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor

    def __getitem__(self, part: slice) -> "TokenBatch":
        return TokenBatch(**{field.name: getattr(self, field.name)[part] for field in fields(self)})


@dataclass(frozen=True)
class Experience:
    """Everything an update needs, computed before it starts; 0 outside the response mask."""

    rollout: Rollout
    minibatches: tuple[Minibatch, ...]  # of the first epoch: the log-probs below come from the same micro-batches
    packed: bool  # their rows are concatenated without padding
    score_result: ScoreResult
    kl_coef: float  # used in this update
    logprobs: Tensor  # (B, R) float32: of the policy, at the sampling temperature
    ref_logprobs: Tensor  # (B, R) float32
    values: Tensor  # (B, R) float32: before each response token
    kl: Tensor  # (B, R) float32: by ppo.kl_estimator, nats
    rewards: Tensor  # (B, R) float32: final score, less the KL penalty if ppo.kl_in is reward
    advantages: Tensor  # (B, R) float32
    returns: Tensor  # (B, R) float32

    @property
    def mask(self) -> Tensor:
        return self.rollout.response_mask

    @property
    def scores(self) -> Tensor:
        """Final scores, (B,) float32."""
        return self.score_result.final

    def gather(self, micro_batch: MicroBatch) -> TokenBatch:
        """Return the targets of a micro-batch's response tokens."""
        names = ("logprobs", "ref_logprobs", "values", "advantages", "returns")
        index = micro_batch.response_index
        return TokenBatch(micro_batch.targets, **{name: getattr(self, name)[index] for name in names})

    @property
    def forward_tokens(self) -> int:
        """Tokens of one forward pass over the minibatches, padding included unless rows are packed."""
        if self.packed:
            return int(self.rollout.mask.sum())
        rows = chain.from_iterable(self.minibatches)
        return sum(len(part) * int(self.rollout.lengths[part].max()) for part in rows)
