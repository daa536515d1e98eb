"""What flows through one PPO step. Each stage of the data is its own frozen type.

Shapes: B rows (episodes), P prompt width, R response width, N response tokens of a micro-batch, laid flat in row order.
Masks are bool, True = counts.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from rlhf_cli.ppo.moments import Moments


def left_pad(rows: Sequence[Sequence[int]], pad: int = 0) -> tuple[Tensor, Tensor]:
    """Ids (B, W) int64 and mask (B, W) bool of ragged rows, padded on the left."""
    width = max(map(len, rows), default=0)
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows], dtype=torch.int64).reshape(
        len(rows), width
    )
    mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows]).reshape(len(rows), width)
    return ids, mask


def _widened(x: Tensor, more: int) -> Tensor:
    """(B, W) with `more` columns of 0 on the right."""
    return torch.cat([x, x.new_zeros(len(x), more)], 1)


def right_pad(rows: Sequence[Sequence[int]], pad: int = 0) -> tuple[Tensor, Tensor]:
    """Ids (B, W) int64 and mask (B, W) bool of ragged rows, padded on the right."""
    width = max(map(len, rows), default=0)
    ids = torch.tensor([list(row) + [pad] * (width - len(row)) for row in rows], dtype=torch.int64).reshape(
        len(rows), width
    )
    mask = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in rows]).reshape(len(rows), width)
    return ids, mask


@dataclass(frozen=True)
class Prompts:
    """What an engine is asked to continue."""

    ids: Tensor  # (B, P) int64, left-padded
    mask: Tensor  # (B, P) bool
    seeds: tuple[int, ...] = ()  # one per row, keys all of the row's draws; the trainer fills them in
    response_length: int = 0  # most tokens of a response; the trainer fills it in

    @classmethod
    def from_lists(cls, queries: Sequence[Sequence[int]], pad: int = 0) -> "Prompts":
        """Prompts from token lists.

        Raises ValueError on an empty one: there would be nothing to predict its first token from.
        """
        if not queries or not all(queries):
            raise ValueError("each prompt needs at least one token")
        return cls(*left_pad(queries, pad))

    def __len__(self) -> int:
        return self.ids.shape[0]

    def rows(self, start: int, stop: int) -> "Prompts":
        return replace(self, ids=self.ids[start:stop], mask=self.mask[start:stop], seeds=self.seeds[start:stop])

    def repeat(self, times: int) -> "Prompts":
        """Each row `times` times in a row: K responses to one prompt are neighbours."""
        return replace(self, ids=self.ids.repeat_interleave(times, 0), mask=self.mask.repeat_interleave(times, 0))


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of a rollout, without left padding, and where in them the response tokens are predicted."""

    rows: Tensor  # (n,) int64: which rows of the rollout
    ids: Tensor  # (n, L) int64, right-padded: a causal model needs no mask for the real tokens
    lengths: Tensor  # (n,) int64: real tokens of each row
    row: Tensor  # (N,) int64: the row in `ids` of each response token
    column: Tensor  # (N,) int64: the column that predicts it, one before its own
    step: Tensor  # (N,) int64: its place in the response
    targets: Tensor  # (N,) int64: the response tokens

    @property
    def cells(self) -> tuple[Tensor, Tensor]:
        """Where the N response tokens lie in the rollout's (B, R) tensors: `x[micro.cells]` reads and writes them."""
        return self.rows[self.row], self.step


