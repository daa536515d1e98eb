"""Parse and convert row formats of other projects: hh-rlhf transcripts, ShareGPT, Alpaca, answers with scores.

A transcript is a dialogue in one text: "\\n\\nHuman: ...\\n\\nAssistant: ...".
"""

import math
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_cli.config.sources import DataSource
from rlhf_cli.data.readers import BadRow, describe_value
from rlhf_cli.data.tokens import Conversation

TRANSCRIPT_ROLES = {"Human": "user", "Assistant": "assistant"}
ROLE_NAMES = {role: name for name, role in TRANSCRIPT_ROLES.items()}
TURN_START = re.compile(r"(?:^|\n\n)(Human|Assistant):")


def is_transcript(text: str) -> bool:
    """Return True if a text starts with a Human turn and contains an Assistant turn."""
    return text.lstrip().startswith("Human:") and "\n\nAssistant:" in text


def parse_transcript(text: str, column: str) -> Conversation:
    """Return the turns of a transcript as messages.

    Raises BadRow D12 if the text does not start with a turn.
    """
    before, *parts = TURN_START.split(text.strip())
    if before or not parts:
        raise BadRow("D12", f'"{column}" does not begin with "Human:"')
    return [
        {"role": TRANSCRIPT_ROLES[name], "content": content.strip()}
        for name, content in zip(parts[::2], parts[1::2], strict=True)
    ]


def parse_transcript_prompt(text: str, column: str) -> Conversation:
    """Parse a transcript that ends where the assistant answers; an empty last Assistant turn is removed.

    Raises BadRow D12 if the last Assistant turn is not empty.
    """
    turns = parse_transcript(text, column)
    if turns[-1]["role"] == "assistant":
        if turns[-1]["content"]:
            raise BadRow("D12", f'"{column}" ends with an assistant turn')
        turns.pop()
    return turns


def render_transcript(conversation: str | Conversation) -> str:
    """Render a conversation up to the assistant's next turn, whose text starts with a space. Return text unchanged."""
    if isinstance(conversation, str):
        return conversation
    turns = [f"\n\n{ROLE_NAMES.get(turn['role'], 'Human')}: {turn['content']}" for turn in conversation]
    return "".join(turns) + "\n\nAssistant:"


ROLE_ALIASES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "model"), "assistant"),
    "system": "system",
}
TURN_COLUMNS = ("conversations", "conversation", "messages")
ANSWER_COLUMNS, SCORE_COLUMNS = ("responses", "completions", "answers"), ("scores", "ratings", "rewards")
PAIR_FORM = ("prompt", "chosen", "rejected")
Row = dict[str, Any]


def target_form(row: Row) -> tuple[str, ...] | None:
    """Return the columns of the row that `convert_row` would return, or None for an unknown format."""
    has_pair = all(_is_text(row.get(name)) or _is_turn(row.get(name)) for name in ("chosen", "rejected"))
    if has_pair and _is_full_dialogue(row):
        return None  # full dialogues need no separate prompt
    if _column(row, TURN_COLUMNS, _is_turn):
        return PAIR_FORM if has_pair else ("messages",)
    if _is_text(row.get("instruction")):
        return PAIR_FORM if has_pair else ("messages",) if "output" in row else None
    scored = (
        _is_text(row.get("prompt"))
        and _column(row, ANSWER_COLUMNS, _is_text)
        and _column(row, SCORE_COLUMNS, _is_number)
    )
    return PAIR_FORM if scored else None


def convert_row(row: Row) -> Row | None:
    """Convert a row to rlhf's columns; return None if all its answers have the same score.

    The best and the worst of several scored answers become the pair. Raises BadRow D12 for an unknown format, D06 for
    a value that is not text.
    """
    columns = target_form(row)
    if columns is None:
        raise BadRow("D12", f"columns {', '.join(row)} match neither ShareGPT, Alpaca nor answers with scores")
    if turns := _column(row, TURN_COLUMNS, _is_turn):
        messages = [_message(turn) for turn in row[turns]]
    elif _is_text(row.get("instruction")):
        messages = list(_alpaca_messages(row))
    else:
        return _best_worst_pair(row)
    if row.get("system"):
        messages.insert(0, {"role": "system", "content": _text(row["system"], "system")})
    if columns == PAIR_FORM:
        chosen, rejected = (_answer(row[name], name) for name in ("chosen", "rejected"))
        return {"prompt": messages, "chosen": [chosen], "rejected": [rejected]}
    return {"messages": messages if turns else [*messages, _answer(row["output"], "output")]}


def _is_full_dialogue(row: Row) -> bool:
    """Return True if the answers are full dialogues: transcripts, or texts whose common prefix has the question."""
    chosen, rejected = row["chosen"], row["rejected"]
    if not (_is_text(chosen) and _is_text(rejected)):
        return False
    turns = row.get(_column(row, TURN_COLUMNS, _is_turn), [])
    questions = [
        turn["value"] for turn in turns if _is_turn(turn) and ROLE_ALIASES.get(str(turn["from"])) != "assistant"
    ]
    last = questions[-1] if questions else row.get("instruction") or row.get("input")
    question = str(last or "").strip()
    in_prefix = question in chosen and rejected.startswith(chosen[: chosen.index(question) + len(question)])
    return in_prefix or (is_transcript(chosen) and is_transcript(rejected))


def _alpaca_messages(row: Row) -> Iterator[Row]:
    """Yield the user and assistant messages of an Alpaca row, without its output."""
    history = row.get("history") or []
    if not (isinstance(history, list) and all(isinstance(turn, list) and len(turn) == 2 for turn in history)):
        raise BadRow("D12", f'"history" is not a list of [question, answer]: `{history!r:.60}`')
    for question, answer in history:
        yield from ({"role": "user", "content": _text(question, "history")}, _answer(answer, "history"))
    texts = [_text(row[name], name) for name in ("instruction", "input") if row.get(name) is not None]
    yield {"role": "user", "content": "\n\n".join(filter(None, texts))}


def _best_worst_pair(row: Row) -> Row | None:
    """Return the pair of best and worst answer, or None if the scores are equal. Raises BadRow D06, D12."""
    answers, scores = row[_column(row, ANSWER_COLUMNS, _is_text)], row[name := _column(row, SCORE_COLUMNS, _is_number)]
    if len(answers) != len(scores):
        raise BadRow("D12", f"{len(answers)} answers, {len(scores)} scores")
    if invalid := [score for score in scores if not (_is_number(score) and math.isfinite(score))]:
        raise BadRow("D06", f'"{name}" holds {describe_value(invalid[0])}; expected finite numbers')
    best, worst = scores.index(max(scores)), scores.index(min(scores))
    if scores[best] == scores[worst]:
        return None
    chosen, rejected = (_text(answers[index], _column(row, ANSWER_COLUMNS, _is_text)) for index in (best, worst))
    return {"prompt": row["prompt"], "chosen": chosen, "rejected": rejected}


def _column(row: Row, names: tuple[str, ...], is_item: Any) -> str:
    """Return the first of the columns that is a list with such an item, or an empty string."""
    return next((name for name in names if isinstance(row.get(name), list) and any(map(is_item, row[name]))), "")


def _is_turn(value: Any) -> bool:
    return isinstance(value, dict) and {"from", "value"} <= value.keys()


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


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


def convert_command(source: DataSource) -> str:
    """Return the shell command that converts a source."""
    name = source.shown()
    out = f"{Path(name).name.partition('[')[0].partition('.')[0]}-converted.jsonl"
    return shlex.join(["python", "-m", "rlhf_cli.data.convert", name, out])
