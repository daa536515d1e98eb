"""`rlhf explain`: print the meaning, default and source of a config key, or of an error code. Imports no torch."""

import json
import re
import shutil
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rlhf_cli import config, terminal
from rlhf_cli.config.machinery import trl_fields
from rlhf_cli.config.machinery.aliases import ALIASES, Alias, find_alias
from rlhf_cli.config.machinery.fields import Key, current_name, key_or_table_at
from rlhf_cli.config.messages import check_trainer
from rlhf_cli.config.ppo import RECIPES, TimesLearningRate
from rlhf_cli.errors import CODES, Problem, RLHFError, did_you_mean

PATH_TEXTS = {
    "data": "a file, a folder or a dataset of the hub",
    "model": "a folder or a hub id",
    "run": "a folder",
    "judge": "module:function, a folder or a hub id",
    "template": "a file, a text or chatml",
    "folder": "a folder",
}
TYPE_TEXTS = {
    int: "a whole number", float: "a number", str: "text", bool: "true or false", list: "a list",
    dict: "keys and values", NoneType: "null",
}  # fmt: skip
BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
EXIT_TEXTS = {0: "0: it only ever warns", 1: "1: it fails at run time", 2: "2: reported before anything runs"}
StageKey = tuple[str, Key]


@dataclass
class Entry:
    """Texts about a key, with the files that have it; equal keys of several stages (sft.bf16, reward.bf16) are one."""

    value: str  # as the default, empty for a section
    default: str
    meaning: str
    source: str | None
    recipes: tuple[str, ...] = ()
    keys: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return ", ".join(self.keys)


def explain(name: str) -> None:
    """Explain a key, section or code; for any other word list the keys related to it. Case is ignored.

    Raises RLHFError C01 if nothing matches, C01 or C02 for a field of TRL's configs that `trainer:` does not accept.
    """
    path = current_name(name.lower())
    alias = find_alias(path.rpartition(".")[2])
    if code := CODES.get(name.upper()):
        terminal.out(f"{name.upper()}  {code.title}")
        outcome = EXIT_TEXTS[code.exit] + (f"; only a warning {code.warns}" if code.warns else "")
        _show_labelled({"meaning": code.meaning, "fix": code.fix, "exit": outcome})
    elif matches := _find(path):
        _show(matches)
        for entry in _entries(match for match in _keys_ending_in(path) if match not in matches):
            terminal.out(f"\nalso {entry.name}   ({', '.join(entry.files)})")
    elif alias and alias.key:
        _show_alias(path, alias)
    elif problems := _trainer_problems(path):
        raise RLHFError.from_problems(problems)
    elif not alias and (related := _related(path)):
        terminal.out(f"no key is called {name}; this has to do with it:")
        _show_lines(related)
    else:
        known = [*CODES, *ALIASES]
        for _, key in _all_keys():
            known += [key.name, key.path]
        hint = alias.note if alias else did_you_mean(path, known)
        raise RLHFError("C01", f"unknown key {name}", hint=hint or "rlhf explain --all lists all keys and codes")


def explain_all() -> None:
    """Print every key of every file, shared ones once, and every error code."""
    for title, entries in every_key().items():
        terminal.out(f"{title}\n{'-' * len(title)}\n")
        for entry in entries:
            _show_entry(entry)
            terminal.out()
    terminal.out("Codes, with the exit code of an error; 0 only warns\n" + "-" * 52 + "\n")
    for code, description in CODES.items():
        terminal.out(f"{code}  {description.exit}  {description.title}")


def every_key() -> dict[str, list[Entry]]:
    """Return every key, grouped by the files that have it; the largest groups of files first."""
    groups = _by_files(_all_keys())
    everywhere = ", ".join(f"{stage}.yaml" for stage in config.CONFIGS)
    return {f"Every file: {files}" if files == everywhere else files: entries for files, entries in groups.items()}


# Lookup by name


def _all_keys() -> list[StageKey]:
    keys: list[StageKey] = []
    for stage in config.CONFIGS:
        keys += [(stage, key) for key in config.keys(stage).values()]
    return keys


