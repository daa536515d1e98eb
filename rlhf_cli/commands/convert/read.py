"""Read TRL's settings from YAML, JSON, a command line, or the literal arguments of a Python script's config calls."""

import ast
import json
import re
import shlex
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from rlhf_cli.commands.convert import foreign
from rlhf_cli.config.machinery import yaml_io
from rlhf_cli.errors import RLHFError

PPO_CONFIGS = ("PPOConfig", "PPOv2Config")
CONFIGS = (*PPO_CONFIGS, "ModelConfig", "ScriptArguments", "GenerationConfig", "LoraConfig")
PARSERS = {"HfArgumentParser", "TrlParser"}
# Arguments of peft's LoraConfig, and their names among TRL's options.
LORA_OPTIONS = {
    "r": "lora_r", "bias": "lora_bias", "target_modules": "lora_target_modules", "task_type": "lora_task_type",
    "modules_to_save": "lora_modules_to_save",
}  # fmt: skip
PEFT_DEFAULTS = {"use_peft": True, "lora_r": 8, "lora_alpha": 8}
PEFT_SECTIONS = ("peft_config", "lora_config", "peft", "lora")
# Options whose value is a dict; any other key with a dict is a section of options.
DICT_OPTIONS = re.compile(r"(?!.*gen).*_kwargs|accelerator_config|fsdp_config|deepspeed|quantization_config")
OPTION = re.compile(r"--[A-Za-z][\w.-]*(=.*)?", re.DOTALL)
COMMENT_OF_PYTHON = re.compile(r"(?m)^\s*#.*$|\s#\s.*$")
COMMENT = re.compile(r"(?m)^\s*#.*$|\s#[^'\"\n]*$")  # of a shell
WORDS = {"True": True, "False": False, "None": None, "": None}


@dataclass(frozen=True)
class Setting:
    """An option by TRL's name. With a `problem`, its value is only the text of an expression."""

    name: str
    value: Any
    problem: str = ""


@dataclass
class TRLSettings:
    """The settings of a file, in its order. `classes` are the names in a script, such as PPOv2Config."""

    settings: list[Setting] = field(default_factory=list)
    classes: set[str] = field(default_factory=set)

    def add(self, options: Mapping[str, Any], *, lora: bool = False) -> None:
        """Add options; those of a LoraConfig with its defaults."""
        if lora:
            options = PEFT_DEFAULTS | {LORA_OPTIONS.get(name, name): value for name, value in options.items()}
        self.settings += [Setting(name, value) for name, value in options.items()]


def read_settings(path: Path) -> TRLSettings:
    """Parse a file; nothing in it is executed. Raises RLHFError C03, C08, C09 or S02 if it cannot be read."""
    name, suffix = str(path), path.suffix.lower()
    if suffix == ".ipynb":
        hint = f"save it as a script: jupyter nbconvert --to script {name}"
        raise RLHFError("C09", "notebooks are not supported", where=name, hint=hint)
    if suffix in (*yaml_io.SUFFIXES, ".json"):  # JSON is YAML
        source = yaml_io.read(path)
        if source.problems:
            raise RLHFError.from_problems(source.problems)
        foreign.refuse(name, yaml_io.read_text(path), foreign.tree_options(source.tree))
        return _read_tree(source.tree)
    text = yaml_io.read_text(path).removeprefix("\ufeff").replace("\r\n", "\n")  # as Windows editors write it
    if suffix == ".py":
        foreign.refuse(name, COMMENT_OF_PYTHON.sub("", text), ())
        return _read_script(text, name)
    text = COMMENT.sub("", text)
    foreign.refuse(name, text, foreign.command_options(text))
    return _read_command(text, name)


def parse_word(text: str) -> Any:
    """Parse a text as transformers' argument parser and Python's JSON do."""
    if text in WORDS:
        return WORDS[text]
    parsers: tuple[Callable[[str], Any], ...] = (int, float, json.loads)
    for parse in parsers:
        with suppress(ValueError, RecursionError):
            return parse(text)
    return text


