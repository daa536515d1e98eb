"""Dialogues written as one text, in the form of Anthropic's hh-rlhf: "\\n\\nHuman: ... \\n\\nAssistant: ..."."""

import math
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_cli.config.sources import DataSource
from rlhf_cli.data.bad_row import BadRow, described
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


OTHER_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "model"), "assistant"),
    "system": "system",
}
TURNS = ("conversations", "conversation", "messages")
ANSWERS, SCORES = ("responses", "completions", "answers"), ("scores", "ratings", "rewards")
PAIR = ("prompt", "chosen", "rejected")
Row = dict[str, Any]


def form(row: Row) -> tuple[str, ...] | None:
    """The columns of ours that `converted` makes of such a row; None where the row is of none of the forms."""
    paired = all(_is_text(row.get(name)) or _is_turn(row.get(name)) for name in ("chosen", "rejected"))
    if paired and _is_whole(row):
        return None  # dialogues need no prompt beside them
    if _column(row, TURNS, _is_turn):
        return PAIR if paired else ("messages",)
    if _is_text(row.get("instruction")):
        return PAIR if paired else ("messages",) if "output" in row else None
    rated = _is_text(row.get("prompt")) and _column(row, ANSWERS, _is_text) and _column(row, SCORES, _is_number)
    return PAIR if rated else None


def converted(row: Row) -> Row | None:
    """A row of one of the forms in ours; None where all its answers have the same score.

    Of several answers with scores the best and the worst make the pair. Raises BadRow D12 for what fits no form, D06
    for a value that is not text.
    """
    found = form(row)
    if found is None:
        raise BadRow("D12", f"columns {', '.join(row)} match neither ShareGPT, Alpaca nor answers with scores")
    if turns := _column(row, TURNS, _is_turn):
        messages = [_message(turn) for turn in row[turns]]
    elif _is_text(row.get("instruction")):
        messages = list(_instructed(row))
    else:
        return _rated(row)
    if row.get("system"):
        messages.insert(0, {"role": "system", "content": _text(row["system"], "system")})
    if found == PAIR:
        chosen, rejected = (_answer(row[name], name) for name in ("chosen", "rejected"))
        return {"prompt": messages, "chosen": [chosen], "rejected": [rejected]}
    return {"messages": messages if turns else [*messages, _answer(row["output"], "output")]}


def _is_whole(row: Row) -> bool:
    """Whether the answers are whole dialogues: transcripts, or texts whose common beginning holds the question."""
    chosen, rejected = row["chosen"], row["rejected"]
    if not (_is_text(chosen) and _is_text(rejected)):
        return False
    turns = row.get(_column(row, TURNS, _is_turn), [])
    asked = [turn["value"] for turn in turns if _is_turn(turn) and OTHER_ROLES.get(str(turn["from"])) != "assistant"]
    last = asked[-1] if asked else row.get("instruction") or row.get("input")
    question = str(last or "").strip()
    shared = question in chosen and rejected.startswith(chosen[: chosen.index(question) + len(question)])
    return shared or (looks_like_one(chosen) and looks_like_one(rejected))


def _instructed(row: Row) -> Iterator[Row]:
    history = row.get("history") or []
    if not (isinstance(history, list) and all(isinstance(turn, list) and len(turn) == 2 for turn in history)):
        raise BadRow("D12", f'"history" is not a list of [question, answer]: `{history!r:.60}`')
    for asked, answered in history:
        yield from ({"role": "user", "content": _text(asked, "history")}, _answer(answered, "history"))
    texts = [_text(row[name], name) for name in ("instruction", "input") if row.get(name) is not None]
    yield {"role": "user", "content": "\n\n".join(filter(None, texts))}


def _rated(row: Row) -> Row | None:
    answers, scores = row[_column(row, ANSWERS, _is_text)], row[name := _column(row, SCORES, _is_number)]
    if len(answers) != len(scores):
        raise BadRow("D12", f"{len(answers)} answers, {len(scores)} scores")
    if odd := [score for score in scores if not (_is_number(score) and math.isfinite(score))]:
        raise BadRow("D06", f'"{name}" holds {described(odd[0])}; expected finite numbers')
    best, worst = scores.index(max(scores)), scores.index(min(scores))
    if scores[best] == scores[worst]:
        return None
    chosen, rejected = (_text(answers[at], _column(row, ANSWERS, _is_text)) for at in (best, worst))
    return {"prompt": row["prompt"], "chosen": chosen, "rejected": rejected}


def _column(row: Row, names: tuple[str, ...], like: Any) -> str:
    """The first of the columns that holds a list of such things; empty where there is none."""
    return next((name for name in names if isinstance(row.get(name), list) and any(map(like, row[name]))), "")


def _is_turn(value: Any) -> bool:
    return isinstance(value, dict) and {"from", "value"} <= value.keys()


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _text(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise BadRow("D06", f'"{column}" is {described(value)}; expected text')
    return value


def _message(turn: Any) -> Row:
    if not _is_turn(turn) or str(turn["from"]) not in OTHER_ROLES:
        raise BadRow("D12", f"`{turn!r:.60}` is not a turn of {', '.join(OTHER_ROLES)}")
    return {"role": OTHER_ROLES[turn["from"]], "content": _text(turn["value"], "value")}


def _answer(value: Any, column: str) -> Row:
    return _message(value) if _is_turn(value) else {"role": "assistant", "content": _text(value, column)}


def command(source: DataSource) -> str:
    """The command that converts a source."""
    name = source.shown()
    out = f"{Path(name).name.partition('[')[0].partition('.')[0]}-converted.jsonl"
    return shlex.join(["python", "-m", "rlhf_cli.data.convert", name, out])
