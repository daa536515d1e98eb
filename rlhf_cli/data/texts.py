"""Parse rows of any form into examples: prompt and responses, from texts, lists of messages or transcripts.

A transcript (hh-rlhf) is a dialogue in one text: "\\n\\nHuman: ...\\n\\nAssistant: ...".
"""

import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import islice
from typing import Any

from rlhf_cli.data.columns import system_text
from rlhf_cli.data.readers import BadRow, Row, RowLocation
from rlhf_cli.data.tokens import (
    THOUGHT_KEYS,
    TOOL_CALLS,
    Answer,
    Conversation,
    Message,
    PromptText,
    common_prefix_length,
)

Form = tuple[str, ...]  # the columns of a row that rlhf reads
TRANSCRIPT_ROLES = {"Human": "user", "Assistant": "assistant"}
ROLE_NAMES = {role: name for name, role in TRANSCRIPT_ROLES.items()}
TRAINING_MARKS = ("weight", "train", "training")  # of a message: OpenAI's, and two of axolotl
TURN_START = re.compile(r"(?:^|\n\n)(Human|Assistant):")
# What ends the prompt in a text of prompt and answer: the header of the answer, or else the end of a line or sentence.
# Other words before a colon, such as "POST:" or "Q:", may be parts of the prompt.
TURN_HEADER = re.compile(
    r"(?:^|\s)(?:assistant|bot|gpt|chatgpt)[ \t]*:"
    r"|(?:^|\n|[.?!]\s)[ \t]*(?:\#+[ \t]*)?(?:answer|response|output|reply|completion|summary|tl;dr|ai|model|a)[ \t]*:"
    r"|(?:^|\n)[ \t]*(?:\u52a9\u624b|\u56de\u7b54|\u7b54)[ \t]*[:\uff1a]"  # assistant, answer, A in Chinese
    r"|<\|[^|<>\n]+\|>(?:assistant\b)?|<start_of_turn>model\b|\[/INST\]",
    re.IGNORECASE,
)
LINE_END = re.compile(r"\n")
SENTENCE_END = re.compile(r"[.?!\u2026][\"')\]]*(?=\s|$)|[\u3002\uff1f\uff01]")  # the last three of Chinese


@dataclass(frozen=True)
class Pair:
    """Prompt with a preferred and a rejected response."""

    location: RowLocation
    prompt: PromptText
    chosen: str
    rejected: str
    margin: float | None
    system: str = ""  # of a system column beside a prompt that is text

    def as_text(self) -> "Pair":
        """Return a copy with its conversation as a transcript, for a tokenizer without a chat template."""
        prompt = render_transcript(self.prompt)
        return replace(self, prompt=prompt, chosen=f" {self.chosen}", rejected=f" {self.rejected}")


@dataclass
class Example:
    """Prompt ("" for plain text) and responses by column: one completion, chosen and rejected, or none."""

    location: RowLocation
    prompt: PromptText
    responses: Mapping[str, Answer]  # messages only where they have a thought beside their content
    margin: float | None = None  # of a pair
    rows: int = 1  # of the file, with this prompt
    columns: dict[str, Any] = field(default_factory=dict)  # of a prompt's row, those besides the form's
    system: str = ""  # of a system column beside a pair whose prompt is text

    @property
    def first_text(self) -> PromptText:
        """The prompt, or plain text itself."""
        return self.prompt or next((text for text in self.responses.values() if isinstance(text, str)), "")

    def answers(self) -> list[str]:
        """Return the texts of the responses."""
        return [content_of(answer) for answer in self.responses.values()]

    def as_text(self) -> "Example":
        """Return a copy with its conversation as a transcript, for a tokenizer without a chat template."""
        responses = {name: f" {text}" for name, text in self.responses.items()}
        return replace(self, prompt=render_transcript(self.prompt), responses=responses)


