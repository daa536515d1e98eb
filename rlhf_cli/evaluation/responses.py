"""Scored responses of one policy, and the settings they were sampled with."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings of an evaluation: those of PPO's training unless eval.yaml overrides them."""

    temperature: float
    response_length: int  # maximum, in tokens
    stop_token_id: int | None


@dataclass(frozen=True)
class SnapshotSeries:
    """Snapshots of a PPO run: the step of the final policy, and the folders of the others by step."""

    step: int | None = None
    snapshots: Mapping[int, Path] = field(default_factory=dict)
    missing: str | None = None  # reason why a requested series is not available


@dataclass(frozen=True)
class EvalResponses:
    """One policy's scored responses to all prompts in one mode."""

    model: str  # sft, ppo, base, best_of_N, or ppo_step_NNNNNN for a snapshot
    mode: str  # sampled or greedy
    prompts: list[str]
    responses: list[str]
    ended: list[bool]
    lengths: list[int]
    scores: dict[str, list[float]]  # judge -> score of each row
    kl: list[float] | None  # nats, summed over the response; None for near-greedy responses
    step: int | None = None  # number of PPO updates, for a policy on the frontier


def concat_responses(parts: Sequence[EvalResponses]) -> EvalResponses:
    """Concatenate the rows of responses of one policy."""
    kl = None if parts[0].kl is None else [value for part in parts for value in part.kl or []]
    return replace(_merge(parts, lambda columns: [*chain.from_iterable(columns)]), kl=kl)


def select_best_of_n(draws: Sequence[EvalResponses]) -> EvalResponses:
    """Select each prompt's draw with the highest `reward` score; KL is None."""
    draw_scores = zip(*(draw.scores["reward"] for draw in draws), strict=True)
    best = [max(range(len(draws)), key=scores.__getitem__) for scores in draw_scores]
    merged = _merge(draws, lambda columns: [columns[draw][row] for row, draw in enumerate(best)])
    return replace(merged, model=f"best_of_{len(draws)}", mode="sampled", kl=None, step=None)


def _merge(parts: Sequence[EvalResponses], merge: Callable[[list[list]], list]) -> EvalResponses:
    """Merge each column of the parts, except KL."""
    names = ("prompts", "responses", "ended", "lengths")
    columns: dict[str, Any] = {name: merge([getattr(part, name) for part in parts]) for name in names}
    scores = {judge: merge([part.scores[judge] for part in parts]) for judge in parts[0].scores}
    return replace(parts[0], **columns, scores=scores)


def sample_rows(evaluated: Iterable[EvalResponses]) -> Iterator[dict[str, Any]]:
    """Yield the rows of samples.jsonl, one per response."""
    for batch in evaluated:
        for row, response in enumerate(batch.responses):
            kl = {"kl": batch.kl[row]} if batch.kl is not None else {}
            yield {
                "index": row,
                "prompt": batch.prompts[row],
                "model": batch.model,
                "mode": batch.mode,
                "response": response,
                "ended": batch.ended[row],
                "length": batch.lengths[row],
                **kl,
                "scores": {judge: scores[row] for judge, scores in batch.scores.items()},
            }
