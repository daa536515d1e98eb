"""`rlhf chat RUN`: chat with a run's model; each reply is shown with its rewards and its KL from the SFT model.

RUN is not modified or locked: a stage may run at the same time.
"""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_cli import terminal
from rlhf_cli.commands.chat.models import ChatModels, display_name, load_models, resolve_models
from rlhf_cli.commands.chat.session import ChatSession, ConversationFormat, SamplingParams, export_rows
from rlhf_cli.config.base import Options
from rlhf_cli.errors import RLHFError, closest_match, shown
from rlhf_cli.jsonl import decode, write_jsonl
from rlhf_cli.rewards.function import no_bytecode_files
from rlhf_cli.runs.resolve import LAST
from rlhf_cli.stages.common import prompt_forms

QUOTES = '"""'
PROMPT_STYLES = {
    "text": "prompts: plain text, each without the earlier turns",
    "template": "prompts: the chat template, with the earlier turns",
    "transcript": "prompts: transcripts (Human:, Assistant:), with the earlier turns",
}
# Sampling parameters that a command sets: field, type, minimum and maximum.
PARAMETERS: dict[str, tuple[str, type[int] | type[float], float, float]] = {
    "temp": ("temperature", float, 0, math.inf),
    "max": ("max_new_tokens", int, 1, math.inf),
    "seed": ("seed", int, 0, 2**32 - 1),
}


@dataclass(frozen=True)
class ChatOptions:
    """Options of the command line; None: as in the run's config."""

    stage: str | None = None
    step: str = LAST
    compare: str | None = None
    temperature: float | None = None
    max_new_tokens: int | None = None
    seed: int = 0


def run(folder: Path, chat_options: ChatOptions, options: Options) -> None:
    """Chat until the input ends, /quit, or a second Ctrl-C.

    Off a terminal each line of stdin is a prompt or a command, replies go to stdout, everything else to stderr, and the
    first error ends the chat. Raises RLHFError as `resolve_models` and `load_models` do, and off a terminal D04 and the
    errors of `ChatSession.send` and of the commands.
    """
    with no_bytecode_files():
        chat_models = resolve_models(folder, chat_options.stage, chat_options.step, chat_options.compare)
        session = open_session(chat_models, chat_options, options)
        for line in _start_lines(chat_models, session):
            terminal.say(f"chat     {line}")
        _run_loop(session)


def open_session(chat_models: ChatModels, chat_options: ChatOptions, options: Options) -> ChatSession:
    """Load the models. Sampling is as in PPO's training, unless the command line overrides it."""
    temperature, defaults = chat_options.temperature, chat_models.config.ppo
    if temperature is not None and not math.isfinite(temperature):
        raise RLHFError("C06", f"--temperature {temperature}: a number from 0 up is needed")
    temperature = defaults.temperature if temperature is None else temperature
    length = chat_options.max_new_tokens or defaults.max_response_length
    models, scorer = load_models(chat_models, options)
    prompt_format = ConversationFormat(
        prompt_forms.prompt_format(chat_models.written, scorer.tokenizer), scorer.tokenizer
    )
    sampling = SamplingParams(temperature, length, chat_options.seed)
    return ChatSession(models, scorer, prompt_format, sampling, live=terminal.is_interactive())


def _start_lines(chat_models: ChatModels, session: ChatSession) -> Iterator[str]:
    """Yield the start-up lines: models, sampling, prompt format, and the metrics below each reply."""
    for info in chat_models.models:
        yield f"{info.name}: {info.description}"
    yield str(session.sampling)
    yield PROMPT_STYLES[session.prompt_format.kind]
    metrics = [f"{name} ({_source_name(chat_models.config.rewards[name])})" for name in session.scorer.sources]
    if chat_models.sft and any(info.parent is not chat_models.sft for info in chat_models.models):
        metrics.append(
            f"KL from {display_name(chat_models.sft)} at temperature {chat_models.config.ppo.temperature:g}, in nats"
        )
    yield from [f"below each reply: {', '.join(metrics)}"] if metrics else []
    yield from session.scorer.missing
    if session.live:
        yield "/help lists the commands; Ctrl-C stops a reply, Ctrl-D ends the chat"


