"""Reads a command line out of a shell script or a text: `accelerate launch ... ppo.py --learning_rate 3e-6 ...`."""

import re
import shlex
from collections.abc import Iterator
from typing import Any

from rlhf_cli.from_trl.settings import Read, value_of

VARIABLE = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=([^\s$`]*)")
USED = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")
OPTION = re.compile(r"--[A-Za-z][\w.-]*(=.*)?", re.DOTALL)
REDIRECTION = re.compile(r"\s\d*(?:>>?|<)(?:&\d|\s*[^\s\\]+)")
NEXT = {";", "&&", "||", "|", "&"}
# Launchers' options that say something of the run; the first three are names of one thing.
LAUNCHER = {
    "num_processes": "num_processes",
    "nproc_per_node": "num_processes",
    "num_gpus": "num_processes",
    "mixed_precision": "mixed_precision",
}

Command = list[tuple[str, int]]  # words, each with the line that it stands on


def read(text: str, name: str) -> Read:
    """The options of the first command that runs PPO; of a text that names no such script, of the first one at all."""
    found, variables = Read(), dict[str, str]()
    asked = [each for each in _commands(text, variables) if any(OPTION.fullmatch(word) for word, _ in each)]
    ours = [each for each in asked if "ppo" in each[_script(each)][0].lower()] or asked
    for other in ours[1:]:
        word, line = other[_script(other)]
        found.lose(word, f"{name}:{line}", "another command; the first one is read")
    if ours:
        _options(ours[0], name, variables, found)
    return found


def _commands(text: str, variables: dict[str, str]) -> Iterator[Command]:
    """Commands over continued lines; a line that begins with `--` goes on with the one before, `\\` or not."""
    words: Command = []
    going_on = False
    for number, line in enumerate(text.splitlines(), 1):
        if words and not going_on and not line.lstrip().startswith("--"):
            yield words
            words = []
        bare = line.rstrip().rstrip("\\")
        going_on = line.rstrip() != bare
        if not words and (assigned := VARIABLE.fullmatch(bare.strip())):
            variables[assigned[1]] = assigned[2].strip("'\"")
            continue
        for part in _split(REDIRECTION.sub(" ", bare)):
            if part in NEXT:
                yield words
                words = []
            else:
                words.append((part, number))
    yield words


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # a quote that this line does not close
        return line.split()


def _script(command: Command) -> int:
    """Where the Python file or the module stands that the options behind it are for."""
    words = [word for word, _ in command]
    files = [at for at, word in enumerate(words) if word.endswith(".py") and not word.startswith("-")]
    modules = [at + 1 for at, word in enumerate(words[:-1]) if word == "-m"]
    return (files or modules[-1:] or [0])[0]


def _options(command: Command, name: str, variables: dict[str, str], found: Read) -> None:
    script, at = _script(command), 0
    while at < len(command):
        (word, line), at = command[at], at + 1
        if not OPTION.fullmatch(word):
            continue
        launcher = at <= script
        option, equals, rest = word[2:].partition("=")
        values = [rest] if equals else []
        while not equals and at < len(command) and at != script and not OPTION.fullmatch(command[at][0]):
            values.append(command[at][0])
            at += 1
        option = option.replace("-", "_")
        where = f"{name}:{line}"
        if launcher and option not in LAUNCHER:
            found.lose(f"--{option}", where, "an option of the launcher; docs/scaling.md has ours")
        else:
            _add(LAUNCHER[option] if launcher else option.rpartition(".")[2], values, where, variables, found)


def _add(name: str, texts: list[str], where: str, variables: dict[str, str], found: Read) -> None:
    told = [USED.sub(lambda used: variables.get(used[1] or used[2], used[0]), text) for text in texts]
    if unknown := next((text for text in told if "$" in text or "`" in text), None):
        found.lose(name, where, f"what {unknown} is, the shell alone knows")
        return
    values: list[Any] = [value_of(text) for text in told]
    if values:
        found.add(name, values[0] if len(values) == 1 else values, where)
    else:  # transformers' parser has --no_NAME for what is on by default
        found.add(name.removeprefix("no_"), not name.startswith("no_"), where)
