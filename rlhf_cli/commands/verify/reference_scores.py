"""Reference implementation: scores, rewards, advantages and returns, computed once before the optimizer steps."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_cli.commands.verify.reference_state import (
    Quantities,
    ReferenceState,
    Source,
    classifier_score,
    length_limit,
    log_softmax,
    response_logits,
    response_values,
)

# 3. Scores


@torch.no_grad()
def model_scores(model: Any, prompts: list[list[int]], responses: list[list[int]]) -> list[float]:
    """Return a reward model's score of each row, at its last token that is not the reward model's padding."""
    scores = []
    for prompt, response in zip(prompts, responses, strict=True):
        row = prompt + response
        last = max((i for i, token in enumerate(row) if token != model.config.pad_token_id), default=0)
        hidden = model.base_model(input_ids=torch.tensor([row], device=model.device), use_cache=False).last_hidden_state
        scores.append(float(classifier_score(model, hidden[0, last])))
    return scores


def function_scores(
    function: Callable[[list[str], list[str]], Sequence[float]],
    tokenizer: Any,
    prompts: list[list[int]],
    responses: list[list[int]],
) -> list[float]:
    """Return a Python function's score of each row, decoded without special tokens."""
    texts = [[tokenizer.decode(ids, skip_special_tokens=True) for ids in side] for side in (prompts, responses)]
    return [float(score) for score in function(texts[0], texts[1])]


def ensemble_score(source: Source, opinions: list[float]) -> float:
    """Return an ensemble's score of a row: its members' mean, minimum, or mean - std_coef * standard deviation.

    Coste et al. 2023 (arXiv 2310.02743), with the standard deviation instead of the variance.
    """
    mean = sum(opinions) / len(opinions)
    return {
        None: mean,  # a single scorer
        "mean": mean,
        "min": min(opinions),
        "mean_minus_std": mean - source.std_coef * math.sqrt(variance(opinions)),
    }[source.combine]


def weighted_term(source: Source, score: float) -> float:
    """Return a source's term of the sum: its score, clipped to -clip .. clip, times its weight."""
    limit = math.inf if source.clip is None else source.clip
    return source.weight * min(max(score, -limit), limit)


def update_moments(moments: tuple[int, float, float], scores: list[float]) -> tuple[int, float, float]:
    """Add scores to the run's moments: count, mean and sum of squared deviations."""
    count, mean, squares = moments
    total = count + len(scores)
    new_mean = (count * mean + sum(scores)) / total
    spread = squares + count * (mean - new_mean) ** 2 + sum((score - new_mean) ** 2 for score in scores)
    return total, new_mean, spread


def final_scores(state: ReferenceState, summed: list[float], moments: tuple[int, float, float]) -> list[float]:
    """Turn the sum of the sources into the score on a response's last token.

    In this order: minus the run's mean (use_score_norm), over its standard deviation; clipped; minus
    missing_eos_penalty if there is no stop token; minus factor * max(0, l - (L - n)) / n, with the length l and its
    limit L (Yu et al. 2025, equation 13).
    """
    settings = state.settings
    count, mean, squares = moments
    deviation = math.sqrt(squares / (count - 1)) if count > 1 else 0.0
    limit = length_limit(settings, state.seed, state.update)
    scores = []
    for score, response in zip(summed, state.responses, strict=True):
        if settings.use_score_scaling and deviation > 0:
            score = (score - mean if settings.use_score_norm else score) / deviation
        if settings.score_clip is not None:
            score = min(max(score, -settings.score_clip), settings.score_clip)
        if settings.missing_eos_penalty is not None and state.stop_token_id is not None and not ended(state, response):
            score -= settings.missing_eos_penalty
        if (overlong := settings.overlong_penalty) is not None:
            over = max(0, len(response) - (limit - overlong.tokens)) / overlong.tokens
            score -= overlong.factor * over
        scores.append(score)
    return scores


def ended(state: ReferenceState, response: list[int]) -> bool:
    return state.stop_token_id is not None and response[-1] == state.stop_token_id


def variance(numbers: list[float]) -> float:
    mean = sum(numbers) / len(numbers)
    return sum((x - mean) ** 2 for x in numbers) / len(numbers)


# 4. Rewards, advantages, returns


@dataclass
class Experience:
    """Everything computed before the optimizer steps: lists by row, per-token ones by row and token."""

    logprobs: list[list[float]]
    ref_logprobs: list[list[float]]
    values: list[list[float]]
    kl: list[list[float]]  # by kl_estimator
    member_scores: dict[str, dict[str, list[float]]]  # source -> scorer -> score of each row
    raw: dict[str, list[float]]  # source -> score of each row
    scores: list[float]  # on the last token
    score_moments: tuple[int, float, float]  # these among them
    rewards: list[list[float]]
    advantages: list[list[float]]
    returns: list[list[float]]

    def quantities(self) -> Quantities:
        """Return the quantities, in the order in which they are computed."""
        by_token = ("logprobs", "ref_logprobs", "values", "kl", "rewards", "advantages", "returns")
        flat = {name: [x for row in getattr(self, name) for x in row] for name in by_token}
        scores = {f"score {name}": raw for name, raw in self.raw.items()} | {"scores": self.scores}
        scores["running scores"] = [float(x) for x in self.score_moments]
        return {n: flat[n] for n in by_token[:4]} | scores | {n: flat[n] for n in by_token[4:]}


