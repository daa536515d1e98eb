"""Scores of the responses: of the reward sources, their sum, and what is left at the last token."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

import torch

from tests.reference.outputs import classifier_score, row_ids
from tests.reference.state import Reward, State

# Scorers: prompts and responses -> one raw score a row


@torch.no_grad()
def model_scores(
    model: Any,
    end_token_ids: Sequence[int],
    closing_ids: Sequence[int],
    prompts: list[list[int]],
    responses: list[list[int]],
) -> list[float]:
    """Return a reward model's score of each row, at its last token, as if it ended with the first end token.

    After a conversation, whose turns end with it too, `closing_ids` follow it.
    A model whose padding is this token, or that has none, is read at the last token that is not its padding.
    """
    end = end_token_ids[0] if end_token_ids else None
    pad = model.config.get_text_config().pad_token_id
    scores = []
    for prompt, response in zip(prompts, responses, strict=True):
        row = prompt + response
        if row[-1] in end_token_ids:
            row[-1] = end_token_ids[0]
        if row[-1] == end and end in prompt:
            row += closing_ids

        last = len(row) - 1
        if end is None or end == pad:
            last = max((i for i, token in enumerate(row) if token != pad), default=0)
        hidden = model.base_model(input_ids=row_ids(row, [], model), use_cache=False).last_hidden_state
        scores.append(float(classifier_score(model, hidden[0, last])))
    return scores


def function_scores(score: Any, tokenizer: Any, prompts: list[list[int]], responses: list[list[int]]) -> list[float]:
    """Return a function's score of each row, decoded without special tokens; NaN for None."""
    prompt_texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in prompts]
    response_texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in responses]
    values = score(prompt_texts, response_texts, responses)
    return [math.nan if value is None else float(value) for value in values]


# The score of a response


@dataclass
class Scores:
    """The scores of all rows."""

    members: dict[str, dict[str, list[float]]]  # source -> scorer -> score of each row
    raw: dict[str, list[float]]  # source -> score of each row, NaN for none
    moments: tuple[int, float, float]  # of the sums over the run, these among them
    final: list[float]  # on the last token

    @property
    def given(self) -> dict[str, list[float]]:
        """The scores of each source, without those of the rows that it does not score."""
        return {name: [score for score in raw if not math.isnan(score)] for name, raw in self.raw.items()}


def score_responses(state: State) -> Scores:
    """Score all rows by all sources, and process the sum."""
    members = {}
    raw = {}
    for name, source in state.sources.items():
        members[name] = {key: scorer(state.prompts, state.responses) for key, scorer in source.scorers.items()}
        by_row = zip(*members[name].values(), strict=True)
        raw[name] = [ensemble_score(source, scores) for scores in by_row]

    summed = [weighted_sum(state, raw, row) for row in state.rows]
    moments = update_moments(state.score_moments, summed)
    final = [final_score(state, row, summed[row], moments) for row in state.rows]
    return Scores(members, raw, moments, final)


def ensemble_score(source: Reward, scores: Sequence[float]) -> float:
    """Return an ensemble's score of a row: its members' mean, minimum, or mean - std_coef * standard deviation.

    Coste et al. 2023 (arXiv 2310.02743), with the standard deviation instead of the variance.
    """
    if source.combine == "min":
        return min(scores)
    if source.combine == "mean_minus_std":
        return fmean(scores) - source.std_coef * pstdev(scores)
    return fmean(scores)


def weighted_sum(state: State, raw: dict[str, list[float]], row: int) -> float:
    """Return the sum of a row's scores by its sources: each clipped to -clip .. clip, times its weight.

    A NaN is no score: the source does not count for the row.
    """
    total = 0.0
    for name, source in state.sources.items():
        score = raw[name][row]
        if not math.isnan(score):
            total += source.weight * clipped(score, source.clip)
    return total


def clipped(score: float, limit: float | None) -> float:
    return score if limit is None else min(max(score, -limit), limit)


def update_moments(moments: tuple[int, float, float], scores: list[float]) -> tuple[int, float, float]:
    """Add scores to the run's moments: count, mean and sum of squared deviations."""
    count, mean, squares = moments
    new_count = count + len(scores)
    new_mean = (count * mean + sum(scores)) / new_count
    old_squares = squares + count * (mean - new_mean) ** 2  # around the new mean
    new_squares = sum((score - new_mean) ** 2 for score in scores)
    return new_count, new_mean, old_squares + new_squares


def final_score(state: State, row: int, score: float, moments: tuple[int, float, float]) -> float:
    """Turn the sum of the sources into the score on a response's last token.

    In this order: minus the run's mean (use_score_norm), over its standard deviation; clipped; minus
    missing_eos_penalty if there is no stop token; minus factor * max(0, l - (L - n)) / n, with the length l and its
    limit L (Yu et al. 2025, equation 13).
    """
    settings = state.settings
    count, mean, squares = moments
    deviation = math.sqrt(squares / (count - 1)) if count > 1 else 0.0
    if settings.use_score_scaling and deviation > 0:
        if settings.use_score_norm:
            score -= mean
        score /= deviation
    score = clipped(score, settings.score_clip)

    if settings.missing_eos_penalty is not None and state.stop_token_ids and not state.ended(row):
        score -= settings.missing_eos_penalty
    overlong = settings.overlong_penalty
    if overlong is not None:
        over = max(0, len(state.responses[row]) - (state.length_limit - overlong.tokens))
        score -= overlong.factor * over / overlong.tokens
    return score
