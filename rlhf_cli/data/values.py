"""Kinds of values in a column: texts, and lists of messages."""

from typing import Any

from rlhf_cli.data.readers import BadRow, describe_value

TEXT = "text"
CONVERSATION = "a conversation"


def kind_of(value: Any, column: str) -> str:
    """Return TEXT or CONVERSATION. Raises BadRow D06 for another value."""
    if isinstance(value, str):
        return TEXT
    if isinstance(value, list):
        return CONVERSATION
    raise BadRow("D06", f'"{column}" is {describe_value(value)}; expected text or a list of messages')


def require_messages(messages: list[Any], column: str) -> None:
    """Raise BadRow D12 for a list of texts, as in the columns of `Dataset.to_dict()`, D06 for another one."""
    if messages and all(isinstance(each, str) for each in messages):
        text = f'"{column}" is a list of texts, not of messages; a row may hold one text of each column'
        hint = 'write each row as a separate object: dataset.to_json("rows.jsonl")'
        raise BadRow("D12", text, hint)

    fault = conversation_fault(messages, column)
    if fault:
        raise BadRow("D06", fault)


def conversation_fault(messages: list[Any], column: str) -> str | None:
    """Describe the first message that is not {role: text, content: text}."""
    for number, message in enumerate(messages, start=1):
        place = f'message {number} of "{column}"'
        if not isinstance(message, dict):
            return f"{place} is {describe_value(message)}, not {{role, content}}"
        for key in ("role", "content"):
            value = message.get(key)
            if isinstance(value, str):
                continue
            found = describe_value(value) if key in message else "missing"
            return f"{key} of {place} is {found}; expected text"
    return None
