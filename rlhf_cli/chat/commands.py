"""What a line that begins with / does. To add a command, write a function and a line of COMMANDS."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from rlhf_cli import terminal
from rlhf_cli.chat import saved
from rlhf_cli.chat.lines import BLOCK
from rlhf_cli.chat.talk import Talk
from rlhf_cli.errors import RLHFError, nearest, shown
from rlhf_cli.rows import write_jsonl

Number = TypeVar("Number", int, float)
SEEDS = 2**32


@dataclass(frozen=True)
class Command:
    """A command: what stands behind its name, what it does in words, and the function. One without ends the chat."""

    takes: str
    does: str
    run: Callable[[Talk, str], None] | None


def is_command(line: str) -> bool:
    """Whether a line is a command; of one that begins with // the second / begins a prompt."""
    return line.startswith("/") and not line.startswith("//")


def obey(talk: Talk, line: str) -> bool:
    """Do what a command says; whether the chat goes on. Raises RLHFError C07 for an unknown one, and what it raises."""
    name, _, rest = line[1:].strip().partition(" ")
    if name not in COMMANDS:
        near, known = nearest(name, COMMANDS), ", ".join(f"/{each}" for each in COMMANDS)
        hint = f"did you mean /{near}?" if near else "a prompt that begins with / is written with two: //"
        raise RLHFError("C07", f"/{name}: not one of {known}", hint=hint)
    command = COMMANDS[name]
    if command.run is None:
        return False
    if rest and not command.takes:
        raise RLHFError("C11", f"/{name} takes nothing behind it, and there is: {rest}")
    command.run(talk, rest.strip())
    return True


def number(kind: type[Number], name: str, text: str, least: Number, most: Number | None = None) -> Number:
    """The number in a text, `least` to `most`. Raises RLHFError C06 for anything else."""
    try:
        found = kind(text)
    except ValueError:
        found = kind(least - 1)
    if not least <= found < math.inf or (most is not None and found > most):
        what = "a whole number" if kind is int else "a number"
        bounds = f"from {least:g} up" if most is None else f"from {least} to {most}"
        raise RLHFError("C06", f"{name} {text}: {what} {bounds} is needed")
    return found


def _help(talk: Talk, text: str) -> None:
    lines = {f"/{name} {command.takes}": command.does for name, command in COMMANDS.items()}
    lines[f"{BLOCK}TEXT{BLOCK}"] = "a prompt of several lines"
    for begins, does in lines.items():
        terminal.say(f"{begins:<14}{does}")


def _system(talk: Talk, text: str) -> None:
    if not talk.form.takes_system:
        why = "the chat template takes none" if talk.form.kind == "template" else "there is no chat template to take it"
        raise RLHFError("C11", f"/system: {why}")
    talk.system = text or None
    terminal.say("system prompt: " + (text or "none"))


def _temp(talk: Talk, text: str) -> None:
    if text:
        talk.how = replace(talk.how, temperature=number(float, "/temp", text, 0.0))
    terminal.say(f"temperature {talk.how.temperature:g}" + ("" if talk.how.temperature else ": the most likely tokens"))


def _max(talk: Talk, text: str) -> None:
    if text:
        talk.how = replace(talk.how, max_new_tokens=number(int, "/max", text, 1))
    terminal.say(f"at most {talk.how.max_new_tokens} tokens")


def _seed(talk: Talk, text: str) -> None:
    if text:
        talk.how = replace(talk.how, seed=number(int, "/seed", text, 0, SEEDS - 1), draws=0)
    terminal.say(f"seed {talk.how.seed}, {talk.how.draws} replies drawn")


def _retry(talk: Talk, text: str) -> None:
    _need_turn(talk, "/retry")
    talk.retry()


def _undo(talk: Talk, text: str) -> None:
    _need_turn(talk, "/undo")
    terminal.say(f"taken back: {' '.join(talk.turns.pop().said.split())}")


def _clear(talk: Talk, text: str) -> None:
    talk.turns = []
    terminal.say("a new conversation")


def _save(talk: Talk, text: str) -> None:
    _need_turn(talk, "/save")
    if not text:
        raise RLHFError("C11", "/save needs the name of a file, e.g. /save chat.jsonl")
    path, rows = Path(os.path.expanduser(text)), list(saved.rows(talk))
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        raise RLHFError("C15", f"{shown(path)} is there already; nothing is overwritten") from None
    except (OSError, ValueError) as error:  # the latter for what cannot be a name
        reason = getattr(error, "strerror", error)
        raise RLHFError("E03", f"{shown(path)} cannot be written: {reason}") from error
    try:
        write_jsonl(path, rows)
    except OSError as error:
        path.unlink()
        raise RLHFError("E03", f"{shown(path)} cannot be written: {error.strerror}") from error
    terminal.say(f"saved: {shown(path)}, {len(rows)} row{'s' * (len(rows) != 1)}")


def _need_turn(talk: Talk, name: str) -> None:
    if not talk.turns:
        raise RLHFError("C11", f"{name}: nothing was said yet")


COMMANDS: dict[str, Command] = {
    "help": Command("", "this list", _help),
    "system": Command("TEXT", "the system prompt, in force from the conversation's start; none without TEXT", _system),
    "temp": Command("X", "the sampling temperature; 0: always the most likely token", _temp),
    "max": Command("N", "the most tokens of a reply", _max),
    "seed": Command("N", "the seed of the draws", _seed),
    "retry": Command("", "another reply to the last prompt, in place of the one there", _retry),
    "undo": Command("", "take the last prompt and its reply back", _undo),
    "clear": Command("", "begin a new conversation; the system prompt stays", _clear),
    "save": Command("FILE", "write what was said since the last /clear, with its numbers, as JSON Lines", _save),
    "quit": Command("", "end the chat", None),
}
