"""The commands within a chat, such as /temp and /save."""

import math
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_cli import terminal
from rlhf_cli.commands.chat.session import ChatSession, export_rows
from rlhf_cli.errors import RLHFError, closest_match, shown
from rlhf_cli.jsonl import write_jsonl

QUOTES = '"""'  # around a prompt of several lines
# Sampling parameters that a command sets: field, type, minimum and maximum.
PARAMETERS: dict[str, tuple[str, type[int] | type[float], float, float]] = {
    "temp": ("temperature", float, 0, math.inf),
    "max": ("max_new_tokens", int, 1, math.inf),
    "seed": ("seed", int, 0, 2**32 - 1),
}


class Command(NamedTuple):
    """A slash command. `function` None ends the chat."""

    argument: str  # its placeholder in /help; empty if the command has none
    description: str
    function: Callable[[ChatSession, str], None] | None
    needs_turn: bool = False  # of the conversation


def run_command(session: ChatSession, line: str) -> bool:
    """Run a command line; return False if it ends the chat.

    Raises RLHFError C07 for an unknown command, C11 for an unexpected argument or an empty conversation, and the errors
    of the command.
    """
    name, _, rest = line[1:].strip().partition(" ")
    if name not in COMMANDS:
        names = ", ".join(f"/{command}" for command in COMMANDS)
        near = closest_match(name, COMMANDS)
        hint = f"did you mean /{near}?" if near else "to send a prompt that starts with /, type //"
        raise RLHFError("C07", f"/{name}: not one of {names}", hint=hint)
    command = COMMANDS[name]
    if command.function is None:
        return False
    if rest and not command.argument:
        raise RLHFError("C11", f"/{name} takes no argument: {rest}")
    if command.needs_turn and not session.turns:
        raise RLHFError("C11", f"/{name}: the conversation is empty")
    command.function(session, rest.strip())
    return True


def _help(session: ChatSession, text: str) -> None:
    lines = {f"/{name} {command.argument}": command.description for name, command in COMMANDS.items()}
    lines[f"{QUOTES}TEXT{QUOTES}"] = "a prompt of several lines"
    for usage, description in lines.items():
        terminal.say(f"{usage:<14}{description}")


def _system(session: ChatSession, text: str) -> None:
    if not session.prompt_format.supports_system_prompt:
        is_template = session.prompt_format.kind == "template"
        reason = "the chat template takes none" if is_template else "there is no chat template to take it"
        raise RLHFError("C11", f"/system: {reason}")
    session.system = text or None
    terminal.say("system prompt: " + (text or "none"))


def _set_parameter(name: str, session: ChatSession, text: str) -> None:
    """Set a sampling parameter, if there is a text; show all. Raises RLHFError C06 for an invalid number."""
    if text:
        field = PARAMETERS[name][0]
        changes: dict[str, Any] = {field: _parse_parameter(name, text)}
        if name == "seed":
            changes["reply_index"] = 0
        session.sampling = replace(session.sampling, **changes)
    terminal.say(str(session.sampling))


def _parse_parameter(name: str, text: str) -> float:
    """Return the number in the text. Raises RLHFError C06 if the parameter cannot have it."""
    _, kind, minimum, maximum = PARAMETERS[name]
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if minimum <= value <= maximum and not math.isinf(value):
        return value
    noun = "a whole number" if kind is int else "a number"
    bounds = f"from {minimum} up" if math.isinf(maximum) else f"from {minimum} to {maximum}"
    raise RLHFError("C06", f"/{name} {text}: {noun} {bounds} is needed")


def _undo(session: ChatSession, text: str) -> None:
    terminal.say(f"removed: {' '.join(session.turns.pop().prompt.split())}")


def _clear(session: ChatSession, text: str) -> None:
    session.turns = []
    terminal.say("a new conversation")


def _save(session: ChatSession, text: str) -> None:
    if not text:
        raise RLHFError("C11", "/save needs the name of a file, e.g. /save chat.jsonl")
    path = Path(os.path.expanduser(text))
    rows = list(export_rows(session))
    if os.path.lexists(path):
        raise RLHFError("C15", f"{shown(path)} exists already and is not overwritten")
    try:
        write_jsonl(path, rows)
    except (OSError, ValueError) as error:  # ValueError: not a valid file name
        with suppress(OSError, ValueError):
            path.unlink()
        reason = getattr(error, "strerror", error)
        raise RLHFError("E03", f"{shown(path)} cannot be written: {reason}") from error
    count = "1 row" if len(rows) == 1 else f"{len(rows)} rows"
    terminal.say(f"saved: {shown(path)}, {count}")


COMMANDS: dict[str, Command] = {
    "help": Command("", "this list", _help),
    "system": Command("TEXT", "set the system prompt of the whole conversation; without TEXT: remove it", _system),
    "temp": Command(
        "X", "set the sampling temperature; 0: always the most likely token", partial(_set_parameter, "temp")
    ),
    "max": Command("N", "set the maximum number of tokens of a reply", partial(_set_parameter, "max")),
    "seed": Command("N", "set the sampling seed", partial(_set_parameter, "seed")),
    "retry": Command("", "replace the last reply with another one", lambda session, _: session.retry(), True),
    "undo": Command("", "remove the last prompt and its reply", _undo, True),
    "clear": Command("", "start a new conversation; keep the system prompt", _clear),
    "save": Command(
        "FILE", "save the conversation since the last /clear as JSON Lines, with rewards and KL", _save, True
    ),
    "quit": Command("", "end the chat", None),
}
