"""Tensors of prompts and responses: `Prompts` -> `Rollout` -> `MicroBatch`.

Shapes: B rows (episodes), P prompt width, R response width, N response tokens of a micro-batch, flattened in row order.
Masks are bool, True = counts.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from rlhf_cli.data.datasets import Prompt


Record = Mapping[str, Any]  # a row of the data: "prompt", its text or messages, and the further columns
IGNORE_INDEX = -100  # label of a token that is not trained
StopTokenId = int | Sequence[int] | None  # several end a response as transformers' eos_token_id does; None: none


def stop_ids(stop_token_id: StopTokenId) -> tuple[int, ...]:
    """Return the stop tokens as a tuple, empty without one."""
    if isinstance(stop_token_id, int):
        return (stop_token_id,)
    return tuple(stop_token_id or ())


def is_stop(ids: Tensor, stop_token_id: StopTokenId) -> Tensor:
    """Return the mask (...) of the stop tokens in ids (...)."""
    found = torch.zeros_like(ids, dtype=torch.bool)
    for stop in stop_ids(stop_token_id):
        found |= ids == stop
    return found


def slices(length: int, size: int) -> list[slice]:
    """Return consecutive slices of `size` items, the last one perhaps shorter, that cover `length` items."""
    return [slice(start, start + size) for start in range(0, length, size)]


def left_pad(rows: Sequence[Sequence[int]], pad: int = 0) -> tuple[Tensor, Tensor]:
    """Pad ragged rows on the left; return ids (B, W) int64 and mask (B, W) bool."""
    reversed_rows = [row[::-1] for row in rows]
    ids, mask = right_pad(reversed_rows, pad)
    return ids.flip(1), mask.flip(1)


def right_pad(rows: Sequence[Sequence[int]], pad: int = 0) -> tuple[Tensor, Tensor]:
    """Pad ragged rows on the right; return ids (B, W) int64 and mask (B, W) bool."""
    width = max(map(len, rows), default=0)
    ids = torch.full((len(rows), width), pad)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for number, row in enumerate(rows):
        length = len(row)
        ids[number, :length] = torch.as_tensor(row)
        mask[number, :length] = True
    return ids, mask


@dataclass(frozen=True)
class Prompts:
    """Prompts for a rollout engine to continue.

    The prompts 5 6 and 7, padded with 0 to P = 2:

        ids   [[5, 6], [0, 7]]
        mask  [[T, T], [F, T]]
    """

    ids: Tensor  # (B, P) int64, left-padded
    mask: Tensor  # (B, P) bool
    seeds: tuple[int, ...] = ()  # one per row, keys all random draws of the row; set by the trainer
    response_length: int = 0  # maximum tokens per response; set by the trainer
    records: tuple[Record, ...] = ()  # one per row, for reward functions; or none

    @classmethod
    def from_lists(cls, queries: Sequence[Sequence[int]], pad: int = 0) -> "Prompts":
        """Build prompts from token lists. Raises ValueError if one is empty: nothing could predict its first token."""
        if not queries or not all(queries):
            raise ValueError("each prompt needs at least one token")
        return cls(*left_pad(queries, pad))

    @classmethod
    def of(cls, prompts: "Sequence[Prompt]") -> "Prompts":
        """Build prompts from those of a data file, with their records."""
        without_records = cls.from_lists([prompt.ids for prompt in prompts])
        records = tuple(prompt.record for prompt in prompts)
        return replace(without_records, records=records)

    def __post_init__(self) -> None:
        _check_records(self)

    def __len__(self) -> int:
        return self.ids.shape[0]

    def rows(self, part: slice) -> "Prompts":
        """Return the rows of a slice."""
        return replace(
            self,
            ids=self.ids[part],
            mask=self.mask[part],
            seeds=self.seeds[part],
            records=self.records[part],
        )

    def repeat(self, times: int) -> "Prompts":
        """Repeat each row `times` times; the responses to one prompt are adjacent rows."""
        return replace(
            self,
            ids=self.ids.repeat_interleave(times, 0),
            mask=self.mask.repeat_interleave(times, 0),
            records=tuple(self.records[row // times] for row in range(times * len(self.records))),
        )


def _check_records(rows: "Prompts | Rollout") -> None:
    if rows.records and len(rows.records) != len(rows):
        raise ValueError(f"{len(rows.records)} records for {len(rows)} rows")


@dataclass(frozen=True)
class MicroBatch:
    """Rows of a rollout without left padding, and the positions whose logits predict the response tokens.

    Both rows of the example at `Rollout`, with N = 3 response tokens; the logits at column 1 of row 0 predict its 8:

        ids             [[5, 6, 8, 2], [7, 2, 0, 0]]
        lengths         [4, 2]
        response_lengths [2, 1]
        row_index       [0, 0, 1]
        logit_position  [1, 2, 0]
        token_index     [0, 1, 0]
        response_ids    [8, 2, 2]
    """

    rows: Tensor  # (n,) int64: rows of the rollout
    ids: Tensor  # (n, L) int64, right-padded: causal attention keeps padding away from real tokens
    lengths: Tensor  # (n,) int64: real tokens of each row
    response_lengths: Tensor  # (n,) int64: those of its response
    row_index: Tensor  # (N,) int64: row of `ids` that holds each response token
    logit_position: Tensor  # (N,) int64: column of `ids` that predicts it, one before its own
    token_index: Tensor  # (N,) int64: its position in the response
    response_ids: Tensor  # (N,) int64: the response tokens

    @property
    def response_index(self) -> tuple[Tensor, Tensor]:
        """Index of the N response tokens in (B, R) tensors of the rollout: `x[micro_batch.response_index]`."""
        return self.rows[self.row_index], self.token_index


@dataclass(frozen=True)
class Rollout:
    """Prompts with their responses.

    The prompts 5 6 and 7, the responses 8 2 and 2, where 2 is the stop token and 0 the padding; P = R = 2:

        ids            [[5, 6, 8, 2], [0, 7, 2, 0]]
        mask           [[T, T, T, T], [F, T, T, F]]
        response_mask  [[T, T], [T, F]]
        ended          [T, T]
    """

    ids: Tensor  # (B, P+R) int64: prompts left-padded, responses right-padded
    mask: Tensor  # (B, P+R) bool: real tokens, contiguous in each row
    response_mask: Tensor  # (B, R) bool: response tokens that count, through the first stop token
    ended: Tensor  # (B,) bool: the response ended with a stop token
    row_offset: int = 0  # of a slice of a batch: the batch's row number of the first row
    logprobs: Tensor | None = None  # (B, R) float32: of the drawn tokens by the engine that drew them; 0 after the end
    records: tuple[Record, ...] = ()  # the prompts': one per row, or none

    def __post_init__(self) -> None:
        _check_records(self)

    @classmethod
    def from_lists(
        cls,
        queries: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        response_masks: Sequence[Sequence[bool]] | None = None,
        *,
        stop_token_id: StopTokenId = None,
        pad: int = 0,
    ) -> "Rollout":
        """Build a rollout from token lists, for responses generated elsewhere.

        `response_masks` marks the response tokens that count (default: all). A response has ended if its last token is
        a stop token, or if there is none. Raises ValueError if the lists differ in length or one is empty.
        """
        queries = [list(map(int, query)) for query in queries]
        responses = [list(map(int, response)) for response in responses]
        if len(queries) != len(responses) or not queries or not all(queries) or not all(responses):
            raise ValueError("queries and responses must have equal length, and none of them empty")
        prompt_ids, prompt_mask = left_pad(queries, pad)
        response_ids, real = right_pad(responses, pad)

        response_mask = real
        if response_masks is not None:
            if list(map(len, response_masks)) != list(map(len, responses)):
                raise ValueError("each response mask must be as long as its response")
            if not all(any(mask) for mask in response_masks):
                raise ValueError("each response needs a token that counts")
            counts, _ = right_pad(response_masks)
            response_mask = counts.bool()

        stops = stop_ids(stop_token_id)
        ended = [stop_token_id is None or response[-1] in stops for response in responses]
        return cls(
            torch.cat([prompt_ids, response_ids], 1),
            torch.cat([prompt_mask, real], 1),
            response_mask,
            torch.tensor(ended),
        )

    @classmethod
    def of_responses(
        cls,
        prompts: Prompts,
        ids: Tensor,
        mask: Tensor,
        *,
        stop_token_id: StopTokenId,
        logprobs: Tensor,
    ) -> "Rollout":
        """Join prompts with an engine's responses (B, R). A response has ended if it has a stop token."""
        device = ids.device
        stops = is_stop(ids, stop_token_id) & mask
        return cls(
            torch.cat([prompts.ids.to(device), ids], 1),
            torch.cat([prompts.mask.to(device), mask], 1),
            mask,
            ended=stops.any(1),
            logprobs=logprobs,
        )

    def __len__(self) -> int:
        return self.ids.shape[0]

    def rows(self, part: slice) -> "Rollout":
        """Return the rows of a slice, with all columns."""
        tensors = {name: tensor[part] for name, tensor in self._tensors.items()}
        row_offset = self.row_offset + (part.start or 0)
        return replace(self, row_offset=row_offset, records=self.records[part], **tensors)

    @classmethod
    def concat(cls, parts: Sequence["Rollout"]) -> "Rollout":
        """Concatenate the rows of rollouts whose prompts have the same width."""
        width = max(part.response_mask.shape[1] for part in parts)
        wide = [part._widened(width - part.response_mask.shape[1]) for part in parts]
        records = tuple(chain.from_iterable(part.records for part in parts))

        tensors: dict[str, Any] = {}
        for name in wide[0]._tensors:
            tensors[name] = torch.cat([getattr(part, name) for part in wide])
        return cls(**tensors, records=records)

    def _widened(self, columns: int) -> "Rollout":
        """Return the rollout with further columns of padding behind the responses."""
        tensors = self._tensors
        for name, tensor in tensors.items():
            if name != "ended":
                tensors[name] = F.pad(tensor, (0, columns))
        return replace(self, **tensors)

    def to(self, device: torch.device | str) -> "Rollout":
        moved = {name: tensor.to(device) for name, tensor in self._tensors.items()}
        return replace(self, **moved)

    @property
    def _tensors(self) -> dict[str, Any]:
        """The fields that are tensors of rows, by name."""
        tensors = {
            "ids": self.ids,
            "mask": self.mask,
            "response_mask": self.response_mask,
            "ended": self.ended,
        }
        if self.logprobs is not None:
            tensors["logprobs"] = self.logprobs
        return tensors

    def has_groups(self, size: int) -> bool:
        """Return True if the rows are groups of `size` adjacent responses, each group to one prompt."""
        if len(self) % size:
            return False
        prompts = torch.where(self.mask, self.ids, -1)[:, : self.prompt_width]
        first_of_group = prompts[::size].repeat_interleave(size, 0)
        return torch.equal(prompts, first_of_group)

    @property
    def prompt_width(self) -> int:
        return self.ids.shape[1] - self.response_mask.shape[1]

    @property
    def prompt_lengths(self) -> Tensor:
        return self.mask[:, : self.prompt_width].sum(1)

    @property
    def response_lengths(self) -> Tensor:
        """Real tokens of each response, (B,) int64."""
        return self.mask[:, self.prompt_width :].sum(1)

    @property
    def lengths(self) -> Tensor:
        return self.mask.sum(1)

    def with_one_end(self, end_token_ids: Sequence[int]) -> "Rollout":
        """Return the rollout with the first of these tokens in place of another one at the end of a row."""
        if len(end_token_ids) < 2:
            return self
        end, *others = end_token_ids
        rows = torch.arange(len(self), device=self.ids.device)
        columns = self.prompt_width + self.response_lengths - 1
        last = self.ids[rows, columns]
        ids = self.ids.clone()
        ids[rows, columns] = torch.where(is_stop(last, others), end, last)
        return replace(self, ids=ids)

    def with_closed_turns(self, end_token_id: int, closing_ids: Sequence[int]) -> "Rollout":
        """Return the rollout with `closing_ids` behind each response that ended, if its prompt has turns that end too.

        Not behind a response to a text: no chat template was applied to it.
        """
        device = self.ids.device
        closing = torch.tensor(closing_ids, device=device)
        rows = torch.arange(len(self), device=device)
        behind = self.prompt_width + self.response_lengths  # first column behind each response
        is_end = self.ids == end_token_id
        has_turns = (is_end & self.mask)[:, : self.prompt_width].any(1)
        has_ended = is_end[rows, behind - 1]

        closed = (has_turns & has_ended).nonzero()  # (n, 1)
        columns = behind[closed] + torch.arange(len(closing), device=device)
        wide = self._widened(len(closing))
        wide.ids[closed, columns] = closing
        wide.mask[closed, columns] = True
        wide.response_mask[closed, columns - self.prompt_width] = True
        return replace(wide, logprobs=None)

    @cached_property
    def repetition(self) -> Tensor:
        """Share of each response's 3-grams that are repeats, (B,) float32; 0 below three tokens."""
        responses = self.ids[:, self.prompt_width :].tolist()
        lengths = self.response_lengths.tolist()
        shares = []
        for ids, length in zip(responses, lengths, strict=True):
            tokens = ids[:length]
            trigrams = list(zip(tokens, tokens[1:], tokens[2:], strict=False))
            different = len(set(trigrams))
            shares.append(1 - different / len(trigrams) if trigrams else 0.0)
        return torch.tensor(shares)

    def prompt_tokens(self, row: int) -> list[int]:
        return self._tokens(row, slice(None, self.prompt_width))

    def response_tokens(self, row: int) -> list[int]:
        return self._tokens(row, slice(self.prompt_width, None))

    def _tokens(self, row: int, columns: slice) -> list[int]:
        is_real = self.mask[row, columns]
        return self.ids[row, columns][is_real].tolist()

    def text(self, tokenizer: Any, row: int) -> tuple[str, str]:
        """Return a row's prompt and response as text, without special tokens."""
        prompt = tokenizer.decode(self.prompt_tokens(row), skip_special_tokens=True)
        response = tokenizer.decode(self.response_tokens(row), skip_special_tokens=True)
        return prompt, response

    def texts(self, tokenizer: Any) -> tuple[list[str], list[str]]:
        """Return the texts of all prompts and of all responses, as `text` does."""
        pairs = [self.text(tokenizer, row) for row in range(len(self))]
        return [prompt for prompt, _ in pairs], [response for _, response in pairs]

    def micro_batch(self, rows: Tensor) -> MicroBatch:
        """Return the given rows (n,) without left padding. Padding ids are 0 and are never read."""
        lengths = self.lengths[rows]
        prompt_lengths = self.prompt_lengths[rows]
        starts = self.prompt_width - prompt_lengths
        offsets = torch.arange(int(lengths.max()), device=self.ids.device)
        columns = (starts[:, None] + offsets).clamp(max=self.ids.shape[1] - 1)
        ids = self.ids[rows].gather(1, columns)

        row, token = self.response_mask[rows].nonzero(as_tuple=True)
        return MicroBatch(
            rows,
            ids=torch.where(offsets < lengths[:, None], ids, 0),
            lengths=lengths,
            response_lengths=self.response_lengths[rows],
            row_index=row,
            logit_position=prompt_lengths[row] + token - 1,
            token_index=token,
            response_ids=self.ids[rows[row], self.prompt_width + token],
        )


