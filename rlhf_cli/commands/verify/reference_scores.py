"""Scores, rewards, advantages and returns: everything that is fixed before the update learns."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_cli.commands.verify.reference_state import (
    Numbers,
    Source,
    Start,
    classified,
    length_limit,
    log_softmax,
    response_logits,
    response_values,
)

# 3. Scores


@torch.no_grad()
def model_scores(model: Any, prompts: list[list[int]], responses: list[list[int]]) -> list[float]:
    """A reward model's score of each row, at its last token that is not the reward model's padding."""
    scores = []
    for prompt, response in zip(prompts, responses, strict=True):
        row = prompt + response
        place = max((i for i, token in enumerate(row) if token != model.config.pad_token_id), default=0)
        hidden = model.base_model(input_ids=torch.tensor([row], device=model.device), use_cache=False).last_hidden_state
        scores.append(float(classified(model, hidden[0, place])))
    return scores


def function_scores(
    function: Callable[[list[str], list[str]], Sequence[float]],
    tokenizer: Any,
    prompts: list[list[int]],
    responses: list[list[int]],
) -> list[float]:
    """A Python function's score of each row, which it reads as text without special tokens."""
    texts = [[tokenizer.decode(ids, skip_special_tokens=True) for ids in side] for side in (prompts, responses)]
    return [float(score) for score in function(texts[0], texts[1])]


def combined(source: Source, opinions: list[float]) -> float:
    """An ensemble's score of a row: the mean, the least, or the mean less std_coef deviations of its members.

    Coste et al. 2023 (arXiv 2310.02743), with the deviation in place of the variance.
    """
    mean = sum(opinions) / len(opinions)
    return {
        None: mean,  # of one
        "mean": mean,
        "min": min(opinions),
        "mean_minus_std": mean - source.std_coef * math.sqrt(variance(opinions)),
    }[source.combine]


def weighted(source: Source, score: float) -> float:
    """What a source adds to the sum: its score, clipped to -clip .. clip, times its weight."""
    limit = math.inf if source.clip is None else source.clip
    return source.weight * min(max(score, -limit), limit)


def with_scores(so_far: tuple[int, float, float], scores: list[float]) -> tuple[int, float, float]:
    """Count, mean and summed squared deviations of all scores of the run, these added."""
    count, mean, squares = so_far
    total = count + len(scores)
    new_mean = (count * mean + sum(scores)) / total
    spread = squares + count * (mean - new_mean) ** 2 + sum((score - new_mean) ** 2 for score in scores)
    return total, new_mean, spread


def place(start: Start, summed: list[float], so_far: tuple[int, float, float]) -> list[float]:
    """Sum of the sources -> the score on a response's last token (PPO-OPTIONS, "Order").

    Scaled by the run's deviation so far, less its mean with use_score_norm; clipped; less missing_eos_penalty where no
    stop token came; less factor max(0, l - (L - n)) / n, l the length, L its limit (Yu et al. 2025, equation 13).
    """
    settings = start.settings
    count, mean, squares = so_far
    deviation = math.sqrt(squares / (count - 1)) if count > 1 else 0.0
    limit = length_limit(settings, start.seed, start.update)
    placed = []
    for score, response in zip(summed, start.responses, strict=True):
        if settings.use_score_scaling and deviation > 0:
            score = (score - mean if settings.use_score_norm else score) / deviation
        if settings.score_clip is not None:
            score = min(max(score, -settings.score_clip), settings.score_clip)
        if settings.missing_eos_penalty is not None and start.stop_token_id is not None and not ended(start, response):
            score -= settings.missing_eos_penalty
        if (overlong := settings.overlong_penalty) is not None:
            over = max(0, len(response) - (limit - overlong.tokens)) / overlong.tokens
            score -= overlong.factor * over
        placed.append(score)
    return placed


def ended(start: Start, response: list[int]) -> bool:
    return start.stop_token_id is not None and response[-1] == start.stop_token_id


def variance(numbers: list[float]) -> float:
    mean = sum(numbers) / len(numbers)
    return sum((x - mean) ** 2 for x in numbers) / len(numbers)


# 4. Rewards, advantages, returns


@dataclass
class Judged:
    """Everything that is fixed before the update learns. Lists of rows, of lists of tokens where it is by token."""

    logprobs: list[list[float]]
    ref_logprobs: list[list[float]]
    values: list[list[float]]
    kl: list[list[float]]  # the chosen estimator
    opinions: dict[str, dict[str, list[float]]]  # each source's scorers' scores
    raw: dict[str, list[float]]  # each source's own score
    placed: list[float]  # what lands on the last token
    scores_so_far: tuple[int, float, float]  # these among them
    rewards: list[list[float]]
    advantages: list[list[float]]
    returns: list[list[float]]

    def numbers(self) -> Numbers:
        by_token = ("logprobs", "ref_logprobs", "values", "kl", "rewards", "advantages", "returns")
        flat = {name: [x for row in getattr(self, name) for x in row] for name in by_token}
        scores = {f"score {name}": raw for name, raw in self.raw.items()} | {"scores": self.placed}
        read = ("logprobs", "ref_logprobs", "values", "kl")
        made = ("rewards", "advantages", "returns")
        moments = {"running scores": [float(x) for x in self.scores_so_far]}
        return {n: flat[n] for n in read} | scores | moments | {n: flat[n] for n in made}