def token_kl(logprob: float, ref_logprob: float, kind: str) -> float:
    """Estimate KL(policy || reference) at a token sampled from the policy, from two log-probs: r = ref - policy.

    k1 = -r, k2 = r^2 / 2, k3 = exp(r) - 1 - r (Schulman 2020, "Approximating KL divergence"), abs = |r|.
    """
    r = ref_logprob - logprob
    return {"k1": -r, "k2": r * r / 2, "k3": math.exp(r) - 1 - r, "abs": abs(r)}[kind]


def full_kl(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """Return the exact KL(policy || reference) of the next token: sum_v p_v (log p_v - log q_v)."""
    return (logp.exp() * (logp - ref_logp)).sum()


@torch.no_grad()
def make_experience(state: ReferenceState, tick: Callable[[], None]) -> Experience:
    """Compute log-probs, values and scores; then rewards, advantages and returns."""
    settings = state.settings
    logprobs, ref_logprobs, values, kl = [], [], [], []
    for row in state.rows:
        pairs = zip(response_logits(state, state.policy, row), response_logits(state, state.ref, row), strict=True)
        row_logprobs, row_ref_logprobs, row_kl = [], [], []
        for token, (z, ref_z) in zip(state.responses[row], pairs, strict=True):
            logp, ref_logp = log_softmax(z / settings.temperature), log_softmax(ref_z / settings.temperature)
            logprob, ref_logprob, kind = float(logp[token]), float(ref_logp[token]), settings.kl_estimator
            row_logprobs.append(logprob)
            row_ref_logprobs.append(ref_logprob)
            exact = kind == "full"
            row_kl.append(float(full_kl(logp, ref_logp)) if exact else token_kl(logprob, ref_logprob, kind))
        logprobs.append(row_logprobs)
        ref_logprobs.append(row_ref_logprobs)
        kl.append(row_kl)
        values.append(response_values(state, row).tolist())
        tick()
    member_scores = {
        name: {member: scorer(state.prompts, state.responses) for member, scorer in source.scorers.items()}
        for name, source in state.sources.items()
    }
    raw = {
        name: [ensemble_score(source, [scores[row] for scores in member_scores[name].values()]) for row in state.rows]
        for name, source in state.sources.items()
    }
    summed = [
        sum(weighted_term(source, raw[name][row]) for name, source in state.sources.items()) for row in state.rows
    ]
    moments = update_moments(state.score_moments, summed)
    scores = final_scores(state, summed, moments)
    rewards = [token_rewards(state, kl[row], scores[row]) for row in state.rows]
    if settings.whiten_rewards:
        rewards = whitened(rewards, keep_mean=True)
    advantages = [gae(rewards[row], values[row], settings.gamma, settings.lam) for row in state.rows]
    returns = [[a + v for a, v in zip(advantages[row], values[row], strict=True)] for row in state.rows]
    if settings.advantage_norm == "batch":
        advantages = whitened(advantages, keep_mean=False)
    return Experience(
        logprobs, ref_logprobs, values, kl, member_scores, raw, scores, moments, rewards, advantages, returns
    )


def token_rewards(state: ReferenceState, kl: list[float], score: float) -> list[float]:
    """Return r_t = -kl_coef KL_t, plus the score at the last token (Ziegler et al. 2019, arXiv 1909.08593, 2.1).

    With kl_in loss the reward has no KL term.
    """
    coefficient = state.kl_coef if state.settings.kl_in == "reward" else 0.0
    rewards = [-coefficient * x for x in kl]
    rewards[-1] += score
    return rewards


def whitened(rows: list[list[float]], *, keep_mean: bool) -> list[list[float]]:
    """Return (x - mean) / sqrt(variance + 1e-8) over all tokens, unbiased variance; plus the mean with keep_mean.

    Ziegler et al. 2019's code, lm-human-preferences, `whiten`; Huang et al. 2024 (arXiv 2403.17031), section 7.
    """
    tokens = [x for row in rows for x in row]
    mean = sum(tokens) / len(tokens)
    variance = sum((x - mean) ** 2 for x in tokens) / max(len(tokens) - 1, 1)
    return [[(x - mean) / math.sqrt(variance + 1e-8) + mean * keep_mean for x in row] for row in rows]


def gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Return A_t = sum_l (gamma lam)^l delta_{t+l}, delta_t = r_t + gamma V_{t+1} - V_t, V = 0 after the last token.

    Schulman et al. 2016 (arXiv 1506.02438), equations 11 and 16, as a double sum.
    """
    length = len(rewards)
    following = [*values[1:], 0.0]
    delta = [rewards[t] + gamma * following[t] - values[t] for t in range(length)]
    return [sum((gamma * lam) ** (s - t) * delta[s] for s in range(t, length)) for t in range(length)]
