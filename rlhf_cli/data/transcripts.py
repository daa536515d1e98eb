"""Dialogues written as one text, in the form of Anthropic's hh-rlhf: "\\n\\nHuman: ... \\n\\nAssistant: ..."."""

import re

from rlhf_cli.data.faults import BadRow
from rlhf_cli.data.tokens import Conversation

ROLES = {"Human": "user", "Assistant": "assistant"}
NAMES = {role: name for name, role in ROLES.items()}
TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")


def looks_like_one(text: str) -> bool:
    """Whether a text begins with a turn of Human and holds one of Assistant."""
    return text.lstrip().startswith("Human:") and "\n\nAssistant:" in text


def parse(text: str, column: str) -> Conversation:
    """The turns as messages, in the order and number that they have.

    Raises BadRow D12 for a text that does not begin with a turn.
    """
    before, *parts = TURN.split(text.strip())
    if before or not parts:
        raise BadRow("D12", f'"{column}" does not begin with "Human:"')
    return [{"role": ROLES[name], "content": said.strip()} for name, said in zip(parts[::2], parts[1::2], strict=True)]


def parse_prompt(text: str, column: str) -> Conversation:
    """`parse` of a text that asks for an answer: the empty turn of Assistant at its end is left away.

    Raises BadRow D12 where the assistant has begun to answer.
    """
    turns = parse(text, column)
    if turns[-1]["role"] == "assistant":
        if turns[-1]["content"]:
            raise BadRow("D12", f'"{column}" ends with an assistant turn')
        turns.pop()
    return turns


def render(conversation: str | Conversation) -> str:
    """The text that asks for the assistant's next turn; the answer to it starts with a space. A text stays."""
    if isinstance(conversation, str):
        return conversation
    said = [f"\n\n{NAMES.get(turn['role'], 'Human')}: {turn['content']}" for turn in conversation]
    return "".join(said) + "\n\nAssistant:"
