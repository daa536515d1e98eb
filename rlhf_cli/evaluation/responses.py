"""Scored responses of the policies, and the rows of samples.jsonl."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_cli.evaluation.sample_pairs import deciding_judge
from rlhf_cli.models.batch import StopTokenId

WITH_TOKENS = 10  # of the largest gains, and of the largest losses, samples.jsonl has the KL of each token
Place = tuple[int, int]  # a response among several parts: index of the part, row


@dataclass(frozen=True)
class EvalSampling:
    """Sampling settings of an evaluation: those of PPO's training unless eval.yaml overrides them."""

    temperature: float
    response_length: int  # maximum, in tokens
    stop_token_id: StopTokenId


@dataclass(frozen=True)
class SnapshotSeries:
    """Snapshots of a PPO run: the step of the final policy, and the folders of the others by step."""

    step: int | None = None
    snapshots: Mapping[int, Path] = field(default_factory=dict)
    missing: str | None = None  # reason why a requested series is not available


class TokenKL(NamedTuple):
    """The tokens of a response, the end with it, and the KL from SFT of each, in nats."""

    ids: list[int]
    kl: list[float]


@dataclass(frozen=True)
class EvalResponses:
    """One policy's scored responses to all prompts in one mode."""

    model: str  # sft, ppo, base, a name of `policies`, best_of_N, ppo_step_NNNNNN for a snapshot, interpolated_SHARE
    mode: str  # sampled or greedy
    prompts: list[str]
    responses: list[str]
    ended: list[bool]
    lengths: list[int]
    scores: dict[str, list[float]]  # judge -> score of each row
    kl: list[float] | None  # nats, summed over the response; None for near-greedy responses
    tokens: list[TokenKL] | None = None  # of PPO's sampled responses
    step: int | None = None  # number of PPO updates, for a policy on the frontier
    share: float | None = None  # of the way from SFT to PPO, for an interpolation

    def rows(self, indices: Sequence[int]) -> "EvalResponses":
        """Return the responses to some of the prompts."""
        return _take([self], [(0, row) for row in indices])


def concat_responses(parts: Sequence[EvalResponses]) -> EvalResponses:
    """Concatenate the rows of responses of one policy."""
    places: list[Place] = []
    for index, part in enumerate(parts):
        places += [(index, row) for row in range(len(part.prompts))]
    return _take(parts, places)


def select_best_of_n(draws: Sequence[EvalResponses]) -> EvalResponses:
    """Select each prompt's draw with the highest `reward` score; KL is None."""
    rewards = [draw.scores["reward"] for draw in draws]
    places: list[Place] = []
    for row, scores in enumerate(zip(*rewards, strict=True)):
        places.append((scores.index(max(scores)), row))
    return replace(_take(draws, places), model=f"best_of_{len(draws)}", mode="sampled", kl=None, step=None)


def _take(parts: Sequence[EvalResponses], places: Sequence[Place]) -> EvalResponses:
    """Return the responses at some places as those of one policy."""

    def take(columns: list[list[Any]]) -> list[Any]:
        return [columns[part][row] for part, row in places]

    first = parts[0]
    return replace(
        first,
        prompts=take([part.prompts for part in parts]),
        responses=take([part.responses for part in parts]),
        ended=take([part.ended for part in parts]),
        lengths=take([part.lengths for part in parts]),
        scores={judge: take([part.scores[judge] for part in parts]) for judge in first.scores},
        kl=None if first.kl is None else take([part.kl or [] for part in parts]),
        tokens=None if first.tokens is None else take([part.tokens or [] for part in parts]),
    )


def sample_rows(
    evaluated: Iterable[EvalResponses],
    columns: Sequence[Mapping[str, Any]],
    token_values: Mapping[int, Mapping[str, Any]] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of samples.jsonl, one per response.

    `columns`: of each prompt's row, those that are read; `token_values`: of some of PPO's responses, by their row.
    """
    for batch in evaluated:
        for row, response in enumerate(batch.responses):
            sample: dict[str, Any] = {"index": row, "prompt": batch.prompts[row]}
            if columns[row]:
                sample["columns"] = columns[row]

            sample |= {
                "model": batch.model,
                "mode": batch.mode,
                "response": response,
                "ended": batch.ended[row],
                "length": batch.lengths[row],
            }
            if batch.kl is not None:
                sample["kl"] = batch.kl[row]

            sample["scores"] = {judge: scores[row] for judge, scores in batch.scores.items()}
            if batch.tokens is not None and token_values and row in token_values:
                sample["tokens"] = token_values[row]
            yield sample


def largest_changes(evaluated: Sequence[EvalResponses]) -> dict[int, TokenKL]:
    """Return the tokens of PPO's responses with the largest gains and losses over SFT's by the deciding judge."""
    sampled = {batch.model: batch for batch in evaluated if batch.mode == "sampled"}
    sft = sampled.get("sft")
    ppo = sampled.get("ppo")
    if sft is None or ppo is None or ppo.tokens is None:
        return {}

    judge = deciding_judge(ppo.scores)
    gains = [ours - theirs for ours, theirs in zip(ppo.scores[judge], sft.scores[judge], strict=True)]
    rows = sorted(range(len(gains)), key=lambda row: gains[row])
    return {row: ppo.tokens[row] for row in rows[:WITH_TOKENS] + rows[WITH_TOKENS:][-WITH_TOKENS:]}


def group_rows(column: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Return the indices of the rows with each value of a column, as text, in order of first occurrence."""
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        value = row.get(column)
        text = value if isinstance(value, str) else json.dumps(value)
        groups.setdefault(text, []).append(index)
    return groups
