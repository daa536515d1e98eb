"""Checks of how a chat template renders conversations: with each message, and with markup once."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rlhf_cli import terminal
from rlhf_cli.data.readers import RowLocation
from rlhf_cli.data.tokens import TOOL_CALLS, Conversation, PromptText, render
from rlhf_cli.errors import RLHFError

SAMPLED_ROWS = 32
MIN_SHARE_WITH_MARKUP = 0.1  # of the sampled rows; a text about chat formats may contain some
CHAT_MARKUP = re.compile(
    r"<\|(?:im_start|im_end|start_header_id|eot_id|user|assistant|system|end|channel|message)\|>"
    r"|<(?:start|end)_of_turn>|\[/?INST\]|<</?SYS>>"
    r"|(?:^|\n)###[ \t]*(?:Human|User|Assistant|Instruction|Response)[ \t]*:"
    r"|(?:^|\n)(?:Human|User|USER)[ \t]*:(?=.*\n(?:Assistant|ASSISTANT)[ \t]*:)",
    re.DOTALL,
)
THOUGHT = re.compile(r".*</think>|<think>.*", re.DOTALL)  # of an earlier answer: templates leave it out on purpose
JSON_ESCAPE = re.compile(r"\\[nrtbf\"/\\]")
WITHOUT_MARKUP = "write the texts without it: the role and the text alone"
NOT_A_WORD = re.compile(r"\W+")


class RenderedRow(NamedTuple):
    """A conversation up to the answers, and the answers."""

    location: RowLocation
    prompt: Conversation
    answers: Sequence[str]


def rendered_rows(rows: Iterable[tuple[RowLocation, PromptText, Sequence[str]]]) -> list[RenderedRow]:
    """Return the rows whose prompt is a conversation: the chat template renders no texts."""
    return [RenderedRow(place, prompt, answers) for place, prompt, answers in rows if isinstance(prompt, list)]


def check_rendering(rows: Sequence[RenderedRow], tokenizer: Any, *, where: str, hint: str = WITHOUT_MARKUP) -> None:
    """Check some of the rows, evenly spaced. `where` is the source in a message, `hint` the way to unmarked texts.

    Warns D18 about texts that have chat markup already. Raises RLHFError T08 if the template leaves out a message.
    """
    stride = max(1, math.ceil(len(rows) / SAMPLED_ROWS))
    sample = rows[::stride]
    for row in sample:
        _require_all_messages(row, tokenizer)
    marked = list(filter(None, map(find_markup, sample)))
    if sample and len(marked) / len(sample) >= MIN_SHARE_WITH_MARKUP:
        count = f"{len(marked)} of {len(sample)} sampled rows"
        text = f"{count} have chat markup in their texts ({marked[0]!r}), and the chat template adds its own"
        terminal.warn("D18", text, where=where, hint=hint)


def find_markup(row: RenderedRow) -> str | None:
    """Return the first chat markup in the texts of a row, None if there is none."""
    contents = [message["content"] for message in row.prompt]
    for text in (*contents, *row.answers):
        match = CHAT_MARKUP.search(text)
        if match:
            return match[0].strip()[:30]
    return None


def _require_all_messages(row: RenderedRow, tokenizer: Any) -> None:
    """Raise RLHFError T08 if the rendering does not have the words of each message."""
    try:
        rendered = render(tokenizer, row.prompt, generation_prompt=True)
    except RLHFError:  # reported with all rows that the template rejects
        return
    for number, message in enumerate(row.prompt, start=1):
        content = message["content"]
        if message["role"] == "assistant":
            content = THOUGHT.sub("", content)
        called = [call["function"]["name"] for call in message.get(TOOL_CALLS) or ()]
        if not all(_contains(rendered, each) for each in (content, *called)):
            part = "the calls or the text" if called else "the text"
            text = f'the chat template leaves out {part} of message {number}, of the role "{message["role"]}"'
            hint = "use the roles user, assistant and system, or set model.chat_template to one that writes this role"
            raise RLHFError("T08", text, where=str(row.location), hint=hint)


def _contains(rendered: str, content: str) -> bool:
    """Return True if a rendering has the words of a text, as it is or as JSON, which templates write of tools."""
    unescaped = JSON_ESCAPE.sub(" ", rendered)
    return any(_words(content) in _words(each) for each in (rendered, unescaped))


def _words(text: str) -> str:
    """Return the letters and digits of a text: templates may strip, quote or escape the rest."""
    return NOT_A_WORD.sub("", text)