def parse_sft_row(location: RowLocation, form: Form, row: Row) -> list[Example]:
    """Return the examples of an SFT row. Raises BadRow D06, D08, D09, D12."""
    if form == ("text",):
        _require_text(row["text"], "text")
        return [Example(location, "", {"completion": row["text"]})]
    if form == ("messages",):
        return _assistant_turns(location, _require_messages(row), 0, "messages")
    prompt = row["prompt"]
    completion = row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        _require_prompt(prompt)
        _require_text(completion, "completion")
        return [Example(location, prompt, {"completion": completion})]
    messages, start = _joined_messages(prompt, completion)
    return _assistant_turns(location, messages, start, "completion")


def _joined_messages(prompt: PromptText, completion: PromptText) -> tuple[Conversation, int]:
    """Return a prompt and its completion, of which one is messages, as messages; and where the completion begins.

    A completion may be the whole conversation, with the prompt at its beginning. Raises BadRow D12.
    """
    answer = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    if isinstance(prompt, str):
        if prompt.strip() not in joined(answer):
            raise BadRow("D12", '"completion" is a conversation that does not contain the prompt')
        return answer, len(answer) - 1
    if prompt and answer[: len(prompt)] == prompt:
        return answer, len(prompt)
    return [*prompt, *answer], len(prompt)


def parse_pair_row(location: RowLocation, form: Form, row: Row) -> list[Example]:
    """Return the pair of a preference row. Raises BadRow D06-D09, D12."""
    chosen = row["chosen"]
    rejected = row["rejected"]
    prompt = row["prompt"] if "prompt" in form else None
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise BadRow("D12", '"chosen" and "rejected" must both be text, or both be lists of messages')
    if chosen == rejected:
        raise BadRow("D07", '"chosen" equals "rejected"', "drop the row, or set data.on_identical: drop")

    if not isinstance(chosen, str):
        prompt, chosen, rejected = _split_conversations(prompt, chosen, rejected)
    elif prompt is None:
        prompt, chosen, rejected = _split_texts(chosen, rejected)
        if not prompt:
            text = 'the prompt is empty: "chosen" and "rejected" have no common prefix of whole turns or sentences'
            raise BadRow("D08", text, "add a prompt column, or write the prompt at the start of both")

    _require_prompt(prompt)
    _require_text(chosen, "chosen")
    _require_text(rejected, "rejected")
    system = system_text(row) if isinstance(prompt, str) else ""
    return [Example(location, prompt, {"chosen": chosen, "rejected": rejected}, _margin(row), system=system)]


def parse_prompt_row(location: RowLocation, form: Form, row: Row) -> list[Example]:
    """Return the prompt: of a pair, {prompt}, or {messages} up to the last assistant turn. Raises D06-D09, D12."""
    columns = {name: value for name, value in row.items() if name not in form}
    if "chosen" in form:
        (pair,) = parse_pair_row(location, form, row)
        return [Example(location, pair.prompt, {}, columns=columns)]
    if form == ("messages",):
        messages = _require_messages(row)
        answers = _assistant_indices(messages)
        prompt = messages[: answers[-1]] if answers else messages
    else:
        prompt = row["prompt"]
    _require_prompt(prompt)
    return [Example(location, prompt, {}, columns=columns)]


def first_words(prompt: PromptText, words: tuple[int, int]) -> str:
    """Cut a text after its first words, as many as its hash selects from `words` (inclusive). Raises BadRow D12."""
    if not isinstance(prompt, str):
        text = "the prompt is a conversation; data.truncate_prompt_words cuts only text"
        raise BadRow("D12", text, "remove truncate_prompt_words")
    min_words, max_words = words
    digest = blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    num_words = min_words + int.from_bytes(digest) % (max_words - min_words + 1)
    *_, last = islice(re.finditer(r"\S+", prompt), num_words)
    return prompt[: last.end()]


def split_key(prompt: PromptText) -> str:
    """Return the text that assigns a prompt to a side of a split: of a conversation its first user message."""
    if isinstance(prompt, str):
        return prompt.strip()
    for turn in prompt:
        if turn["role"] == "user":
            return str(turn["content"]).strip()
    return ""


