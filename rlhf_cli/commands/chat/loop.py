"""The chat itself: start-up lines, prompts and commands from stdin, replies and errors.

RUN is not modified or locked: a stage may run at the same time.
"""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from rlhf_cli import terminal
from rlhf_cli.commands.chat.session import ChatSession, ConversationFormat, ReplySampling, export_rows
from rlhf_cli.commands.common.models import open_models
from rlhf_cli.config.base import Options
from rlhf_cli.errors import RLHFError, did_you_mean, shown
from rlhf_cli.files import write_text
from rlhf_cli.jsonl import decode, to_json
from rlhf_cli.rewards.function import no_bytecode_files
from rlhf_cli.stages.common import prompt_forms

PROMPT_STYLES = {
    "text": "prompts: plain text, each without the earlier turns",
    "template": "prompts: the chat template, with the earlier turns",
    "transcript": "prompts: transcripts (Human:, Assistant:), with the earlier turns",
}
QUOTES = '"""'  # around a prompt of several lines


@dataclass(frozen=True)
class ChatOptions:
    """Options of the command line; None: as in the run's config."""

    stage: str | None = None
    step: str | None = None
    compare: str | None = None
    temperature: float | None = None
    max_new_tokens: int | None = None
    seed: int = 0


def run(folder: Path, chat_options: ChatOptions, options: Options) -> None:
    """Chat until the input ends, /quit, or a second Ctrl-C.

    Off a terminal each line of stdin is a prompt or a command, replies go to stdout, everything else to stderr, and the
    first error ends the chat. Raises RLHFError as `open_session`, and off a terminal D04 and the errors of
    `ChatSession.send` and of the commands.
    """
    with no_bytecode_files():
        session = open_session(folder, chat_options, options)
        for line in _start_lines(session):
            terminal.say(f"chat     {line}")
        run_loop(session)


def open_session(folder: Path, chat_options: ChatOptions, options: Options) -> ChatSession:
    """Load the models. Sampling is as in PPO's training, unless the command line overrides it.

    Raises RLHFError as `open_models`, C06 for a temperature that is not finite.
    """
    chosen = chat_options
    if chosen.temperature is not None and not math.isfinite(chosen.temperature):
        raise RLHFError("C06", f"--temperature {chosen.temperature}: a number from 0 up is needed")
    models, scorer = open_models(folder, chosen.stage, chosen.step, chosen.compare, options)
    defaults = scorer.config.ppo
    temperature = defaults.temperature if chosen.temperature is None else chosen.temperature
    length = chosen.max_new_tokens or defaults.max_response_length
    sampling = ReplySampling(temperature=temperature, max_new_tokens=length, seed=chosen.seed)
    form = prompt_forms.training_prompt_form(scorer.policy.parent)
    prompt_format = ConversationFormat(prompt_forms.prompt_format(form, scorer.tokenizer), scorer.tokenizer)
    return ChatSession(models, scorer, prompt_format, sampling, live=terminal.is_interactive())


def _start_lines(session: ChatSession) -> Iterator[str]:
    """Yield the start-up lines: models, sampling, prompt format, and the metrics below each reply."""
    scorer = session.scorer
    for model in session.models:
        yield f"{model.name}: {model.description}"
    yield str(session.sampling)
    yield PROMPT_STYLES[session.prompt_format.kind]
    metrics = [f"{name} ({_source_name(scorer.config.rewards[name])})" for name in scorer.sources]
    if scorer.sft:
        temperature = scorer.config.ppo.temperature
        metrics.append(f"KL from {scorer.sft.description} at temperature {temperature:g}, in nats")
    if metrics:
        yield f"below each reply: {', '.join(metrics)}"
    yield from scorer.missing
    if session.live:
        yield "/help lists the commands; Ctrl-C stops a reply, Ctrl-D ends the chat"


