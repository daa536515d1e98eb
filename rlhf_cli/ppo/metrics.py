"""Metrics of an update, under TRL's names: summed over a response's tokens, averaged over rows."""

import torch
from torch import Tensor

from rlhf_cli.ppo import losses
from rlhf_cli.ppo.experience import Experience

Stats = dict[str, float]


def rollout_metrics(experience: Experience, *, kl_in_reward: bool) -> Stats:
    """Return a rollout's metrics; `objective/non_score_reward` is the reward's KL penalty, 0 with kl_in loss."""
    mask, rollout, kl_coef = experience.mask, experience.rollout, experience.kl_coef

    def mean_sum(x: Tensor) -> float:
        return float(torch.where(mask, x, 0).sum(1).mean())

    penalty, score = -kl_coef * mean_sum(experience.kl) if kl_in_reward else 0.0, float(experience.scores.mean())
    return {
        "objective/kl": mean_sum(experience.kl),
        "objective/kl_k1": mean_sum(experience.logprobs - experience.ref_logprobs),
        "objective/entropy": mean_sum(-experience.logprobs),
        "objective/non_score_reward": penalty,
        "objective/rlhf_reward": penalty + score,
        "objective/scores": score,
        **{f"objective/score/{name}": float(raw.float().mean()) for name, raw in experience.score_result.raw.items()},
        **_ensemble_metrics(experience),
        "objective/kl_coef": kl_coef,
        "objective/response_length": float(rollout.response_lengths.float().mean()),
        "objective/eos_fraction": float(rollout.ended.float().mean()),
        "objective/repetition": float(rollout.repetition.mean()),
        "val/num_eos_tokens": int(rollout.ended.sum()),
        "val/explained_variance": float(losses.explained_variance(experience.values, experience.returns, mask)),
        "tokens/real": int(rollout.mask.sum()),
        "tokens/padded": experience.forward_tokens,
    }


def rollout_histograms(experience: Experience) -> dict[str, list[float]]:
    """Return the values behind some of the means: one per response, and one advantage per response token."""
    mask, rollout = experience.mask, experience.rollout
    kl = torch.where(mask, experience.logprobs - experience.ref_logprobs, 0).sum(1)
    histograms = {
        "scores": experience.scores,
        **{f"score/{name}": raw for name, raw in experience.score_result.raw.items()},
        "kl_k1": kl,
        "response_length": rollout.response_lengths,
        "advantages": experience.advantages[mask],
    }
    return {f"rollout/{name}": values.float().tolist() for name, values in histograms.items()}


def _ensemble_metrics(experience: Experience) -> Stats:
    """Return each ensemble's mean score by member, and the mean deviation between members."""
    stats: Stats = {}
    for name, ensemble in experience.score_result.ensembles.items():
        stats |= {f"objective/score/{name}/{member}": float(raw.mean()) for member, raw in ensemble.members.items()}
        stats[f"objective/disagreement/{name}"] = float(ensemble.disagreement.mean())
    return stats


def sum_metrics(parts: list[Stats]) -> Stats:
    """Return the sums by name; a part may lack names."""
    sums: Stats = {}
    for part in parts:
        for name, number in part.items():
            sums[name] = sums[name] + number if name in sums else number
    return sums


def mean_over_steps(steps: list[Stats]) -> Stats:
    """Return the means over optimizer steps, without those skipped by ratio_threshold (unless all were)."""
    counted = [step for step in steps if not step["skipped"]] or steps
    names = [name for name in counted[0] if name not in ("ratio_error", "skipped")]
    stats = {name: sum(step[name] for step in counted) / len(counted) for name in names}
    stats["val/ratio_var"] = sum((step["val/ratio"] - stats["val/ratio"]) ** 2 for step in counted) / len(counted)
    if counted is steps and steps[0]["skipped"]:
        stats |= {"policy/grad_norm": 0.0, "value/grad_norm": 0.0}  # no optimizer step was taken
    stats["policy/skipped_minibatches"] = sum(step["skipped"] for step in steps)
    return stats | {"policy/first_ratio_error": steps[0]["ratio_error"]}