def _read_script(text: str, name: str) -> TRLSettings:
    try:
        with warnings.catch_warnings(action="ignore"):  # of Python, about escapes in the script
            tree = ast.parse(text)
    except SyntaxError as error:
        raise RLHFError("C08", f"not valid Python: {error.msg}", where=f"{name}:{error.lineno or 1}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise RLHFError("C08", "Python nested too deeply", where=name) from error

    nodes = list(ast.walk(tree))
    source = TRLSettings(classes={node.id for node in nodes if isinstance(node, ast.Name)})
    calls = [node for node in nodes if isinstance(node, ast.Call) and _called(node) in CONFIGS]
    converted: set[str] = set()
    for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        kind = _called(call)
        where = f"{name}:{call.lineno}"
        group = "PPOConfig" if kind in PPO_CONFIGS else kind
        if group in converted:
            source.settings.append(Setting(kind, "...", f"{where}: only the first {group} is converted"))
            continue
        converted.add(group)
        if call.args:
            source.settings.append(Setting(kind, "...", f"{where}: positional arguments are not converted"))
        arguments = [_argument(keyword, name) for keyword in call.keywords]
        source.add({each.name: each.value for each in arguments if not each.problem}, lora=kind == "LoraConfig")
        source.settings += [each for each in arguments if each.problem]

    if "PPOConfig" not in converted and source.classes & PARSERS:
        hint = "save that command in a file, and convert that file"
        raise RLHFError("C09", "its settings come from the command line", where=name, hint=hint)
    return source


def _called(node: ast.Call) -> str:
    """Return the last part of the name of a called function; empty if it has none."""
    return getattr(node.func, "id", getattr(node.func, "attr", ""))


def _argument(keyword: ast.keyword, file: str) -> Setting:
    """Return an argument with its value if that is a literal of JSON: a number, a text, a list or a dict."""
    try:
        if keyword.arg is None:
            raise ValueError("arguments in a dict")
        return Setting(keyword.arg, json.loads(json.dumps(ast.literal_eval(keyword.value))))
    except (ValueError, TypeError, RecursionError, MemoryError):
        expression = " ".join(ast.unparse(keyword.value).split())
        return Setting(keyword.arg or "**", f"{expression:.50}", f"{file}:{keyword.value.lineno}: not a literal")


def _read_command(text: str, name: str) -> TRLSettings:
    """Read one command line; line breaks do not end it."""
    source = TRLSettings()
    words = _words(text, name)
    scripts = [index for index, word in enumerate(words) if word.endswith(".py")]
    if len(scripts) > 1:
        hint = "keep only the command that runs PPO"
        raise RLHFError("C09", f"the file runs {len(scripts)} scripts", where=name, hint=hint)
    start = -1  # index of the program: options before it are the launcher's
    if scripts:
        start = scripts[0]
    elif "-m" in words:
        start = words.index("-m") + 1

    for index, word in enumerate(words):
        if not OPTION.fullmatch(word):
            continue
        if index < start:
            problem = "an option of the launcher; use `rlhf ppo --nproc N` for several processes"
            source.settings.append(Setting(word, "...", problem))
            continue
        option, equals, assigned = word.removeprefix("--").partition("=")
        option = option.replace("-", "_").rpartition(".")[2]
        following = takewhile(lambda each: not OPTION.fullmatch(each), words[index + 1 :])
        values = [assigned] if equals else list(following)
        unknown = [each for each in values if "$" in each or "`" in each]
        if unknown:
            source.settings.append(Setting(option, unknown[0], "known only to the shell"))
        elif values:
            parsed = [parse_word(each) for each in values]
            source.add({option: parsed if len(parsed) > 1 else parsed[0]})
        else:  # transformers' parser has --no_NAME to turn an option off
            source.add({option.removeprefix("no_"): not option.startswith("no_")})
    return source


def _words(text: str, name: str) -> list[str]:
    """Split a command into words, up to a redirection, a pipe or a separator."""
    text = text.replace("\\\n", " ")
    text = re.sub(r"\s\d*(?=[<>])", " ", text)  # the 2 of 2>&1 is not a value
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""  # shlex reads a comment in a#b
    try:
        words = list(lexer)
    except ValueError as error:
        raise RLHFError("C08", f"not a valid command line: {error}", where=name, hint="close the quote") from error
    command = list(takewhile(lambda word: not word or not set(word) <= set("();<>|&"), words))
    if any(OPTION.fullmatch(word) for word in words[len(command) :]):
        raise RLHFError("C09", "the file has several commands", where=name, hint="keep only the command that runs PPO")
    return command


def _read_tree(tree: Mapping[str, Any]) -> TRLSettings:
    """Return the options at the top and one section below."""
    source = TRLSettings()
    for key, value in tree.items():
        is_section = isinstance(value, dict) and not DICT_OPTIONS.fullmatch(key)
        options = {
            name: parse_word(inner) if isinstance(inner, str) else inner  # "3e-6" is a number for TRL's parser, too
            for name, inner in (value if is_section else {key: value}).items()
        }
        source.add(options, lora=is_section and key in PEFT_SECTIONS)
    return source