def _source_name(source: Any) -> str:
    """Return the models, function, built-in rule or URL of a reward source."""
    value = getattr(source, source.kind)
    names = value.values() if isinstance(value, dict) else [value]
    return ", ".join(shown(name) if os.path.isabs(name) else name for name in names)


def run_loop(session: ChatSession) -> None:
    """Read lines and answer them. Errors and Ctrl-C are handled here alone: off a terminal both end the chat."""
    reader = InputReader()
    while terminal.is_stdout_open():
        try:
            line = reader.read()
            session.stopped = False
            if line is None or not answer(session, line):
                return
        except RLHFError as error:
            if not session.live:
                raise
            terminal.error(str(error))
        except KeyboardInterrupt:
            if not session.live:
                raise
            terminal.answer()
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
        first = self.number
        text = line.removeprefix(QUOTES)
        while not text.endswith(QUOTES):
            more = self._read_line("... ")
            if more is None:
                raise RLHFError("C11", f"the prompt that starts here has no closing {QUOTES}", where=f"stdin:{first}")
            text += f"\n{more}"
        text = text.removesuffix(QUOTES).strip("\n")
        return f"/{text}" if text.startswith("/") else text

    def _read_line(self, prompt: str) -> str | None:
        line = terminal.ask(prompt)
        self.number += 1
        if line is None:
            return None
        if self.number == 1:
            line = line.removeprefix("\ufeff")  # of a file
        return decode(line.encode("utf-8", "surrogateescape"), Path("stdin"), self.number)


def answer(session: ChatSession, line: str) -> bool:
    """Run a command, or send a prompt; return False if the line ends the chat.

    Raises RLHFError as `ChatSession.send`; C07 for an unknown command, C11 for an unexpected argument or an empty
    conversation, and the errors of the command.
    """
    if line.startswith("/") and not line.startswith("//"):
        name, _, text = line[1:].strip().partition(" ")
        command = COMMANDS.get(name)
        if command is None:
            hint = did_you_mean(f"/{name}", [f"/{known}" for known in COMMANDS])
            names = ", ".join(f"/{known}" for known in COMMANDS)
            hint = hint or "to send a prompt that starts with /, type //"
            raise RLHFError("C07", f"/{name}: not one of {names}", hint=hint)
        if text and not command.argument:
            raise RLHFError("C11", f"/{name} takes no argument: {text}")
        if command.needs_turn and not session.turns:
            raise RLHFError("C11", f"/{name}: the conversation is empty")
        command.function(session, text.strip())
        return name != "quit"
    if line.strip():
        session.send(line.removeprefix("/"))
    return True


# Commands


class Command(NamedTuple):
    """A slash command."""

    argument: str  # its placeholder in /help; empty if the command has none
    description: str
    function: Callable[[ChatSession, str], None]
    needs_turn: bool = False  # of the conversation


# Sampling parameters that a command sets, and the numbers that they take.
PARAMETERS = {
    "temp": ("temperature", "a number from 0 up"),
    "max": ("max_new_tokens", "a whole number from 1 up"),
    "seed": ("seed", f"a whole number from 0 to {2**32 - 1}"),
}


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
    field, needed = PARAMETERS[name]
    if text:
        values = session.sampling.model_dump() | {field: text}
        if name == "seed":
            values["draw"] = 0
        try:
            session.sampling = ReplySampling.model_validate(values)
        except ValidationError:
            raise RLHFError("C06", f"/{name} {text}: {needed} is needed") from None
    terminal.say(str(session.sampling))


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
        write_text(path, "".join(to_json(row, allow_nan=False) + "\n" for row in rows))
    except (OSError, ValueError) as error:  # ValueError: not a valid file name
        reason = getattr(error, "strerror", error)
        raise RLHFError("E03", f"{shown(path)} cannot be written: {reason}") from error
    count = "1 row" if len(rows) == 1 else f"{len(rows)} rows"
    terminal.say(f"saved: {shown(path)}, {count}")


COMMANDS = {
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
    "quit": Command("", "end the chat", lambda session, text: None),
}
