"""Rows of ShareGPT and Alpaca as conversations and pairs: {messages} or {prompt, chosen, rejected}."""

from collections.abc import Iterator
from typing import Any

from rlhf_cli.data.readers import BadRow, describe_value
from rlhf_cli.data.texts import Form, is_transcript

ROLE_ALIASES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "model"), "assistant"),
    "system": "system",
}
TURN_COLUMNS = ("conversations", "conversation", "messages")
MESSAGES_FORM: Form = ("messages",)
PAIR_FORM: Form = ("prompt", "chosen", "rejected")
Row = dict[str, Any]


def must_convert(row: Row, own: Form | None) -> bool:
    """Return True for a row of ShareGPT or Alpaca, if `own`, the form that its columns have, is not complete."""
    if "prompt" in row or (target := target_form(row)) is None:
        return False
    return own is None or (own == MESSAGES_FORM and bool(_turns(row))) or (target == PAIR_FORM and "prompt" not in own)


def target_form(row: Row) -> Form | None:
    """Return the columns of the row that `convert_row` would return, or None for an unknown format."""
    has_pair = all(isinstance(row.get(name), str) or _is_turn(row.get(name)) for name in ("chosen", "rejected"))
    if has_pair and _is_full_dialogue(row):
        return None  # full dialogues need no separate prompt
    if not _turns(row) and not (isinstance(row.get("instruction"), str) and (has_pair or "output" in row)):
        return None
    return PAIR_FORM if has_pair else MESSAGES_FORM


def convert_row(row: Row) -> Row:
    """Convert a row. Raises BadRow D12 (unknown format), D06 (not text)."""
    columns = target_form(row)
    if columns is None:
        raise BadRow("D12", f"columns {', '.join(row)} match neither ShareGPT nor Alpaca")
    turns = _turns(row)
    messages = list(map(_message, turns) if turns else _alpaca_messages(row))
    if row.get("system"):
        messages.insert(0, {"role": "system", "content": _text(row["system"], "system")})
    if columns == PAIR_FORM:
        chosen, rejected = (_answer(row[name], name) for name in ("chosen", "rejected"))
        pair = {"prompt": messages, "chosen": [chosen], "rejected": [rejected]}
        return pair | ({"margin": row["margin"]} if "margin" in row else {})
    return {"messages": messages if turns else [*messages, _answer(row["output"], "output")]}


def _is_full_dialogue(row: Row) -> bool:
    """Return True if the answers are full dialogues: transcripts, or texts whose common prefix has the question."""
    chosen, rejected = row["chosen"], row["rejected"]
    if not (isinstance(chosen, str) and isinstance(rejected, str)):
        return False
    users = [turn for turn in _turns(row) if _is_turn(turn) and ROLE_ALIASES.get(str(turn["from"])) != "assistant"]
    question = str((users[-1]["value"] if users else row.get("instruction") or row.get("input")) or "").strip()
    in_prefix = question in chosen and rejected.startswith(chosen[: chosen.index(question) + len(question)])
    return in_prefix or (is_transcript(chosen) and is_transcript(rejected))


def _alpaca_messages(row: Row) -> Iterator[Row]:
    history = row.get("history") or []
    if not (isinstance(history, list) and all(isinstance(turn, list) and len(turn) == 2 for turn in history)):
        raise BadRow("D12", f'"history" is not a list of [question, answer]: `{history!r:.60}`')
    for question, answer in history:
        yield from ({"role": "user", "content": _text(question, "history")}, _answer(answer, "history"))
    parts = [_text(row[name], name) for name in ("instruction", "input") if row.get(name) is not None]
    yield {"role": "user", "content": "\n\n".join(filter(None, parts))}


def _turns(row: Row) -> list[Any]:
    """Return the list in the first column that has a ShareGPT turn, or []."""
    lists = (row[name] for name in TURN_COLUMNS if isinstance(row.get(name), list))
    return next((turns for turns in lists if any(map(_is_turn, turns))), [])


def _is_turn(value: Any) -> bool:
    return isinstance(value, dict) and {"from", "value"} <= value.keys()


def _text(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise BadRow("D06", f'"{column}" is {describe_value(value)}; expected text')
    return value


def _message(turn: Any) -> Row:
    if not _is_turn(turn) or str(turn["from"]) not in ROLE_ALIASES:
        raise BadRow("D12", f"`{turn!r:.60}` is not a turn of {', '.join(ROLE_ALIASES)}")
    return {"role": ROLE_ALIASES[turn["from"]], "content": _text(turn["value"], "value")}


def _answer(value: Any, column: str) -> Row:
    return _message(value) if _is_turn(value) else {"role": "assistant", "content": _text(value, column)}