def _find(path: str) -> list[StageKey]:
    """Return the keys with this path, else all that end in it, such as every learning_rate, else fields of TRL."""
    exact: list[StageKey] = []
    of_trl: list[StageKey] = []
    for stage, model in config.CONFIGS.items():
        trl_key = trl_fields.trainer_keys(model).get(path.removeprefix("trainer."))
        if trl_key:
            of_trl.append((stage, trl_key))
        key = key_or_table_at(model, path.split("."))
        if key and not path.startswith("trainer."):
            exact.append((stage, key))
    return exact or _keys_ending_in(path) or of_trl


def _keys_ending_in(path: str) -> list[StageKey]:
    return [(stage, key) for stage, key in _all_keys() if key.path.endswith(f".{path}")]


def _related(name: str) -> list[StageKey]:
    """Return the keys whose last part, or else whose meaning, contains all words of `name`."""
    wanted = _words(name)
    named = [(stage, key) for stage, key in _all_keys() if wanted <= _words(key.name)]
    return named or [(stage, key) for stage, key in _all_keys() if wanted <= _words(key.meaning)]


def _words(text: str) -> set[str]:
    return set(re.findall("[a-z0-9]+", text.lower()))


def _trainer_problems(path: str) -> list[Problem]:
    """Return why a field of TRL's configs is none of `trainer:`, as an error in a config says it."""
    name = path.removeprefix("trainer.")
    problems: list[Problem] = []
    for stage in trl_fields.TRAINERS:
        if name != path or name in trl_fields.fields_of(stage):
            problems += check_trainer({name: None}, config.CONFIGS[stage], lambda key: "")
    return problems[:1]


# Texts


def _entries(stage_keys: Iterable[StageKey]) -> list[Entry]:
    """Return an entry for each key; keys with the same texts in several files are one entry."""
    entries: dict[tuple[Any, ...], Entry] = {}
    for stage, key in stage_keys:
        shared = key.path.removeprefix(f"{stage}.")  # a stage's own settings are in the section of its name
        texts = _texts(key)
        entry = entries.setdefault((shared, *texts), Entry(*texts))
        if key.path not in entry.keys:
            entry.keys.append(key.path)
        entry.files.append(f"{stage}.yaml")
    return list(entries.values())


def _by_files(stage_keys: Iterable[StageKey]) -> dict[str, list[Entry]]:
    """Group the entries of keys that have a value by their files, the largest groups of files first."""
    entries = _entries((stage, key) for stage, key in stage_keys if not key.is_section)
    groups: dict[str, list[Entry]] = {}
    for entry in sorted(entries, key=lambda entry: -len(entry.files)):
        groups.setdefault(", ".join(entry.files), []).append(entry)
    return groups


def _texts(key: Key) -> tuple[str, str, str, str | None, tuple[str, ...]]:
    """Return the value, default, meaning, source and recipes of an entry."""
    if key.is_section:
        return "", "", key.meaning, key.source, ()
    if key.path == "stage":  # constant in each file
        return _one_of(config.CONFIGS), "the file's stage", key.meaning, key.source, ()
    recipes = []
    for recipe, changes in RECIPES.items():
        name = key.path.removeprefix("ppo.")
        if name in changes:
            value, source = changes[name]
            recipes.append(f"recipe {recipe}: {_shown(value)}  [{source}]")
    default = "required" if key.field.is_required() else _shown(key.field.get_default(call_default_factory=True))
    return _describe_values(key), default, key.meaning, key.source, tuple(recipes)


def _shown(value: Any) -> str:
    """Format a default as in YAML."""
    if isinstance(value, BaseModel):
        return "the keys below"
    if isinstance(value, str | TimesLearningRate):
        return str(value)
    return re.sub(r"e([+-])0", r"e\1", str(value)) if isinstance(value, float) else json.dumps(value)


def _describe_values(key: Key) -> str:
    """Describe the values that a key accepts, such as "a number, above 0, or null"."""
    bounds = " and ".join(f"{word} {key.bounds[name]:.15g}" for name, word in BOUNDS.items() if name in key.bounds)
    texts = [_describe_type(part, key, bounds) for part in key.parts]
    words = [text for text in texts if text]
    separator = ", or " if any("," in word for word in words) else " or "
    return separator.join(words)


