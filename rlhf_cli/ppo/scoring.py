"""From the sources' raw scores to the score that is placed on a response's last token.

each source's clip -> sum by weight -> running scaling -> clip -> minus missing_eos_penalty -> minus overlong_penalty
"""

import torch
from torch import Tensor

from rlhf_cli.ppo import formulas
from rlhf_cli.ppo.moments import Moments
from rlhf_cli.ppo.records import Rollout, Scored
from rlhf_cli.ppo.settings import PPOSettings


def weighted(sources: dict[str, Tensor], weights: dict[str, float], clips: dict[str, float]) -> Tensor:
    """The sources' raw scores, each (B,), clipped to +-`clips` where one has such, times their weights, added up."""
    bounds = {name: clips.get(name, torch.inf) for name in sources}
    clipped = {name: raw.clamp(-bounds[name], bounds[name]) for name, raw in sources.items()}
    return torch.stack([weights[name] * scores for name, scores in clipped.items()]).sum(0)


def scaled(scores: Tensor, moments: Moments, settings: PPOSettings) -> Tensor:
    """Scores (B,) over their running deviation, and clipped. Scores that never differed have none: they stay."""
    if settings.use_score_scaling and moments.std > 0:
        shift = moments.mean if settings.use_score_norm else 0.0
        scores = (scores - shift) / moments.std
    if settings.score_clip is not None:
        scores = scores.clamp(-settings.score_clip, settings.score_clip)
    return scores


def penalised(scores: Tensor, rollout: Rollout, limit: int, settings: PPOSettings) -> Tensor:
    """Scores (B,) less what a response pays that has no end, or comes near its limit of `limit` tokens."""
    if settings.missing_eos_penalty and settings.stop_token != "none":
        scores = scores - settings.missing_eos_penalty * ~rollout.ended
    if overlong := settings.overlong_penalty:
        over = formulas.overlong(rollout.response_lengths, limit, overlong.tokens)
        scores = scores - overlong.factor * over.to(scores.dtype)
    return scores


def unscaled(scored: Scored, settings: PPOSettings) -> Tensor:
    """Scores (B,) in the sources' own unit, which is the same in all updates: their sum less the penalties."""
    return scored.summed + (scored.placed - scaled(scored.summed, scored.moments, settings))
