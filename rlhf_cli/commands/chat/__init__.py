"""`rlhf chat RUN`: talk to what a run made, each reply with its reward and its distance from the SFT model.

Reads only: nothing in RUN changes, and no lock keeps a stage from running beside it.
"""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from rlhf_cli import terminal
from rlhf_cli.commands.chat import session
from rlhf_cli.commands.chat.generate import Form, Sampling, Voice
from rlhf_cli.commands.chat.models import Cast, cast
from rlhf_cli.commands.chat.session import Judge, Talk
from rlhf_cli.config.base import Options
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.errors import RLHFError, closest_match, shown
from rlhf_cli.jsonl import decode, write_jsonl
from rlhf_cli.models import devices, load, tokenizers
from rlhf_cli.progress import Progress
from rlhf_cli.rewards.function import no_bytecode_files
from rlhf_cli.runs.references import LAST
from rlhf_cli.stages import ppo_setup

BLOCK = '"""'


class Lines:
    """The lines of stdin, told apart by their number in messages."""

    def __init__(self) -> None:
        self.number = 0

    def next(self) -> str | None:
        """The next prompt or command; None at the end.

        A line that begins with three quotes begins a prompt, which goes on to the next three at a line's end; that one
        is no command, whatever it begins with.
        Raises RLHFError D04 for what is not UTF-8, C11 for a prompt without an end.
        """
        line = self._line("> ")
        if line is None or not line.startswith(BLOCK):
            return line
        lines, first = [line.removeprefix(BLOCK)], self.number
        while not lines[-1].endswith(BLOCK):
            more = self._line("... ")
            if more is None:
                raise RLHFError("C11", f"the prompt that begins here has no {BLOCK} at its end", where=f"stdin:{first}")
            lines.append(more)
        text = "\n".join(lines).removesuffix(BLOCK).strip("\n")
        return f"/{text}" if text.startswith("/") else text

    def _line(self, prompt: str) -> str | None:
        line = terminal.ask(prompt)
        self.number += 1
        return None if line is None else decode(line.encode("utf-8", "surrogateescape"), Path("stdin"), self.number)


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
        near, known = closest_match(name, COMMANDS), ", ".join(f"/{each}" for each in COMMANDS)
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
    path, rows = Path(os.path.expanduser(text)), list(session.rows(talk))
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


@dataclass(frozen=True)
class Wishes:
    """What a command line says of a chat; None: as the run has it."""

    stage: str | None = None
    step: str = LAST
    compare: str | None = None
    temperature: float | None = None
    max_new_tokens: int | None = None
    seed: int = 0


def run(folder: Path, wishes: Wishes, options: Options) -> None:
    """Talk until the input ends, /quit, or a second Ctrl-C.

    Off a terminal each line of stdin is a prompt or a command; replies go to stdout, all else to stderr, and the first
    error ends it. Raises RLHFError as `cast` does for the models, M01, M06-M08 for one that cannot be loaded, and off a
    terminal what `Talk.say` and the commands raise, and D04.
    """
    with no_bytecode_files():
        found = cast(folder, wishes.stage, wishes.step, wishes.compare)
        talk = _load(found, _sampling(found.config, wishes), options)
        for line in _opening(found, talk):
            terminal.say(f"chat     {line}")
        _converse(talk)


def _sampling(config: PPOConfig, wishes: Wishes) -> Sampling:
    """How replies are drawn at first: as in PPO's training, where nothing else is wished."""
    temperature, length = wishes.temperature, wishes.max_new_tokens
    if temperature is not None and not math.isfinite(temperature):
        raise RLHFError("C06", f"--temperature {temperature}: a number from 0 up is needed")
    return Sampling(
        config.ppo.temperature if temperature is None else temperature, length or config.ppo.max_response_length,
        wishes.seed,
    )  # fmt: skip


