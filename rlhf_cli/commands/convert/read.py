"""Read TRL's settings from YAML, JSON, a command line, or the literal arguments of a Python script's config calls."""

import ast
import json
import re
import shlex
import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_cli.config.machinery import yaml_io
from rlhf_cli.config.machinery.aliases import ALIASES
from rlhf_cli.errors import RLHFError

OTHER_SYSTEMS = yaml_io.read(Path(__file__).with_name("other_systems.yaml")).tree
BY_HAND = (
    "start from a ppo.yaml of `rlhf init`, and set by hand: models.sft; models.reward or rewards; data.prompts; "
    "ppo.learning_rate; ppo.kl_coef; ppo.response_length; ppo.total_episodes; ppo.per_device_train_batch_size x "
    "ppo.gradient_accumulation_steps, the episodes of an update. `rlhf explain OPTION` names the key of many options"
)
# Classes whose arguments are read; PPOv2Config is PPOConfig's name in TRL 0.9 to 0.12.
CONFIGS = ("PPOConfig", "PPOv2Config", "ModelConfig", "ScriptArguments", "GenerationConfig", "LoraConfig")
PEFT_DEFAULTS = {"use_peft": True, "r": 8, "lora_alpha": 8}
PEFT_SECTIONS = ("peft_config", "lora_config", "peft", "lora")
IMPORT = re.compile(r"(?m)^\s*(?:import|from) .*$")
COMMENT = re.compile(r"(?m)^\s*#.*$|\s#[^'\"\n]*$")  # of YAML or a shell
OPERATORS = set("();<>|&")  # of a shell
STREAM_NUMBER = re.compile(r"\s\d(?=>)")  # of a redirection
PROGRAM = re.compile(r"\S+\.py|-m")
OPTION = re.compile(r"--([A-Za-z][\w.-]*)(=?)(.*)", re.DOTALL)


@dataclass
class TRLSettings:
    """The options of a file by TRL's names, and the reason for each that was not read."""

    options: dict[str, Any] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    classes: set[str] = field(default_factory=set)  # names in a script, such as PPOv2Config


def read_settings(path: Path) -> TRLSettings:
    """Parse a file; nothing in it is executed. Raises RLHFError C03, C08, C09 or S02 if it cannot be read."""
    name = str(path)
    suffix = path.suffix.lower()
    if suffix == ".ipynb":
        hint = f"save it as a script: jupyter nbconvert --to script {name}"
        raise RLHFError("C09", "notebooks are not supported", where=name, hint=hint)

    text = yaml_io.read_text(path).removeprefix("\ufeff").replace("\r\n", "\n")  # as Windows editors write it
    relevant = "\n".join(IMPORT.findall(text)) if suffix == ".py" else COMMENT.sub("", text)
    for system, pattern in OTHER_SYSTEMS.items():
        if match := re.search(pattern, relevant):
            problem = f"it is a file of {system}, not of TRL: only that has {match[0].strip()}"
            raise RLHFError("C09", problem, where=name, hint=BY_HAND)

    if suffix == ".py":
        return _read_script(text, name)
    if suffix in (*yaml_io.SUFFIXES, ".json"):  # JSON is YAML
        return _read_tree(text, name)
    return _read_command(relevant, name)


