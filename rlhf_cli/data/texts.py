"""What one row says: its prompt and its responses, as text or conversation, whatever form the row has."""

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
from rlhf_cli.data.bad_row import BadRow
from rlhf_cli.data.formats import DataFile, Form
from rlhf_cli.data.readers import Place
from rlhf_cli.data.tokens import Conversation

IDENTICAL = '"chosen" equals "rejected"'


@dataclass(frozen=True)
class Example:
    """A response to a prompt; the prompt is "" for plain text."""

    place: Place
    prompt: str | Conversation
    response: str

    def as_text(self) -> "Example":
        """With a conversation written as a transcript, for a tokenizer without a chat template."""
        return replace(self, prompt=other_formats.render(self.prompt), response=f" {self.response}")


@dataclass(frozen=True)
class Pair:
    """Two responses to a prompt, the first one preferred."""

    place: Place
    prompt: str | Conversation
    chosen: str
    rejected: str
    margin: float | None

    def as_text(self) -> "Pair":
        """With a conversation written as a transcript, for a tokenizer without a chat template."""
        prompt = other_formats.render(self.prompt)
        return replace(self, prompt=prompt, chosen=f" {self.chosen}", rejected=f" {self.rejected}")


def examples(place: Place, form: Form, row: dict[str, Any]) -> list[Example]:
    """The examples of one SFT row. Raises BadRow D08, D09, D12."""
    if form == ("text",):
        _need_text(row["text"], "text")
        return [Example(place, "", row["text"])]
    if form == ("messages",):
        return _assistant_turns(place, _list(row["messages"], "messages"), 0, "messages")
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) != isinstance(completion, str):
        raise BadRow("D12", '"prompt" and "completion" must both be text, or both be lists of messages')
    if isinstance(prompt, str):
        _need_prompt(prompt)
        _need_text(completion, "completion")
        return [Example(place, prompt, completion)]
    return _assistant_turns(place, [*prompt, *completion], len(prompt), "completion")


def pair(place: Place, form: Form, row: dict[str, Any]) -> Pair:
    """The pair of one preference row. Raises BadRow D06-D09, D12."""
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
    _need_prompt(prompt)
    _need_text(chosen, "chosen")
    _need_text(rejected, "rejected")
    return Pair(place, prompt, chosen, rejected, _margin(row))


def bare_prompt(form: Form, row: dict[str, Any]) -> str | Conversation:
    """The prompt of a row without responses; of {messages}, what stands before the last assistant turn.

    Raises BadRow D06, D08.
    """
    prompt = row[form[0]]
    if form == ("messages",):
        turns = [i for i, message in enumerate(_list(prompt, "messages")) if message["role"] == "assistant"]
        prompt = prompt[: turns[-1]] if turns else prompt
    _need_prompt(prompt)
    return prompt


def opening(prompt: str | Conversation, words: tuple[int, int]) -> str:
    """The first words of a text as they stand there: how many, fewest to most, is drawn from a hash of it.

    Raises BadRow D12 for a conversation.
    """
    if not isinstance(prompt, str):
        raise BadRow("D12", "the prompt is a conversation; data.first_words cuts only text", "remove first_words")
    fewest, most = words
    drawn = int.from_bytes(blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=8).digest())
    count = fewest + drawn % (most - fewest + 1)
    *_, last = islice(re.finditer(r"\S+", prompt), count)
    return prompt[: last.end()]


def split_key(prompt: str | Conversation) -> str:
    """What decides on which side of a split a prompt falls: of a conversation how the user opens it."""
    if isinstance(prompt, str):
        return prompt.strip()
    return next((turn["content"] for turn in prompt if turn["role"] == "user"), "").strip()


def as_key(prompt: str | Conversation) -> bytes:
    """What two prompts have in common that ask for the same, written as a text or as messages."""
    said = prompt if isinstance(prompt, str) else "\n".join(turn["content"] for turn in prompt)
    return blake2b(said.strip().encode("utf-8", "surrogatepass"), digest_size=12).digest()


def _assistant_turns(place: Place, messages: Conversation, start: int, column: str) -> list[Example]:
    """One example for each assistant turn from `start` on: what stands before it is the prompt."""
    turns = [i for i, message in enumerate(messages) if i >= start and message["role"] == "assistant"]
    if not turns:
        raise BadRow("D09", f'"{column}" has no assistant message')
    for i in turns:
        _need_prompt(messages[:i])
        _need_text(messages[i]["content"], column)
    return [Example(place, messages[:i], messages[i]["content"]) for i in turns]


