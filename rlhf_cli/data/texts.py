"""Parse rows of any form into examples, pairs and prompts; the list of usable rows of a source."""

import re
import sys
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import islice, takewhile
from typing import Any, TypeVar

from rlhf_cli import terminal
from rlhf_cli.data import other_formats
from rlhf_cli.data.formats import DatasetReader, Form
from rlhf_cli.data.readers import BadRow, RowLocation
from rlhf_cli.data.tokens import Conversation

IDENTICAL = '"chosen" equals "rejected"'


@dataclass(frozen=True)
class Example:
    """Prompt and response; the prompt is "" for plain text."""

    location: RowLocation
    prompt: str | Conversation
    response: str

    def as_text(self) -> "Example":
        """Return a copy with its conversation as a transcript, for a tokenizer without a chat template."""
        return replace(self, prompt=other_formats.render_transcript(self.prompt), response=f" {self.response}")


@dataclass(frozen=True)
class Pair:
    """Prompt with a preferred and a rejected response."""

    location: RowLocation
    prompt: str | Conversation
    chosen: str
    rejected: str
    margin: float | None

    def as_text(self) -> "Pair":
        """Return a copy with its conversation as a transcript, for a tokenizer without a chat template."""
        prompt = other_formats.render_transcript(self.prompt)
        return replace(self, prompt=prompt, chosen=f" {self.chosen}", rejected=f" {self.rejected}")


def parse_examples(location: RowLocation, form: Form, row: dict[str, Any]) -> list[Example]:
    """Return the examples of one SFT row. Raises BadRow D08, D09, D12."""
    if form == ("text",):
        _require_text(row["text"], "text")
        return [Example(location, "", row["text"])]
    if form == ("messages",):
        return _assistant_turns(location, _require_messages(row["messages"], "messages"), 0, "messages")
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) != isinstance(completion, str):
        raise BadRow("D12", '"prompt" and "completion" must both be text, or both be lists of messages')
    if isinstance(prompt, str):
        _require_prompt(prompt)
        _require_text(completion, "completion")
        return [Example(location, prompt, completion)]
    return _assistant_turns(location, [*prompt, *completion], len(prompt), "completion")


def parse_pair(location: RowLocation, form: Form, row: dict[str, Any]) -> Pair:
    """Return the pair of one preference row. Raises BadRow D06-D09, D12."""
    chosen, rejected = row["chosen"], row["rejected"]
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise BadRow("D12", '"chosen" and "rejected" must both be text, or both be lists of messages')
    prompt = row["prompt"] if "prompt" in form else None
    if chosen == rejected:
        raise BadRow("D07", IDENTICAL, "drop the row, or set data.on_identical: drop")
    if isinstance(chosen, str):
        if prompt is None:
            prompt, chosen, rejected = _split_texts(chosen, rejected)
            if not prompt:
                text = 'the prompt is empty: "chosen" and "rejected" have no common prefix'
                raise BadRow("D08", text, "add a prompt column, or write the prompt at the start of both")
        elif not isinstance(prompt, str):
            raise BadRow("D12", '"prompt" is a list of messages, but "chosen" is text')
    else:
        prompt, chosen, rejected = _split_conversations(prompt, chosen, rejected)
    _require_prompt(prompt)
    _require_text(chosen, "chosen")
    _require_text(rejected, "rejected")
    return Pair(location, prompt, chosen, rejected, _margin(row))


def parse_prompt(form: Form, row: dict[str, Any]) -> str | Conversation:
    """Return the prompt of a row without responses; of {messages}, the messages before the last assistant turn.

    Raises BadRow D06, D08.
    """
    prompt = row[form[0]]
    if form == ("messages",):
        turns = [i for i, message in enumerate(_require_messages(prompt, "messages")) if message["role"] == "assistant"]
        prompt = prompt[: turns[-1]] if turns else prompt
    _require_prompt(prompt)
    return prompt


def first_words(prompt: str | Conversation, words: tuple[int, int]) -> str:
    """Cut a text after its first words; a hash of the text selects a number from the range `words` (inclusive).

    Raises BadRow D12 for a conversation.
    """
    if not isinstance(prompt, str):
        raise BadRow("D12", "the prompt is a conversation; data.first_words cuts only text", "remove first_words")
    min_words, max_words = words
    number = int.from_bytes(blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=8).digest())
    count = min_words + number % (max_words - min_words + 1)
    *_, last = islice(re.finditer(r"\S+", prompt), count)
    return prompt[: last.end()]


def split_key(prompt: str | Conversation) -> str:
    """Return the text that assigns a prompt to a side of a split: of a conversation its first user message."""
    if isinstance(prompt, str):
        return prompt.strip()
    return next((turn["content"] for turn in prompt if turn["role"] == "user"), "").strip()


def prompt_key(prompt: str | Conversation) -> bytes:
    """Return a hash that is equal for the same prompt as text and as messages."""
    text = prompt if isinstance(prompt, str) else "\n".join(turn["content"] for turn in prompt)
    return blake2b(text.strip().encode("utf-8", "surrogatepass"), digest_size=12).digest()