def joined(prompt: PromptText) -> str:
    """Return a text as it is, and the messages of a conversation as one text."""
    return prompt if isinstance(prompt, str) else "\n".join(turn["content"] for turn in prompt)


def joined_with_roles(conversation: Conversation) -> str:
    """Return the messages of a conversation as one text, each behind its role."""
    return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in conversation)


def prompt_key(prompt: PromptText) -> bytes:
    """Return a hash that is equal for the same prompt as text and as messages."""
    return blake2b(joined(prompt).strip().encode("utf-8", "surrogatepass"), digest_size=12).digest()


def is_transcript(text: str) -> bool:
    """Return True if a text starts with a Human turn and contains an Assistant turn."""
    return text.lstrip().startswith("Human:") and "\n\nAssistant:" in text


def parse_transcript(text: str, column: str) -> Conversation:
    """Return the turns of a transcript as messages. Raises BadRow D12 if the text does not start with a turn."""
    before, *parts = TURN_START.split(text.strip())
    if before or not parts:
        raise BadRow("D12", f'"{column}" does not begin with "Human:"')
    turns = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": TRANSCRIPT_ROLES[name], "content": content.strip()} for name, content in turns]


def parse_transcript_prompt(text: str, column: str) -> Conversation:
    """Parse a transcript that ends where the assistant answers. Raises BadRow D12 if it has the answer."""
    turns = parse_transcript(text, column)
    if turns[-1]["role"] == "assistant" and turns.pop()["content"]:
        raise BadRow("D12", f'"{column}" ends with an assistant turn')
    return turns


def render_transcript(conversation: PromptText) -> str:
    """Render a conversation up to the assistant's next turn, whose text starts with a space. Return text unchanged."""
    if isinstance(conversation, str):
        return conversation
    rendered = ""
    for turn in conversation:
        if turn["role"] == "system":
            rendered += turn["content"]
        else:
            name = ROLE_NAMES.get(turn["role"], "Human")
            rendered += f"\n\n{name}: {turn['content']}"
    return f"{rendered}\n\nAssistant:"


def _assistant_turns(location: RowLocation, messages: Conversation, start: int, column: str) -> list[Example]:
    """Return one example per assistant turn from index `start`; the messages before the turn are its prompt."""
    answers = [index for index in _assistant_indices(messages) if index >= start]
    trained = [index for index in answers if _is_trained(messages[index], column)]
    if not trained:
        without = ", but for those that are not to be trained" if answers else ""
        raise BadRow("D09", f'"{column}" has no assistant message{without}')
    for index in trained:
        _require_prompt(messages[:index])
        _require_text(messages[index], column)

    examples = []
    for index in trained:
        completion = _answer(messages[index], column)
        examples.append(Example(location, messages[:index], {"completion": completion}))
    return examples


def _assistant_indices(messages: Conversation) -> list[int]:
    return [index for index, message in enumerate(messages) if message["role"] == "assistant"]


def _is_trained(message: Message, column: str) -> bool:
    """Return False for a message with weight: 0, train: false or training: false. Raises BadRow D06 for others."""
    marks = {name: message[name] for name in TRAINING_MARKS if message.get(name) is not None}
    for name, mark in marks.items():
        if mark not in (0, 1):
            raise BadRow("D06", f'{name} of a message of "{column}" is {mark!r:.40}; expected 0 or 1')
    return all(marks.values())


def _answer(message: Message, column: str) -> Answer:
    """Return the message's content, with its role, thought and tool calls if it has these. Raises BadRow D06."""
    beside = {key: message[key] for key in (*THOUGHT_KEYS, TOOL_CALLS) if message.get(key)}
    for key, thought in beside.items():
        if key != TOOL_CALLS and not isinstance(thought, str):
            raise BadRow("D06", f'{key} of a message of "{column}" is {thought!r:.40}; expected text')
    content: str = message["content"]
    return {"role": "assistant", "content": content, **beside} if beside else content


