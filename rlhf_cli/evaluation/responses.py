"""Scored responses of one policy, and the settings they were sampled with."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


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
    return replace(
        parts[0],
        prompts=_flatten(part.prompts for part in parts),
        responses=_flatten(part.responses for part in parts),
        ended=_flatten(part.ended for part in parts),
        lengths=_flatten(part.lengths for part in parts),
        scores={judge: _flatten(part.scores[judge] for part in parts) for judge in parts[0].scores},
        kl=None if parts[0].kl is None else _flatten(part.kl or [] for part in parts),
    )


def _flatten(columns: Iterable[list[T]]) -> list[T]:
    return list(chain.from_iterable(columns))


def select_best_of_n(draws: Sequence[EvalResponses]) -> EvalResponses:
    """Select each prompt's draw with the highest `reward` score."""
    best = [
        max(range(len(draws)), key=lambda k: draws[k].scores["reward"][row]) for row in range(len(draws[0].responses))
    ]

    def select(columns: list[list]) -> list:
        return [columns[k][row] for row, k in enumerate(best)]

    scores = {judge: select([draw.scores[judge] for draw in draws]) for judge in draws[0].scores}
    return EvalResponses(
        f"best_of_{len(draws)}",
        "sampled",
        draws[0].prompts,
        select([draw.responses for draw in draws]),
        select([draw.ended for draw in draws]),
        select([draw.lengths for draw in draws]),
        scores,
        None,
    )


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