def _assistant_turns(location: RowLocation, messages: Conversation, start: int, column: str) -> list[Example]:
    """Return one example per assistant turn from index `start`; the messages before the turn are its prompt."""
    turns = [i for i, message in enumerate(messages) if i >= start and message["role"] == "assistant"]
    if not turns:
        raise BadRow("D09", f'"{column}" has no assistant message')
    for i in turns:
        _require_prompt(messages[:i])
        _require_text(messages[i]["content"], column)
    return [Example(location, messages[:i], messages[i]["content"]) for i in turns]


def _split_texts(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Split off the common prefix as prompt, cut at the end of a word; white space goes to the responses."""
    length = _common_prefix_length(chosen, rejected)
    prompt = chosen[:length]
    inside_word = any(text[length : length + 1].strip() for text in (chosen, rejected))
    at_end = length in (len(chosen), len(rejected))
    if (inside_word or at_end) and prompt[-1:].strip():
        prompt = prompt[: len(prompt) - len(prompt.split()[-1])]
    prompt = prompt.rstrip()
    return prompt, chosen[len(prompt) :], rejected[len(prompt) :]


def _split_conversations(
    prompt_column: str | Conversation | None, chosen: Conversation, rejected: Conversation
) -> tuple[Conversation, str, str]:
    """Return (prompt, chosen, rejected): each side is the common prefix and one assistant message."""
    # A text prompt next to full conversations (UltraFeedback) only repeats their first message.
    if isinstance(prompt_column, list):
        prompt = prompt_column
    else:
        prompt = chosen[: min(_common_prefix_length(chosen, rejected), len(chosen) - 1)]
    if not prompt and isinstance(prompt_column, str):
        raise BadRow("D12", '"prompt" is text, but "chosen" is a list of messages that does not begin with it')
    tails = [side[len(prompt) :] if side[: len(prompt)] == prompt else side for side in (chosen, rejected)]
    for tail, column in zip(tails, ("chosen", "rejected"), strict=True):
        if len(tail) != 1 or tail[0]["role"] != "assistant":
            raise BadRow("D12", f'"{column}" must be the prompt followed by one assistant message')
    return prompt, tails[0][0]["content"], tails[1][0]["content"]


def _common_prefix_length(left: Any, right: Any) -> int:
    return sum(1 for _ in takewhile(lambda items: items[0] == items[1], zip(left, right, strict=False)))


def _margin(row: dict[str, Any]) -> float | None:
    if "margin" not in row:
        return None
    margin = row["margin"]
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not abs(margin) <= sys.float_info.max:
        raise BadRow("D06", f'"margin" is {margin!r:.40}; expected a finite number')
    return float(margin)


def _require_messages(value: Any, column: str) -> Conversation:
    if not isinstance(value, list):
        raise BadRow("D06", f'"{column}" is text; expected a list of messages')
    return value


def _require_prompt(prompt: str | Conversation) -> None:
    if not (prompt.strip() if isinstance(prompt, str) else prompt):
        raise BadRow("D08", "the prompt is empty")


def _require_text(text: Any, column: str) -> None:
    if not isinstance(text, str):
        raise BadRow("D06", f'"{column}" is a list of messages; expected text')
    if not text.strip():
        raise BadRow("D09", f'"{column}" is empty')


Row = TypeVar("Row")
NewRow = TypeVar("NewRow")


class Rows(list[Row]):
    """Usable rows of a source, with counts of rows read and dropped; without tokens if read without a tokenizer.

    `kept` is the number of file rows they represent, as several pairs may have one prompt. With a `stride` above 1 they
    are a sample of every stride-th row.
    """

    def __init__(
        self,
        rows: Iterable[Row],
        reader: DatasetReader,
        prompts: Iterable[str | Conversation],
        *,
        kept: int,
        stride: int = 1,
    ) -> None:
        super().__init__(rows)
        self.num_read = reader.num_read
        self.dropped = dict(sorted(reader.dropped.items(), key=lambda item: -item[1].rows))
        self.num_dropped, self.num_expected = reader.num_dropped, kept + reader.num_dropped
        self.longest = reader.longest_usable  # tokens; 0 without a tokenizer
        self.longest_read = reader.longest  # including rows dropped as too long
        self.stride = stride
        self.source = reader.source
        self.prompts = frozenset(map(prompt_key, prompts))

    @property
    def dropped_share(self) -> float:
        """Return the dropped share of this part of the source; a conversation has one row per assistant turn."""
        return self.num_dropped / self.num_expected if self.num_expected else 0.0

    def dropped_text(self) -> str:
        """Return the counts of dropped rows for a message, empty if there are none."""
        counts = f"{self.num_dropped} of {self.num_expected} left out ({self.dropped_share:.1%})"
        return counts if self.num_dropped else ""

    def with_rows(self, rows: Iterable[NewRow]) -> "Rows[NewRow]":
        """Return a copy with `rows`, one converted row for each of these."""
        converted: Any = copy(self)
        converted[:] = rows
        return converted


def warn_shared(training: Rows, evaluation: Rows, *, where: str | None) -> None:
    """Warn (D13) about evaluation prompts that also occur in the training data; `where` locates the evaluation data.

    There is no warning if all training rows have the same prompt.
    """
    if len(training.prompts) == 1 < len(training):
        return
    if num_shared := len(training.prompts & evaluation.prompts):
        text = f"{num_shared} of {len(evaluation.prompts)} evaluation prompts also occur in {training.source.shown()}"
        hint = "remove them from one of the files, or hold out prompts with data.eval_fraction"
        terminal.warn("D13", text, where=where, hint=hint)