@dataclass(frozen=True)
class Rollout:
    """Prompts and the responses to them."""

    ids: Tensor  # (B, P+R) int64: prompts left-padded, responses right-padded
    mask: Tensor  # (B, P+R) bool: real tokens, one run in each row
    response_mask: Tensor  # (B, R) bool: response tokens that count, through the first stop token
    ended: Tensor  # (B,) bool: the response ended by itself, with the stop token
    first: int = 0  # which row of the whole batch its first one is, where it is a part of one

    @classmethod
    def from_lists(
        cls,
        queries: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        response_masks: Sequence[Sequence[bool]] | None = None,
        *,
        stop_token_id: int | None = None,
        pad: int = 0,
    ) -> "Rollout":
        """A rollout from token lists, for those who write their responses elsewhere.

        `response_masks` says which response tokens count (all by default). `ended` is whether the last one is
        `stop_token_id`;
        with none, every response counts as ended. Raises ValueError where the lists do not match or one is empty.
        """
        queries, responses = ([[int(token) for token in row] for row in rows] for rows in (queries, responses))
        if len(queries) != len(responses) or not queries or not all(queries) or not all(responses):
            raise ValueError("queries and responses must be as many, and none of them empty")
        prompt_ids, prompt_mask = left_pad(queries, pad)
        response_ids, real = right_pad(responses, pad)
        counts = real
        if response_masks is not None:
            if [len(mask) for mask in response_masks] != [len(row) for row in responses]:
                raise ValueError("each response mask must be as long as its response")
            if not all(any(mask) for mask in response_masks):
                raise ValueError("each response needs a token that counts")
            counts = real & right_pad([[int(x) for x in mask] for mask in response_masks])[0].bool()
        ended = torch.tensor([stop_token_id is None or row[-1] == stop_token_id for row in responses])
        return cls(torch.cat([prompt_ids, response_ids], 1), torch.cat([prompt_mask, real], 1), counts, ended)

    def __len__(self) -> int:
        return self.ids.shape[0]

    def rows(self, part: slice) -> "Rollout":
        """Some of its rows, as wide as all."""
        first = self.first + (part.start or 0)
        return Rollout(self.ids[part], self.mask[part], self.response_mask[part], self.ended[part], first)

    @classmethod
    def joined(cls, parts: Sequence["Rollout"]) -> "Rollout":
        """Rollouts of prompts of one width, one below the other."""
        width = max(part.response_mask.shape[1] for part in parts)
        wide = [[_widened(x, width - part.response_mask.shape[1]) for x in (part.ids, part.mask, part.response_mask)]
                for part in parts]  # fmt: skip
        ids, mask, response_mask = (torch.cat(each) for each in zip(*wide, strict=True))
        return cls(ids, mask, response_mask, torch.cat([part.ended for part in parts]))

    def to(self, device: torch.device) -> "Rollout":
        ids, mask, response_mask, ended = (x.to(device) for x in (self.ids, self.mask, self.response_mask, self.ended))
        return Rollout(ids, mask, response_mask, ended, self.first)

    @property
    def prompt_width(self) -> int:
        return self.ids.shape[1] - self.response_mask.shape[1]

    @property
    def prompt_lengths(self) -> Tensor:
        return self.mask[:, : self.prompt_width].sum(1)

    @property
    def response_lengths(self) -> Tensor:
        """Real response tokens of each row, (B,) int64."""
        return self.mask[:, self.prompt_width :].sum(1)

    @property
    def lengths(self) -> Tensor:
        return self.mask.sum(1)

    @cached_property
    def repetition(self) -> Tensor:
        """Share of a response's runs of three tokens that it has had before, (B,) float32; 0 for a shorter one."""
        shares = []
        for ids, length in zip(self.ids[:, self.prompt_width :].tolist(), self.response_lengths.tolist(), strict=True):
            said = ids[:length]
            runs = list(zip(said, said[1:], said[2:], strict=False))
            shares.append(1 - len(set(runs)) / len(runs) if runs else 0.0)
        return torch.tensor(shares)

    def prompt_tokens(self, row: int) -> list[int]:
        return self.ids[row, : self.prompt_width][self.mask[row, : self.prompt_width]].tolist()

    def response_tokens(self, row: int) -> list[int]:
        return self.ids[row, self.prompt_width :][self.mask[row, self.prompt_width :]].tolist()

    def text(self, tokenizer: Any, row: int) -> tuple[str, str]:
        """A row's prompt and response as text, without special tokens."""
        prompt, response = self.prompt_tokens(row), self.response_tokens(row)
        return tokenizer.decode(prompt, skip_special_tokens=True), tokenizer.decode(response, skip_special_tokens=True)

    def texts(self, tokenizer: Any) -> tuple[list[str], list[str]]:
        """All prompts and all responses, as `text` gives them."""
        pairs = [self.text(tokenizer, row) for row in range(len(self))]
        return [prompt for prompt, _ in pairs], [response for _, response in pairs]

    def micro_batch(self, rows: Tensor) -> MicroBatch:
        """The given rows (n,), moved flush left. Padding ids are 0: any id would do, nothing reads them."""
        lengths = self.lengths[rows]
        starts = self.prompt_width - self.prompt_lengths[rows]
        offsets = torch.arange(int(lengths.max()), device=self.ids.device)
        index = (starts[:, None] + offsets).clamp(max=self.ids.shape[1] - 1)
        ids = torch.where(offsets < lengths[:, None], self.ids[rows].gather(1, index), 0)
        row, step = self.response_mask[rows].nonzero(as_tuple=True)
        column = self.prompt_lengths[rows][row] + step - 1
        return MicroBatch(rows, ids, lengths, row, column, step, self.ids[rows[row], self.prompt_width + step])