def _describe_type(part: Any, key: Key, bounds: str) -> str:
    """Describe one of the types that a key accepts; empty for a marker."""
    text = ""
    arguments = get_args(part)
    if part is str and key.path_field:
        mark = key.path_field
        text = _one_of([*mark.keywords, PATH_TEXTS["model" if mark.keywords else mark.kind]])
    elif part in (int, float) and bounds:
        text = f"{TYPE_TEXTS[part]}, {bounds}"
    elif part in TYPE_TEXTS:
        text = TYPE_TEXTS[part]
    elif isinstance(part, type) and issubclass(part, BaseModel):
        text = "{" + ", ".join(part.model_fields) + "}"
    elif get_origin(part) is Literal:
        text = _one_of(map(str, arguments))
    elif get_origin(part) is list:
        text = f"a list, each {_describe_annotation(arguments[0])}"
    elif get_origin(part) is dict:
        text = f"names, each with {_describe_annotation(arguments[1])}"
    return text


def _describe_annotation(annotation: Any) -> str:
    """Describe the entries of a list or of a table."""
    if annotation is Any:
        return "a value"
    return _describe_values(Key("", FieldInfo.from_annotation(annotation)))


def _one_of(words: Iterable[str]) -> str:
    choices = list(words)
    return f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]


# On the terminal


def _show(stage_keys: list[StageKey]) -> None:
    """Print each key in full, and a line per key below a section."""
    for number, entry in enumerate(_entries(stage_keys)):
        if number:
            terminal.out()
        _show_entry(entry)

    inner: list[StageKey] = []
    for stage, outer in stage_keys:
        keys = config.keys(stage).values()
        inner += [(stage, key) for key in keys if key.path.startswith(f"{outer.path}.")]
    _show_lines(inner)


def _show_alias(path: str, alias: Alias) -> None:
    """Print what another system's option is called here, and that key in full."""
    text = f"{path} is called {alias.key} here"
    if alias.note:
        text += f"; {alias.note}"
    words = [f"{old} is {new}" for old, new in alias.values.items() if old != new]
    if words:
        text += f"; {', '.join(words)}"
    terminal.out(f"{text}\n")

    section = path.rpartition(".")[0]
    _show(_find(f"{section}.{alias.key}") or _find(str(alias.key)))


def _show_lines(stage_keys: Iterable[StageKey]) -> None:
    """Print a line per key, grouped by files."""
    for files, entries in _by_files(stage_keys).items():
        terminal.out(f"\n{files}")
        name_width = max(len(entry.name) for entry in entries)
        default_width = max(len(entry.default) for entry in entries)
        for entry in entries:
            start = f"  {entry.name:<{name_width}}  {entry.default:<{default_width}}  "
            sentence = re.split(r"\. (?=[A-Z])", entry.meaning)[0].rstrip(".")
            room = max(20, _width() - len(start))
            terminal.out(start + textwrap.shorten(sentence, room, placeholder=" ..."))


def _show_entry(entry: Entry) -> None:
    _paragraph(f"{entry.name}   ({', '.join(entry.files)})", "")
    _show_labelled({"value": entry.value, "default": entry.default, "meaning": entry.meaning, "source": entry.source})
    for line in entry.recipes:
        _paragraph(line, "  ")


def _show_labelled(texts: dict[str, str | None]) -> None:
    for label, text in texts.items():
        if text:
            _paragraph(text, f"  {label:<8}  ")


def _paragraph(text: str, start: str) -> None:
    """Print text, wrapped behind column 12, without breaking paths and commands."""
    wrapper = textwrap.TextWrapper(_width(), start, break_long_words=False, break_on_hyphens=False)
    wrapper.subsequent_indent = " " * 12
    terminal.out(wrapper.fill(text))


def _width() -> int:
    return max(40, min(100, shutil.get_terminal_size((100, 24)).columns))