def token_kl(logprob: float, ref_logprob: float, kind: str) -> float:
    """KL(policy || reference) of a token drawn from the policy, estimated from two log-probs: r = ref - policy.

    k1 = -r, k2 = r^2 / 2, k3 = exp(r) - 1 - r (Schulman 2020, "Approximating KL divergence"), abs = |r|.
    """
    r = ref_logprob - logprob
    return {"k1": -r, "k2": r * r / 2, "k3": math.exp(r) - 1 - r, "abs": abs(r)}[kind]


def whole_kl(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """KL(policy || reference) of the next token: sum_v p_v (log p_v - log q_v)."""
    return (logp.exp() * (logp - ref_logp)).sum()


@torch.no_grad()
def judge(start: Start, tick: Callable[[], None]) -> Judged:
    """Log-probs, values, scores; then rewards, advantages and returns."""
    settings = start.settings
    logprobs, ref_logprobs, values, kl = [], [], [], []
    for row in start.rows:
        pairs = zip(response_logits(start, start.policy, row), response_logits(start, start.ref, row), strict=True)
        ours, theirs, apart = [], [], []
        for token, (z, ref_z) in zip(start.responses[row], pairs, strict=True):
            logp, ref_logp = log_softmax(z / settings.temperature), log_softmax(ref_z / settings.temperature)
            ours.append(float(logp[token]))
            theirs.append(float(ref_logp[token]))
            exact = settings.kl_estimator == "full"
            apart.append(
                float(whole_kl(logp, ref_logp)) if exact else token_kl(ours[-1], theirs[-1], settings.kl_estimator)
            )
        logprobs.append(ours)
        ref_logprobs.append(theirs)
        kl.append(apart)
        values.append(response_values(start, row).tolist())
        tick()
    opinions = {
        name: {each: score(start.prompts, start.responses) for each, score in source.scorers.items()}
        for name, source in start.sources.items()
    }
    raw = {
        name: [combined(source, [said[row] for said in opinions[name].values()]) for row in start.rows]
        for name, source in start.sources.items()
    }
    summed = [sum(weighted(source, raw[name][row]) for name, source in start.sources.items()) for row in start.rows]
    so_far = with_scores(start.scores_so_far, summed)
    placed = place(start, summed, so_far)
    rewards = [token_rewards(start, kl[row], placed[row]) for row in start.rows]
    if settings.whiten_rewards:
        rewards = whitened(rewards, keep_mean=True)
    advantages = [gae(rewards[row], values[row], settings.gamma, settings.lam) for row in start.rows]
    returns = [[a + v for a, v in zip(advantages[row], values[row], strict=True)] for row in start.rows]
    if settings.advantage_norm == "batch":
        advantages = whitened(advantages, keep_mean=False)
    return Judged(logprobs, ref_logprobs, values, kl, opinions, raw, placed, so_far, rewards, advantages, returns)


def token_rewards(start: Start, kl: list[float], score: float) -> list[float]:
    """r_t = -kl_coef KL_t, and the score on top of the last token (Ziegler et al. 2019, arXiv 1909.08593, 2.1).

    With kl_in loss the KL is no part of the reward.
    """
    coefficient = start.kl_coef if start.settings.kl_in == "reward" else 0.0
    rewards = [-coefficient * x for x in kl]
    rewards[-1] += score
    return rewards


def whitened(rows: list[list[float]], *, keep_mean: bool) -> list[list[float]]:
    """(x - mean) / sqrt(variance + 1e-8) over all tokens of the update, unbiased variance; the mean put back if asked.

    Ziegler et al. 2019's code, lm-human-preferences, `whiten`; Huang et al. 2024 (arXiv 2403.17031), section 7.
    """
    tokens = [x for row in rows for x in row]
    mean = sum(tokens) / len(tokens)
    variance = sum((x - mean) ** 2 for x in tokens) / max(len(tokens) - 1, 1)
    return [[(x - mean) / math.sqrt(variance + 1e-8) + mean * keep_mean for x in row] for row in rows]


def gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """A_t = sum_l (gamma lam)^l delta_{t+l}, delta_t = r_t + gamma V_{t+1} - V_t, and V is 0 after the last token.

    Schulman et al. 2016 (arXiv 1506.02438), equations 11 and 16, as the double sum that it is.
    """
    length = len(rewards)
    following = [*values[1:], 0.0]
    delta = [rewards[t] + gamma * following[t] - values[t] for t in range(length)]
    return [sum((gamma * lam) ** (s - t) * delta[s] for s in range(t, length)) for t in range(length)]
