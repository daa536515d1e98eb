"""Questions of `rlhf init` on a terminal: what is missing on the command line, each answer shown as its option."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

from rlhf_cli import terminal
from rlhf_cli.commands.init.presets import PRESETS, print_list
from rlhf_cli.errors import RLHFError, did_you_mean, shell_word

NEXT = "next"  # in place of a preset: the next round of a run
PAIRS_TEXT = "File, folder or Hub dataset of your preference pairs"
BASE_TEXT = "Model to start from: a folder or a Hub id"
GPU_TEXT = "GPU that will run it: a name (h100, 4090) or GiB; empty for this machine"


@dataclass(frozen=True)
class InitArguments:
    """The arguments of `rlhf init` that it can ask for; None if not given."""

    preset: str | None
    folder: str | None  # to create; of `next`, the finished run
    target: str | None  # of `next`: to create
    data: str | None
    base: str | None
    gpu: str | None

    def command(self) -> str:
        """Return the command line with these arguments."""
        words = ["rlhf", "init"]
        words += [text for text in (self.preset, self.folder, self.target) if text is not None]
        for option, value in (("--data", self.data), ("--base", self.base), ("--gpu", self.gpu)):
            words += [option, value] if value is not None else []
        return " ".join(map(shell_word, words))


def ask_missing(given: InitArguments) -> InitArguments:
    """Ask for the arguments without which the command would be refused, and print the command that they make.

    Raises RLHFError C11 at the end of the input.
    """
    arguments = given
    if arguments.preset is None:
        print_list()
        arguments = replace(arguments, preset=_ask("PRESET", "Preset", default="demo", problem=_preset_problem))

    if arguments.preset == NEXT:
        arguments = _ask_for_next_round(arguments)
    elif arguments.preset in PRESETS:
        arguments = _ask_for_preset(arguments, str(arguments.preset))
    if arguments != given:
        terminal.say(arguments.command())
    return arguments


def _ask_for_next_round(arguments: InitArguments) -> InitArguments:
    folder = arguments.folder or _ask("RUN", "Folder of the finished run")
    target = arguments.target or _ask("NEW", "Folder to create", default=_free(f"{folder}-2"))
    return replace(arguments, folder=folder, target=target)


def _ask_for_preset(arguments: InitArguments, preset: str) -> InitArguments:
    if preset == "preferences" and None in (arguments.folder, arguments.data, arguments.base):
        arguments = replace(
            arguments,
            data=arguments.data or _ask("--data", PAIRS_TEXT),
            base=arguments.base or _ask("--base", BASE_TEXT),
            gpu=arguments.gpu or _ask("--gpu", GPU_TEXT, default="") or None,
        )
    folder = arguments.folder or _ask("DIR", "Folder to create", default=_free(f"runs/{preset}"))
    return replace(arguments, folder=folder)


def _free(folder: str) -> str:
    """Return the name of a folder, with a number if it exists."""
    number = 2
    name = folder
    while os.path.lexists(name):
        name = f"{folder}-{number}"
        number += 1
    return name


def _preset_problem(name: str) -> str | None:
    if name in PRESETS or name == NEXT:
        return None
    return did_you_mean(name, PRESETS) or f"there are {', '.join(PRESETS)}"


def _ask(
    option: str, text: str, *, default: str | None = None, problem: Callable[[str], str | None] = lambda _: None
) -> str:
    """Return the answer to a question, asked until it has one without a problem, and print the option it stands for."""
    shown_default = f" [{default}]" if default else ""
    while True:
        answer = terminal.ask(f"{text}{shown_default}: ")
        if answer is None:
            raise RLHFError("C11", f"{option} is missing", hint="rlhf init --help")
        value = answer.strip() or default
        if value is None:
            continue
        if text_of_problem := problem(value):
            terminal.say(text_of_problem)
            continue
        if value:
            terminal.say(f"  {option} {shell_word(value)}")
        return value
