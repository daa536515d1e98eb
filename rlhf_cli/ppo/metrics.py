"""What an update is measured by, under TRL's names. Sums are over a response's tokens, means over rows."""

import torch
from torch import Tensor

from rlhf_cli.ppo import formulas
from rlhf_cli.ppo.records import Experience

Stats = dict[str, float]


def objective(experience: Experience, *, in_reward: bool) -> Stats:
    """The rollout as it was judged. `objective/non_score_reward` is the KL penalty as applied: 0 with kl_in loss."""
    mask, rollout, kl_coef = experience.mask, experience.rollout, experience.kl_coef

    def per_row(x: Tensor) -> float:
        return float(torch.where(mask, x, 0).sum(1).mean())

    penalty, score = -kl_coef * per_row(experience.kl) if in_reward else 0.0, float(experience.scores.mean())
    return {
        "objective/kl": per_row(experience.kl),
        "objective/kl_k1": per_row(experience.logprobs - experience.ref_logprobs),
        "objective/entropy": per_row(-experience.logprobs),
        "objective/non_score_reward": penalty,
        "objective/rlhf_reward": penalty + score,
        "objective/scores": score,
        **{f"objective/score/{name}": float(raw.float().mean()) for name, raw in experience.scored.sources.items()},
        **_opinions(experience),
        "objective/kl_coef": kl_coef,
        "objective/response_length": float(rollout.response_lengths.float().mean()),
        "objective/eos_fraction": float(rollout.ended.float().mean()),
        "objective/repetition": float(rollout.repetition.mean()),
        "val/num_eos_tokens": int(rollout.ended.sum()),
        "val/explained_variance": float(formulas.explained_variance(experience.values, experience.returns, mask)),
        "tokens/real": int(rollout.mask.sum()),
        "tokens/padded": experience.tokens_read,
    }


def distributions(experience: Experience) -> dict[str, list[float]]:
    """What some of these are the means of: a number a response, of advantages one a response token."""
    mask, rollout = experience.mask, experience.rollout
    kl = torch.where(mask, experience.logprobs - experience.ref_logprobs, 0).sum(1)
    found = {
        "scores": experience.scores,
        **{f"score/{name}": raw for name, raw in experience.scored.sources.items()},
        "kl_k1": kl,
        "response_length": rollout.response_lengths,
        "advantages": experience.advantages[mask],
    }
    return {f"rollout/{name}": values.float().tolist() for name, values in found.items()}


def _opinions(experience: Experience) -> Stats:
    """Of each ensemble: its members' raw scores, and how far they are apart."""
    found: Stats = {}
    for name, opinions in experience.scored.opinions.items():
        found |= {f"objective/score/{name}/{each}": float(raw.mean()) for each, raw in opinions.members.items()}
        found[f"objective/disagreement/{name}"] = float(opinions.disagreement.mean())
    return found


def sums(parts: list[Stats]) -> Stats:
    """Sums by name of what several say, each of whom may leave names out."""
    found: Stats = {}
    for part in parts:
        for name, number in part.items():
            found[name] = found[name] + number if name in found else number
    return found


def averages(steps: list[Stats]) -> Stats:
    """Means over the update's optimizer steps, those that ratio_threshold skipped left out (where not all were)."""
    made = [step for step in steps if not step["skipped"]] or steps
    names = [name for name in made[0] if name not in ("ratio_error", "skipped")]
    stats = {name: sum(step[name] for step in made) / len(made) for name in names}
    stats["val/ratio_var"] = sum((step["val/ratio"] - stats["val/ratio"]) ** 2 for step in made) / len(made)
    if made is steps and steps[0]["skipped"]:
        stats |= {"policy/grad_norm": 0.0, "value/grad_norm": 0.0}  # no step was made
    stats["policy/skipped_minibatches"] = sum(step["skipped"] for step in steps)
    return stats | {"policy/first_ratio_error": steps[0]["ratio_error"]}