def _load(found: Cast, how: Sampling, options: Options) -> Talk:
    """All models in memory: those that answer, the SFT model, and the sources of reward."""
    first, trust = found.roles[0].model, options.trust_remote_code
    tokenizer = tokenizers.load_tokenizer(first.model, trust_remote_code=trust)
    parents = {role.model.model: role.model for role in found.roles}
    parents |= {found.sft.model: found.sft} if found.sft else {}
    loaded: dict[Path, Any] = {}
    with Progress("chat", len(parents) + len(found.rewards), "model", brief=True) as bar:
        for folder, parent in parents.items():
            model = load.load_causal_lm(folder, **load.load_kwargs(found.config.models, trust))
            tokenizers.check_vocabulary(model, tokenizer, shown(parent.path))
            loaded[folder] = model.to(devices.device()).eval()
            bar.advance(note=shown(parent.path))
        stop = ppo_setup.stop_token_id(
            found.config, tokenizer, loaded[first.model].get_input_embeddings().weight.shape[0]
        )
        judge = Judge(found, options, tokenizer, stop, loaded[found.sft.model] if found.sft else None)
        bar.advance(len(found.rewards), note="rewards")
    voices = [Voice(role, loaded[role.model.model]) for role in found.roles]
    return Talk(voices, judge, Form.of(found.written, tokenizer), stop, how, live=terminal.is_interactive())


def _opening(found: Cast, talk: Talk) -> Iterator[str]:
    """Who talks, how prompts are written and replies drawn, and what the numbers are."""
    for role in found.roles:
        yield f"{role.name}: {role.told}"
    how, ppo, seed = talk.how, found.config.ppo, f"seed {talk.how.seed}"
    trained = f"temperature {ppo.temperature:g}, at most {ppo.max_response_length} tokens"
    drawn = f"temperature {how.temperature:g}, at most {how.max_new_tokens} tokens"
    yield f"{drawn}, as PPO has it; {seed}" if drawn == trained else f"{drawn}, {seed} (PPO: {trained})"
    yield _of_prompts(talk.form, found.written)
    told = [f"{name} ({_place(found.config.rewards[name])})" for name in talk.judge.sources]
    if found.sft and any(role.model is not found.sft for role in found.roles):
        name = found.sft.hub or shown(found.sft.path)
        told.append(f"KL from {name} at temperature {ppo.temperature:g}, in nats")
    yield from [f"below each reply: {', '.join(told)}"] if told else []
    yield from talk.judge.missing
    if talk.live:
        yield "/help lists the commands; Ctrl-C stops a reply, Ctrl-D ends the chat"


def _of_prompts(form: Form, written: str | None) -> str:
    if form.kind == "text":
        unused = "; the chat template was not used there" if form.tokenizer.chat_template else ""
        seen = "as in training" if written else "as there is no chat template"
        return f"prompts: plain text, {seen}{unused}; each stands by itself, without what was said before"
    what = "the chat template" if form.kind == "template" else "dialogues in one text (Human:, Assistant:)"
    return f"prompts: {what}, with what was said before" + ("" if written else "; those of the training are not here")


def _place(source: Any) -> str:
    """Where a source of reward comes from."""
    models = [source.model, source.pipeline, *source.models.values()]
    named = [shown(path) if os.path.isabs(path) else path for path in models if path]  # else a hub id
    return ", ".join(named) or source.function or source.builtin or source.url


def _converse(talk: Talk) -> None:
    lines = Lines()
    while terminal.is_stdout_open():
        try:
            if (line := lines.next()) is None:
                return
            talk.stopped = False
            if is_command(line):
                if not obey(talk, line):
                    return
            elif line.strip():
                talk.say(line[1:] if line.startswith("//") else line)
        except RLHFError as error:
            if not talk.live:
                raise
            terminal.say(str(error))
        except KeyboardInterrupt:
            if not talk.live:
                raise
            terminal.out()
            if talk.stopped:
                return
            talk.stopped = True
            terminal.say("Ctrl-C again, Ctrl-D or /quit ends the chat")
