"""The chat itself: start-up lines, prompts from stdin, replies and errors.

RUN is not modified or locked: a stage may run at the same time.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_cli import terminal
from rlhf_cli.commands.chat.session import ChatSession, ConversationFormat, ReplySampling
from rlhf_cli.commands.chat.slash_commands import QUOTES, run_command
from rlhf_cli.commands.common.models import ChatModels, display_name, load_models, resolve_models
from rlhf_cli.config.base import Options
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.jsonl import decode
from rlhf_cli.rewards.function import no_bytecode_files
from rlhf_cli.runs.resolve import LAST
from rlhf_cli.stages.common import prompt_forms

PROMPT_STYLES = {
    "text": "prompts: plain text, each without the earlier turns",
    "template": "prompts: the chat template, with the earlier turns",
    "transcript": "prompts: transcripts (Human:, Assistant:), with the earlier turns",
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
    defaults = chat_models.config.ppo
    temperature = defaults.temperature if chat_options.temperature is None else chat_options.temperature
    if not math.isfinite(temperature):
        raise RLHFError("C06", f"--temperature {temperature}: a number from 0 up is needed")
    length = chat_options.max_new_tokens or defaults.max_response_length
    models, scorer = load_models(chat_models, options)
    prompt_format = ConversationFormat(
        prompt_forms.prompt_format(chat_models.written, scorer.tokenizer), scorer.tokenizer
    )
    sampling = ReplySampling(temperature, length, chat_options.seed)
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
    if metrics:
        yield f"below each reply: {', '.join(metrics)}"
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
