"""Metrics of an update, as in metrics.jsonl."""

import math
from statistics import fmean, pstdev, pvariance

import torch
from torch import Tensor

from tests.reference.advantages import Experience
from tests.reference.losses import rollout_correction
from tests.reference.optimization import Step, learning_rate
from tests.reference.state import State


def update_metrics(state: State, experience: Experience, steps: list[Step], epochs: int) -> dict[str, float]:
    """Return the metrics: sums over a response's tokens, means over rows and over the optimizer steps."""
    num_rows = len(state.rows)
    kl = mean_sum(experience.kl)
    score = fmean(experience.scores.final)
    penalty = 0.0 if state.settings.kl_in == "loss" else -state.kl_coef * kl
    entropy = -mean_sum(experience.logprobs)
    num_ended = sum(state.ended(row) for row in state.rows)
    lengths = [len(response) for response in state.responses]
    prompt_lengths = [len(prompt) for prompt in state.prompts]
    return {
        "episode": float((state.update + 1) * num_rows),
        "objective/kl": kl,
        "objective/kl_k1": -entropy - mean_sum(experience.ref_logprobs),
        "objective/entropy": entropy,
        "objective/non_score_reward": penalty,
        "objective/rlhf_reward": penalty + score,
        "objective/scores": score,
        **source_metrics(state, experience),
        **engine_metrics(state, experience),
        "objective/kl_coef": state.kl_coef,
        "objective/response_length": fmean(lengths),
        "objective/eos_fraction": num_ended / num_rows,
        "objective/repetition": fmean(map(repetition, state.responses)),
        "val/num_eos_tokens": float(num_ended),
        **value_metrics(experience),
        "tokens/real": float(sum(lengths) + sum(prompt_lengths)),
        **mean_metrics(steps),
        "policy/epochs": float(epochs),
        **learning_rates(state),
        "next kl_coef": next_kl_coef(state, kl),
    }


def mean_sum(rows: list[Tensor]) -> float:
    return fmean(float(row.sum()) for row in rows)


def source_metrics(state: State, experience: Experience) -> Step:
    """Return the mean score of each source and of an ensemble's members, and the share of rows without a score.

    Of an ensemble also the mean over rows of the deviation between members.
    """
    metrics: Step = {}
    for name, given in experience.scores.given.items():
        if given:
            metrics[f"objective/score/{name}"] = fmean(given)
        if len(given) < len(state.rows):
            metrics[f"objective/unscored/{name}"] = 1 - len(given) / len(state.rows)

        if state.sources[name].combine is not None:
            members = experience.scores.members[name]
            for member, raw in members.items():
                metrics[f"objective/score/{name}/{member}"] = fmean(raw)
            by_row = zip(*members.values(), strict=True)
            metrics[f"objective/disagreement/{name}"] = fmean(map(pstdev, by_row))
    return metrics


def engine_metrics(state: State, experience: Experience) -> Step:
    """Return the distance of the engine's log-probs from the policy's, and the means of rollout_correction."""
    gap = (torch.cat(experience.logprobs) - torch.cat(state.drawn_logprobs)).abs()
    index_p99 = math.ceil(0.99 * len(gap)) - 1
    metrics = {
        "rollout/logprob_gap": float(gap.mean()),
        "rollout/logprob_gap_p99": float(gap.sort().values[index_p99]),
    }
    if state.settings.rollout_correction is not None:
        corrections = [rollout_correction(state, experience, row) for row in state.rows]
        weights = torch.cat([weight for weight, _ in corrections])
        capped = torch.cat([is_capped for _, is_capped in corrections])
        metrics["rollout/correction_mean"] = float(weights.mean())
        metrics["rollout/correction_capped"] = float(capped.double().mean())
    return metrics


def repetition(response: list[int]) -> float:
    """Return the share of trigrams that occurred earlier in the response."""
    trigrams = [tuple(response[i : i + 3]) for i in range(len(response) - 2)]
    if not trigrams:
        return 0.0
    repeated = [trigram in trigrams[:i] for i, trigram in enumerate(trigrams)]
    return sum(repeated) / len(trigrams)


def value_metrics(experience: Experience) -> Step:
    """Return 1 - Var(R - V) / Var(R) over all tokens; 0 if the returns do not vary."""
    if not experience.returns:
        return {}
    returns = torch.cat(experience.returns)
    errors = returns - torch.cat(experience.values)
    spread = returns.var(correction=0)
    explained = 1 - errors.var(correction=0) / spread if spread else 0.0
    return {"val/explained_variance": float(explained)}


def mean_metrics(steps: list[Step]) -> Step:
    """Return the means over the steps, without those skipped by ratio_threshold unless all were skipped."""
    counted = [step for step in steps if not step["skipped"]]
    all_skipped = not counted
    counted = counted or steps
    means = {name: fmean(step[name] for step in counted) for name in counted[0]}
    if all_skipped:
        means["policy/grad_norm"] = 0.0
        if "loss/value_avg" in means:
            means["value/grad_norm"] = 0.0

    del means["ratio_error"], means["skipped"]
    means["val/ratio_var"] = pvariance(step["val/ratio"] for step in counted)
    means["policy/skipped_minibatches"] = sum(step["skipped"] for step in steps)
    means["policy/first_ratio_error"] = steps[0]["ratio_error"]
    return means


def learning_rates(state: State) -> Step:
    rates = {"lr": learning_rate(state, "policy")}
    if state.value is not None:
        rates["value/lr"] = learning_rate(state, "value")
    return rates


def next_kl_coef(state: State, kl: float) -> float:
    """Return kl_coef (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon), with n the update's episodes.

    Ziegler et al. 2019, section 2.2. The coefficient is constant while the policy is not trained.
    """
    settings = state.settings
    if not settings.adap_kl_ctrl or not state.policy_is_trained:
        return state.kl_coef
    error = min(max(kl / settings.target - 1, -0.2), 0.2)
    return state.kl_coef * (1 + error * len(state.rows) / settings.horizon)
