"""Checks that the engine samples from the policy: its settings, and its log-probs of what it drew."""

from collections.abc import Callable

import torch
from torch import Tensor

from rlhf_cli.config.ppo import PPOSettings
from rlhf_cli.errors import RLHFError
from rlhf_cli.models.batch import Rollout
from rlhf_cli.ppo.experience import Experience
from rlhf_cli.ppo.rollout import RolloutEngine

# Of a rollout of one row: the policy's log-probs (1, R), and the engine's response if row `int` is drawn alone, None if
# its draws depend on the batch.
LogprobsAlone = Callable[[Rollout], Tensor]
DrawAlone = Callable[[Rollout, int], Rollout | None]


def require_same_settings(engine: RolloutEngine, settings: PPOSettings) -> None:
    """Check that log-probs are computed as the engine samples, for the settings that an engine has."""
    for key in ("temperature", "bf16"):
        read = getattr(settings, key)
        sampled = getattr(engine, key, read)
        assert sampled == read, f"the engine samples with {key} {sampled}, log-probs are computed with {read}"


def require_small_gap(
    experience: Experience,
    limit: float,
    step: int,
    logprobs_alone: LogprobsAlone,
    draw_alone: DrawAlone,
) -> None:
    """Raise RLHFError R19 if the engine's log-probs differ by more than `limit` nats a token on average.

    The cause is that of the worst row, which the policy, and then the engine, compute alone.
    """
    mean = float(experience.logprob_gap.mean())
    if not mean > limit:  # NaN without the engine's log-probs
        return

    gaps = torch.zeros_like(experience.logprobs)
    gaps[experience.mask] = experience.logprob_gap
    row = int(gaps.sum(1).argmax())
    part = slice(row, row + 1)
    one = experience.rollout.rows(part)

    gap = _mean_gap(one, experience.logprobs[part], logprobs_alone)
    again = draw_alone(one, row) if gap <= limit else None
    if gap > limit:
        cause = f"the policy's passes over a batch differ by {gap:.2g} nats a token from those of row {row} alone"
        hint = "set ppo.packing: false, or ppo.per_device_train_batch_size: 1"
    elif again is not None and _mean_gap(again, again.logprobs, logprobs_alone) <= limit:
        cause = f"what the engine draws depends on the padding beside a row; row {row} drawn alone is right"
        hint = "set ppo.local_rollout_forward_batch_size: 1"
    else:
        cause = "it draws from other weights"
        hint = "check that the engine gets the last weights"

    difference = f"the engine's log-probs differ from the policy's by {mean:.3g} nats a token"
    text = f"step {step}: {difference}, more than ppo.max_logprob_gap {limit:g}: {cause}; nothing was trained on them"
    raise RLHFError("R19", text, hint=f"the same command resumes; {hint}")


def _mean_gap(one: Rollout, logprobs: Tensor | None, logprobs_alone: LogprobsAlone) -> float:
    """Return the mean difference, in nats a token, of `logprobs` (1, R) from those of a row alone."""
    assert logprobs is not None
    gaps = logprobs_alone(one) - logprobs
    return float(gaps[one.response_mask].abs().mean())