def _split_texts(chosen: str, rejected: str) -> tuple[str, str, str]:
    """The common beginning as the prompt, cut where a word ends; the white space goes to the responses."""
    length = _shared(chosen, rejected)
    prompt = chosen[:length]
    inside_word = any(text[length : length + 1].strip() for text in (chosen, rejected))
    used_up = length in (len(chosen), len(rejected))
    if (inside_word or used_up) and prompt[-1:].strip():
        prompt = prompt[: len(prompt) - len(prompt.split()[-1])]
    prompt = prompt.rstrip()
    return prompt, chosen[len(prompt) :], rejected[len(prompt) :]


def _split_conversations(
    given: str | Conversation | None, chosen: Conversation, rejected: Conversation
) -> tuple[Conversation, str, str]:
    """The prompt and the two answers: each side is what both share, then one message of the assistant."""
    # A text beside whole conversations (UltraFeedback) only repeats what they begin with.
    prompt = given if isinstance(given, list) else chosen[: min(_shared(chosen, rejected), len(chosen) - 1)]
    if not prompt and isinstance(given, str):
        raise BadRow("D12", '"prompt" is text, but "chosen" is a list of messages that does not begin with it')
    tails = [side[len(prompt) :] if side[: len(prompt)] == prompt else side for side in (chosen, rejected)]
    for tail, column in zip(tails, ("chosen", "rejected"), strict=True):
        if len(tail) != 1 or tail[0]["role"] != "assistant":
            raise BadRow("D12", f'"{column}" must be the prompt followed by one assistant message')
    return prompt, tails[0][0]["content"], tails[1][0]["content"]


def _shared(left: Any, right: Any) -> int:
    return sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(left, right, strict=False)))


def _margin(row: dict[str, Any]) -> float | None:
    if "margin" not in row:
        return None
    margin = row["margin"]
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not abs(margin) <= sys.float_info.max:
        raise BadRow("D06", f'"margin" is {margin!r:.40}; expected a finite number')
    return float(margin)


def _list(value: Any, column: str) -> Conversation:
    if not isinstance(value, list):
        raise BadRow("D06", f'"{column}" is text; expected a list of messages')
    return value


def _need_prompt(prompt: str | Conversation) -> None:
    if not (prompt.strip() if isinstance(prompt, str) else prompt):
        raise BadRow("D08", "the prompt is empty")


def _need_text(text: Any, column: str) -> None:
    if not isinstance(text, str):
        raise BadRow("D06", f'"{column}" is a list of messages; expected text')
    if not text.strip():
        raise BadRow("D09", f'"{column}" is empty')


Row = TypeVar("Row")
Other = TypeVar("Other")


class Rows(list[Row]):
    """The usable rows of a source, with what was read and left out. Read without a tokenizer, they hold no tokens.

    `kept`: how many rows of the file they stand for: a prompt may be that of several pairs. `every`: above 1 they are a
    sample, one row in so many.
    """

    def __init__(
        self, rows: Iterable[Row], file: DataFile, prompts: Iterable[str | Conversation], *, kept: int, every: int = 1
    ) -> None:
        super().__init__(rows)
        self.read = file.read
        self.lost = {code: file.dropped[code] for code in sorted(file.dropped, key=lambda c: -file.dropped[c].rows)}
        self.left_out, self.asked = file.left_out, kept + file.left_out
        self.longest = file.longest_usable  # tokens; 0 without a tokenizer
        self.longest_read = file.longest  # with the rows that were left out for it
        self.every = every
        self.source = file.source
        self.prompts = frozenset(map(as_key, prompts))

    @property
    def share_left_out(self) -> float:
        """Of the rows that this part of the source would have; a conversation gives one for each assistant turn."""
        return self.left_out / self.asked if self.asked else 0.0

    def told_left_out(self) -> str:
        """How many were left out of how many; empty where none was."""
        return f"{self.left_out} of {self.asked} left out ({self.share_left_out:.1%})" if self.left_out else ""

    def holding(self, rows: Iterable[Other]) -> "Rows[Other]":
        """Other rows made of these, one of each."""
        made: Any = copy(self)
        made[:] = rows
        return made


def warn_shared(training: Rows, evaluation: Rows, *, where: str | None) -> None:
    """D13: how many of the evaluation's prompts were trained on; `where` names the key of the evaluation's data.

    Where all training rows have one and the same prompt, it tells them apart no more than no prompt would.
    """
    if len(training.prompts) == 1 < len(training):
        return
    if shared := len(training.prompts & evaluation.prompts):
        text = f"{shared} of {len(evaluation.prompts)} evaluation prompts also occur in {training.source.shown()}"
        hint = "remove them from one of the files, or hold out prompts with data.eval_fraction"
        terminal.warn("D13", text, where=where, hint=hint)