def _split_texts(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Split off the common prefix as prompt, cut after its last turn; white space goes to the responses."""
    common = chosen[: common_prefix_length(chosen, rejected)]
    shorter = min(len(chosen.rstrip()), len(rejected.rstrip()))
    end = _end_of_last_turn(common, shorter)
    prompt = common[:end].rstrip()
    return prompt, chosen.removeprefix(prompt), rejected.removeprefix(prompt)


def _end_of_last_turn(common: str, shorter: int) -> int:
    """Return where the answers begin: after the last header of a turn, or else line, or else sentence; 0 for none.

    A line or sentence that ends the shorter text is its answer.
    """
    headers = [match.end() for match in TURN_HEADER.finditer(common)]
    if headers:
        return headers[-1]
    for boundary in (LINE_END, SENTENCE_END):
        ends = [match.end() for match in boundary.finditer(common) if match.end() < shorter]
        if ends:
            return ends[-1]
    return 0


def _split_conversations(
    prompt_column: PromptText | None, chosen: Conversation, rejected: Conversation
) -> tuple[Conversation, Answer, Answer]:
    """Return (prompt, chosen, rejected): each side is the common prefix and one assistant message."""
    # A text prompt next to full conversations (UltraFeedback) only repeats their first message.
    if isinstance(prompt_column, list):
        prompt = prompt_column
    else:
        prompt = chosen[: min(common_prefix_length(chosen, rejected), len(chosen) - 1)]
    if not prompt and isinstance(prompt_column, str):
        raise BadRow("D12", '"prompt" is text, but "chosen" is a list of messages that does not begin with it')
    last_of_chosen = _last_turn(chosen, prompt, "chosen")
    last_of_rejected = _last_turn(rejected, prompt, "rejected")
    return prompt, _answer(last_of_chosen, "chosen"), _answer(last_of_rejected, "rejected")


def _last_turn(messages: Conversation, prompt: Conversation, column: str) -> Message:
    """Return the one assistant message of a side, which may begin with the prompt. Raises BadRow D12."""
    size = len(prompt)
    answers = messages[size:] if messages[:size] == prompt else messages
    if len(answers) != 1 or answers[0]["role"] != "assistant":
        roles = ", ".join(message["role"] for message in answers) or "nothing"
        raise BadRow("D12", f'"{column}" must be the prompt followed by one assistant message, not by {roles:.60}')
    return answers[0]


def _margin(row: Row) -> float | None:
    """Return the margin of a pair; None without one, which null and an empty cell mean, too."""
    margin = row.get("margin")
    if margin is None or margin == "":
        return None
    if isinstance(margin, str):  # a cell of a table
        with suppress(ValueError):
            margin = float(margin)
    is_bool = isinstance(margin, bool)
    if isinstance(margin, int | float) and not is_bool and abs(margin) <= sys.float_info.max:
        return float(margin)
    raise BadRow("D06", f'"margin" is {margin!r:.40}; expected a finite number')


def _require_messages(row: Row) -> Conversation:
    if not isinstance(row["messages"], list):
        raise BadRow("D06", '"messages" is text; expected a list of messages')
    return row["messages"]


def _require_prompt(prompt: PromptText) -> None:
    if not (prompt.strip() if isinstance(prompt, str) else prompt):
        raise BadRow("D08", "the prompt is empty")


def content_of(answer: Answer) -> str:
    """Return the text of an answer without its thought and tool calls."""
    return answer if isinstance(answer, str) else str(answer["content"])


def _require_text(answer: Any, column: str) -> None:
    text = answer["content"] if isinstance(answer, dict) else answer
    if not isinstance(text, str):
        raise BadRow("D06", f'"{column}" is a list of messages; expected text')
    calls_tools = isinstance(answer, dict) and bool(answer.get(TOOL_CALLS))
    if not text.strip() and not calls_tools:
        raise BadRow("D09", f'"{column}" is empty')