def micro_batches(
    lengths: Tensor, rows: Tensor, *, max_rows: int, max_tokens: int | None = None, packed: bool = False
) -> list[Tensor]:
    """Split `rows` (n,) into micro-batches of rows of like length, longest first.

    Each holds at most `max_rows` rows and `max_tokens` tokens, padding included (a longer single row stands alone).
    Packed rows may be more, as long as they have no more tokens than `max_rows` of the longest would have.
    """
    batches: list[list[int]] = []
    held, real = 0, lengths.tolist()
    ordered = sorted(rows.tolist(), key=lambda r: (-real[r], r))
    most = max_tokens if max_tokens is not None else sys.maxsize
    if packed and ordered:
        most, max_rows = min(most, max_rows * real[ordered[0]]), len(ordered)
    for row in ordered:
        more = real[row] if packed or not batches else real[batches[-1][0]]
        if not batches or len(batches[-1]) >= max_rows or held + more > most:
            batches.append([])
            held, more = 0, real[row]
        batches[-1].append(row)
        held += more
    return [torch.tensor(batch, dtype=torch.int64, device=rows.device) for batch in batches]


@dataclass(frozen=True)
class Opinions:
    """What an ensemble says of each response."""

    score: Tensor  # (B,) float32: the opinions made one
    members: dict[str, Tensor]  # (B,) float32 each

    @classmethod
    def joined(cls, parts: Sequence["Opinions"]) -> "Opinions":
        """Those of the responses of one part after the other."""
        members = {name: torch.cat([part.members[name] for part in parts]) for name in parts[0].members}
        return cls(torch.cat([part.score for part in parts]), members)

    def cpu(self) -> "Opinions":
        return Opinions(self.score.cpu(), {name: score.cpu() for name, score in self.members.items()})

    @property
    def disagreement(self) -> Tensor:
        """Standard deviation over the members, (B,)."""
        return torch.stack(list(self.members.values())).std(0, unbiased=False)


@dataclass(frozen=True)
class Scored:
    """What the sources of reward say of a rollout, and what came of it."""

    sources: dict[str, Tensor]  # each source's raw score, (B,)
    opinions: dict[str, Opinions]  # of those that are ensembles
    summed: Tensor  # (B,) float32: the sources by weight, before anything is done to the sum
    moments: Moments  # of all such sums of the run, these among them
    placed: Tensor  # (B,) float32: scaled, clipped, less penalties: what goes on the last real token


@dataclass(frozen=True)
class Told:
    """What an experience holds of N response tokens, each (N,)."""

    ids: Tensor  # int64: the tokens themselves
    logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor

    def __getitem__(self, part: slice) -> "Told":
        return Told(**{field.name: getattr(self, field.name)[part] for field in fields(self)})


@dataclass(frozen=True)
class Experience:
    """A rollout, judged: everything the update needs, fixed before it starts."""

    rollout: Rollout
    plan: tuple[tuple[Tensor, ...], ...]  # epoch 1: minibatches of micro-batches of rows, the ones the judge ran on
    packed: bool  # whether their rows are laid end to end
    scored: Scored
    kl_coef: float  # in force for this update
    logprobs: Tensor  # (B, R) float32: the policy's, at the sampling temperature
    ref_logprobs: Tensor  # (B, R) float32
    values: Tensor  # (B, R) float32: before each response token
    kl: Tensor  # (B, R) float32: the chosen estimator
    rewards: Tensor  # (B, R) float32: score and, with kl_in reward, the KL penalty
    advantages: Tensor  # (B, R) float32
    returns: Tensor  # (B, R) float32

    @property
    def mask(self) -> Tensor:
        return self.rollout.response_mask

    @property
    def scores(self) -> Tensor:
        return self.scored.placed

    def of(self, micro: MicroBatch) -> Told:
        """What it holds of a micro-batch's response tokens."""
        names = ("logprobs", "ref_logprobs", "values", "advantages", "returns")
        return Told(micro.targets, **{name: getattr(self, name)[micro.cells] for name in names})

    @property
    def tokens_read(self) -> int:
        """Positions that a model reads in one pass over the plan: with padding, unless the rows are packed."""
        if self.packed:
            return int(self.rollout.mask.sum())
        return sum(len(rows) * int(self.rollout.lengths[rows].max()) for rows in chain.from_iterable(self.plan))
