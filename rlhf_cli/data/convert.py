"""Convert rows of ShareGPT and Alpaca to rlhf's columns.

`python -m rlhf_cli.data.convert DATA OUT.jsonl`: DATA is a file, a folder or a hub id, as in a data key. OUT is a new
file.
"""

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlhf_cli import jsonl, terminal
from rlhf_cli.config.paths import resolve_data
from rlhf_cli.config.sources import DataSource
from rlhf_cli.data.readers import BadRow, describe_value
from rlhf_cli.data.sources import read_rows
from rlhf_cli.data.texts import is_transcript
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.files import write_text

ROLE_ALIASES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "model"), "assistant"),
    "system": "system",
}
TURN_COLUMNS = ("conversations", "conversation", "messages")
PAIR_FORM = ("prompt", "chosen", "rejected")
Row = dict[str, Any]


def main(arguments: Sequence[str]) -> int:
    """Convert the data named by `arguments`; return the exit code."""
    if len(arguments) != 2:
        terminal.say(str(__doc__))
        return 2
    try:
        _convert_source(arguments[0], Path(arguments[1]))
    except RLHFError as problem:
        terminal.say(str(problem))
        return problem.exit_code
    return 0


def _convert_source(name: str, out: Path) -> None:
    if os.path.lexists(out):
        raise RLHFError("C15", f"{shown(out)} exists; nothing is overwritten", hint="use another file name")
    if not out.parent.is_dir():
        raise RLHFError("E03", f"{shown(out)} cannot be written: {shown(out.parent)} is not a folder")
    source = DataSource(resolve_data(name, os.getcwd()))
    rows, dropped = _converted_rows(source)
    if not rows:
        raise RLHFError("D05", f"no usable row{dropped}", where=source.shown())
    try:
        write_text(out, "".join(jsonl.to_json(row) + "\n" for row in rows))
    except OSError as error:
        raise RLHFError("E03", f"{shown(out)} cannot be written: {error.strerror}") from error
    terminal.say(f"{shown(out)}: {len(rows)} rows{dropped}")


def _converted_rows(source: DataSource) -> tuple[list[Row], str]:
    """Return the converted rows and a message about dropped ones; with answers, bare prompts are dropped."""
    answered, prompts = [], []
    for location, row in read_rows(source):
        try:
            converted = convert_row(row)
        except BadRow as bad:
            raise RLHFError(bad.code, bad.text, where=str(location)) from bad
        if any(turn["role"] == "assistant" for turn in converted.get("messages", ())) or "chosen" in converted:
            answered.append(converted)
        else:
            prompts.append(converted)
    dropped = ""
    if prompts:
        dropped = f"; {len(prompts)} without an answer dropped" if answered else " without an answer: prompts for ppo"
    return answered or prompts, dropped


def convert_command(source: DataSource) -> str:
    """Return the shell command that converts a source."""
    name = source.shown()
    out = f"{Path(name).name.partition('[')[0].partition('.')[0]}-converted.jsonl"
    return shlex.join(["python", "-m", "rlhf_cli.data.convert", name, out])


def target_form(row: Row) -> tuple[str, ...] | None:
    """Return the columns of the row that `convert_row` would return, or None for an unknown format."""
    has_pair = all(_is_text(row.get(name)) or _is_turn(row.get(name)) for name in ("chosen", "rejected"))
    if has_pair and _is_full_dialogue(row):
        return None  # full dialogues need no separate prompt
    if not _turns(row) and not (_is_text(row.get("instruction")) and (has_pair or "output" in row)):
        return None
    return PAIR_FORM if has_pair else ("messages",)


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
        return {"prompt": messages, "chosen": [chosen], "rejected": [rejected]}
    return {"messages": messages if turns else [*messages, _answer(row["output"], "output")]}


def _is_full_dialogue(row: Row) -> bool:
    """Return True if the answers are full dialogues: transcripts, or texts whose common prefix has the question."""
    chosen, rejected = row["chosen"], row["rejected"]
    if not (_is_text(chosen) and _is_text(rejected)):
        return False
    users = [turn for turn in _turns(row) if _is_turn(turn) and ROLE_ALIASES.get(str(turn["from"])) != "assistant"]
    last = users[-1]["value"] if users else row.get("instruction") or row.get("input")
    question = str(last or "").strip()
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


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