def _read_script(text: str, name: str) -> TRLSettings:
    """Read the first call of each config class."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of Python, about escapes in the script
            tree = ast.parse(text)
    except (SyntaxError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None) or 1
        reason = getattr(error, "msg", "nested too deeply")
        raise RLHFError("C08", f"not valid Python: {reason}", where=f"{name}:{line}") from error

    nodes = list(ast.walk(tree))
    source = TRLSettings(classes={node.id for node in nodes if isinstance(node, ast.Name)})
    constants = _constants(tree)
    converted = set()
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda node: node.lineno):
        kind = getattr(call.func, "id", getattr(call.func, "attr", ""))  # of PPOConfig() or trl.PPOConfig()
        if kind in converted:
            source.unread[f"{kind} in line {call.lineno}"] = "only the first one is converted"
        elif kind in CONFIGS:
            converted.add(kind)
            if kind == "LoraConfig":
                source.options |= PEFT_DEFAULTS
            _read_arguments(call, constants, source)

    return source


def _read_arguments(call: ast.Call, constants: Mapping[str, ast.expr], source: TRLSettings) -> None:
    """Read the keyword arguments that are literals or constants."""
    for keyword in call.keywords:
        expression = constants.get(getattr(keyword.value, "id", ""), keyword.value)
        try:
            value = _literal(expression)
            source.options |= {keyword.arg: value} if keyword.arg else value  # a dict behind **
        except (ValueError, TypeError, RecursionError):
            source.unread[keyword.arg or "**"] = f"not a literal, line {keyword.value.lineno}"


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """Return the values of names that a script sets at its top level, and nowhere else."""
    nodes = list(ast.walk(tree))
    times_set = Counter(node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    times_set.update(node.arg for node in nodes if isinstance(node, ast.arg))
    constants = {}
    for statement in tree.body:
        if isinstance(statement, ast.Assign):
            name = getattr(statement.targets[0], "id", "")
            if times_set[name] == 1:
                constants[name] = statement.value
    return constants


def _literal(text: ast.expr | str) -> Any:
    """Return a number, a text, a list or a dict. Raises ValueError or TypeError for another expression."""
    return json.loads(json.dumps(ast.literal_eval(text)))


def _read_command(text: str, name: str) -> TRLSettings:
    """Read the options behind the name of the script; line breaks do not end the command."""
    one_line = STREAM_NUMBER.sub(" ", text.replace("\\\n", " "))
    lexer = shlex.shlex(one_line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""  # shlex reads a comment in a#b
    try:
        words = list(lexer)
    except ValueError as error:
        raise RLHFError("C08", f"not a valid command line: {error}", where=name, hint="close the quote") from error

    programs = [index for index, word in enumerate(words) if PROGRAM.fullmatch(word)]
    if len(programs) > 1:
        hint = "keep only the command that runs PPO"
        raise RLHFError("C09", "the file has several commands", where=name, hint=hint)
    start = programs[0] if programs else 0

    values: dict[str, list[str]] = {}
    given: list[str] = []  # the words behind an option
    for word in words[start:]:
        if match := OPTION.fullmatch(word):
            option = match[1].replace("-", "_").rpartition(".")[2]
            given = [match[3]] if match[2] else []
            values[option] = given
        elif word and set(word) <= OPERATORS:
            given = []
        else:
            given.append(word)

    source = TRLSettings()
    if any(map(OPTION.fullmatch, words[:start])):
        source.unread["options of the launcher"] = "use `rlhf ppo --nproc N` for several processes"
    for option, given in values.items():
        if any("$" in word or "`" in word for word in given):
            source.unread[option] = "known only to the shell"
        elif given:
            parsed = [parse_word(word) for word in given]
            source.options[option] = parsed if len(parsed) > 1 else parsed[0]
        else:  # transformers' parser has --no_NAME to turn an option off
            source.options[option.removeprefix("no_")] = not option.startswith("no_")
    return source


def parse_word(word: Any) -> Any:
    """Return the value of a literal of Python, such as 1e-5 or True; another word stays a text."""
    with suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return _literal(word)
    return word


def _read_tree(text: str, name: str) -> TRLSettings:
    """Return the options at the top of YAML or JSON, and one section below."""
    file = yaml_io.parse(text, name)
    if file.problems:
        raise RLHFError.from_problems(file.problems)
    source = TRLSettings()
    for key, value in file.tree.items():
        is_section = isinstance(value, dict) and key not in ALIASES
        section = value if is_section else {key: value}
        if key in PEFT_SECTIONS:
            source.options |= PEFT_DEFAULTS
        source.options |= {option: parse_word(inner) for option, inner in section.items()}
    return source