def _source_name(source: Any) -> str:
    """Return the models, function, built-in rule or URL of a reward source."""
    models = [source.model, source.pipeline, *source.models.values()]
    names = [shown(path) if os.path.isabs(path) else path for path in models if path]  # else a hub id
    return ", ".join(names) or source.function or source.builtin or source.url


def _run_loop(session: ChatSession) -> None:
    reader = InputReader()
    while terminal.is_stdout_open():
        try:
            if (line := reader.read()) is None:
                return
            session.stopped = False
            if line.startswith("/") and not line.startswith("//"):
                if not run_command(session, line):
                    return
            elif line.strip():
                session.send(line[1:] if line.startswith("//") else line)
        except RLHFError as error:
            if not session.live:
                raise
            terminal.say(str(error))
        except KeyboardInterrupt:
            if not session.live:
                raise
            terminal.out()
            if session.stopped:
                return
            session.stopped = True
            terminal.say("Ctrl-C again, Ctrl-D or /quit ends the chat")


class InputReader:
    """Reader of prompts and commands from stdin; counts lines for error messages."""

    def __init__(self) -> None:
        self.number = 0

    def read(self) -> str | None:
        """Return the next prompt or command, or None at the end of the input.

        A prompt between two triple quotes may span lines and is never a command.
        Raises RLHFError D04 if the input is not UTF-8, C11 if the closing quotes are missing.
        """
        line = self._read_line("> ")
        if line is None or not line.startswith(QUOTES):
            return line
        lines, first = [line.removeprefix(QUOTES)], self.number
        while not lines[-1].endswith(QUOTES):
            if (more := self._read_line("... ")) is None:
                raise RLHFError("C11", f"the prompt that starts here has no closing {QUOTES}", where=f"stdin:{first}")
            lines.append(more)
        text = "\n".join(lines).removesuffix(QUOTES).strip("\n")
        return f"/{text}" if text.startswith("/") else text

    def _read_line(self, prompt: str) -> str | None:
        line = terminal.ask(prompt)
        self.number += 1
        if line and self.number == 1:
            line = line.removeprefix("\ufeff")  # of a file
        return None if line is None else decode(line.encode("utf-8", "surrogateescape"), Path("stdin"), self.number)


# Slash commands


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
        near, names = closest_match(name, COMMANDS), ", ".join(f"/{known_name}" for known_name in COMMANDS)
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
    field, kind, minimum, maximum = PARAMETERS[name]
    if text:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not minimum <= value <= maximum or math.isinf(value):
            noun = "a whole number" if kind is int else "a number"
            bounds = f"from {minimum} up" if math.isinf(maximum) else f"from {minimum} to {maximum}"
            raise RLHFError("C06", f"/{name} {text}: {noun} {bounds} is needed")
        changes: dict[str, Any] = {field: value} | ({"reply_index": 0} if name == "seed" else {})
        session.sampling = replace(session.sampling, **changes)
    terminal.say(str(session.sampling))


def _undo(session: ChatSession, text: str) -> None:
    terminal.say(f"removed: {' '.join(session.turns.pop().prompt.split())}")


def _clear(session: ChatSession, text: str) -> None:
    session.turns = []
    terminal.say("a new conversation")


def _save(session: ChatSession, text: str) -> None:
    if not text:
        raise RLHFError("C11", "/save needs the name of a file, e.g. /save chat.jsonl")
    path, rows = Path(os.path.expanduser(text)), list(export_rows(session))
    if os.path.lexists(path):
        raise RLHFError("C15", f"{shown(path)} exists already and is not overwritten")
    try:
        write_jsonl(path, rows)
    except (OSError, ValueError) as error:  # ValueError: not a valid file name
        with suppress(OSError, ValueError):
            path.unlink()
        reason = getattr(error, "strerror", error)
        raise RLHFError("E03", f"{shown(path)} cannot be written: {reason}") from error
    terminal.say(f"saved: {shown(path)}, {len(rows)} row{'s' * (len(rows) != 1)}")


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