def split_into_micro_batches(
    lengths: Tensor,
    rows: Tensor,
    *,
    max_rows: int,
    max_tokens: int | None = None,
    packed: bool = False,
) -> list[Tensor]:
    """Split `rows` (n,) into micro-batches of rows of similar length, longest first.

    Each has at most `max_rows` rows and `max_tokens` tokens, padding included; a longer row gets its own micro-batch.
    With `packed`, the limit is the token count of `max_rows` of the longest rows instead.
    """
    row_tokens = lengths.tolist()
    ordered = sorted(rows.tolist(), key=lambda row: (-row_tokens[row], row))
    limit = sys.maxsize if max_tokens is None else max_tokens
    if packed and ordered:
        limit = min(limit, max_rows * row_tokens[ordered[0]])
        max_rows = len(ordered)

    batches: list[list[int]] = []
    batch: list[int] = []
    used = 0
    for row in ordered:
        cost = row_tokens[row if packed or not batch else batch[0]]
        if not batch or len(batch) >= max_rows or used + cost > limit:
            batch = []
            batches.append(batch)
            used = 0
            cost = row_tokens[row]
        batch.append(row)
        used += cost
    return [torch.tensor(batch, dtype=torch.int64, device=rows.device) for batch in batches]


@dataclass(frozen=True)
class EnsembleScores:
    """Scores of each response by the members of an ensemble.

    Of two responses, combined by the mean:

        members       {"a": [1, 4], "b": [3, 4]}
        score         [2, 4]
        disagreement  [1, 0]
    """

    score: Tensor  # (B,) float32: the members' scores combined
    members: dict[str, Tensor]  # (B,) float32 each

    @classmethod
    def concat(cls, parts: Sequence["EnsembleScores"]) -> "EnsembleScores":
        """Concatenate the rows of the parts."""
        score = torch.cat([part.score for part in parts])
        members = {name: torch.cat([part.members[name] for part in parts]) for name in parts[0].members}
        return cls(score, members)

    def cpu(self) -> "EnsembleScores":
        members = {name: score.cpu() for name, score in self.members.items()}
        return EnsembleScores(self.score.cpu(), members)

    @property
    def disagreement(self) -> Tensor:
        """Population standard deviation over the members, (B,)."""
        return torch.stack(list(self.members.values())).std(0, unbiased=False)
