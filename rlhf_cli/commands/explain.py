"""`rlhf explain`: print the meaning, default and source of a config key, or of an error code. Imports no torch."""

import json
import re
import shutil
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rlhf_cli import config, terminal
from rlhf_cli.config.machinery import trl_fields
from rlhf_cli.config.machinery.aliases import ALIASES, find_alias
from rlhf_cli.config.machinery.fields import RENAMED, Key, current_name, key_at
from rlhf_cli.config.messages import check_trainer
from rlhf_cli.config.ppo import RECIPES, TimesLearningRate
from rlhf_cli.errors import CODES, Problem, RLHFError, closest_match

PATH_TEXTS = {
    "data": "a file, a folder or a dataset of the hub",
    "model": "a folder or a hub id",
    "run": "a folder",
    "judge": "module:function, a folder or a hub id",
    "template": "a file, a text or chatml",
}
TYPE_TEXTS = {
    int: "a whole number", float: "a number", str: "text", bool: "true or false", list: "a list",
    dict: "keys and values", NoneType: "null",
}  # fmt: skip
BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
EXIT_TEXTS = {0: "0: it only ever warns", 1: "1: it fails at run time", 2: "2: reported before anything runs"}
StageKey = tuple[str, Key]
Texts = tuple[str, str, str, str | None, tuple[str, ...]]  # value, default, meaning, source, recipes


@dataclass(frozen=True)
class Entry:
    """Texts about a key, with the files that have it; equal keys of several stages (sft.bf16, reward.bf16) are one."""

    keys: tuple[str, ...]
    files: tuple[str, ...]
    value: str
    default: str
    meaning: str
    source: str | None
    recipes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return ", ".join(self.keys)


def explain(name: str) -> None:
    """Explain a key, section or code; for any other word list the keys related to it. Case is ignored.

    Raises RLHFError C01 if nothing matches.
    """
    matches = _find(name) or _find(name.lower())
    if code := CODES.get(name.upper()):
        terminal.out(f"{name.upper()}  {code.title}")
        outcome = EXIT_TEXTS[code.exit] + (f"; only a warning {code.warns}" if code.warns else "")
        _show_labelled({"meaning": code.meaning, "fix": code.fix, "exit": outcome})
    elif matches:
        _show(matches)
        elsewhere = [match for match in _keys_ending_in(name) if match not in matches]
        for path, files in _files_by((key.path, stage) for stage, key in elsewhere).items():
            terminal.out(f"\nalso {path}   ({files})")
    elif replacement := _find_replacement(name) or _find_replacement(name.lower()):
        matches, text = replacement
        terminal.out(text + "\n")
        _show(matches)
    elif name.startswith("trainer.") or any(name in trl_fields.fields_of(stage) for stage in trl_fields.TRAINERS):
        _show_trainer_field(name.removeprefix("trainer."))
    elif related := _related(name):
        terminal.out(f"no key is called {name}; this has to do with it:")
        _show_lines(related)
    else:
        raise _unknown_error(name)


def explain_all() -> None:
    """Print every key of every file, shared ones once, and every error code."""
    for title, entries in every_key().items():
        terminal.out(f"{title}\n{'-' * len(title)}\n")
        for entry in entries:
            _paragraph(f"{entry.name}: {entry.default}   ({entry.value})", "", "    ")
            _paragraph(entry.meaning, "    ")
            if entry.source:
                _paragraph(f"[{entry.source}]", "    ")
            for recipe in entry.recipes:
                _paragraph(recipe, "    ")
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
    return [(stage, key) for stage in config.CONFIGS for key in config.keys(stage).values()]


def _find(name: str) -> list[StageKey]:
    """Return the keys with this path, else all that end in it, such as every learning_rate."""
    found = [(stage, _key_or_table(stage, name)) for stage in config.CONFIGS]
    return [(stage, key) for stage, key in found if key is not None] or _keys_ending_in(name)


def _keys_ending_in(name: str) -> list[StageKey]:
    return [each for each in _all_keys() if each[1].path.endswith(f".{name}")]


def _related(name: str) -> list[StageKey]:
    """Return the keys whose last part, or else whose meaning, contains all words of `name`."""
    if find_alias(name.rpartition(".")[2]):
        return []
    wanted = _words(name)
    if "." not in name:
        named = [(stage, key) for stage, key in _all_keys() if wanted <= _words(key.name)]
        if named:
            return named
    return [(stage, key) for stage, key in _all_keys() if wanted <= _words(key.meaning)]


def _words(text: str) -> set[str]:
    return set(re.findall("[a-z0-9]+", text.lower()))


def _key_or_table(stage: str, name: str) -> Key | None:
    """Return the key at a path of a stage's config, or the table around a user-defined name (data.columns.prompt)."""
    model = config.CONFIGS[stage]
    parts = name.split(".")
    if key := key_at(model, parts):
        return key

    for depth in range(len(parts) - 1, 0, -1):  # the innermost key around the name
        table = key_at(model, parts[:depth])
        if table is None:
            continue
        has_sections = table.entry is not None and table.entry.section is not None
        is_inside_an_entry = has_sections and len(parts) > depth + 1
        if table.path == "trainer" or not table.allows_any_key or is_inside_an_entry:
            return None
        return table
    return None


def _find_replacement(name: str) -> tuple[list[StageKey], str] | None:
    """Return the keys that an old or external name stands for, with a text; None if there are none."""
    section, _, last = name.rpartition(".")
    renamed = current_name(name)
    for old, new in RENAMED.items():
        if name in (old, old.rpartition(".")[2]):
            renamed = new
            break
    if renamed != name:
        return _find(renamed), f"{name} is called {renamed} now"
    alias = find_alias(last)
    if alias is None or alias.key is None:
        return None
    matches = _find(f"{section}.{alias.key}") if section else []
    matches = matches or _find(alias.key)
    if not matches:
        return None
    words = ", ".join(f"{old} is {new}" for old, new in alias.values.items() if old != new)
    parts = (f"{name} is called {alias.key} here", alias.note, words)
    return matches, "; ".join(part for part in parts if part)


def _unknown_error(name: str) -> RLHFError:
    if re.fullmatch(r"[A-Za-z][0-9]{2}", name):
        family = [code for code in CODES if code[0] == name[0].upper()]
        hint = f"there are {family[0]} to {family[-1]}" if family else "rlhf explain --all lists all codes"
        return RLHFError("C01", f"unknown code {name.upper()}", hint=hint)
    last = name.rpartition(".")[2]
    if alias := find_alias(last):
        return RLHFError("C01", f"there is no key {name}", hint=alias.note)
    names = [key.name for _, key in _all_keys()]
    if "." in name:
        near = closest_match(name, [key.path for _, key in _all_keys()])
    else:
        near = closest_match(name, names + [old for old, alias in ALIASES.items() if alias.key])
    near = near or closest_match(last, names)
    hint = f"did you mean {near}?" if near else "rlhf explain --all lists all keys and codes"
    return RLHFError("C01", f"unknown key {name}", hint=hint)


# Texts


def _entries(stage_keys: Iterable[StageKey]) -> list[Entry]:
    """Return an entry for each key that has a value; keys with the same texts in several files are one entry."""
    places: dict[tuple[str, Texts], list[StageKey]] = {}
    for stage, key in stage_keys:
        if key.is_section:
            continue
        shared = key.path
        if key.path.startswith(f"{stage}."):  # a stage's own settings are in the section of its name
            shared = key.path.removeprefix(stage)
        places.setdefault((shared, _texts(key)), []).append((stage, key))

    entries = []
    for (_, texts), alike in places.items():
        paths = tuple(dict.fromkeys(key.path for _, key in alike))
        files = tuple(f"{stage}.yaml" for stage, _ in alike)
        entries.append(Entry(paths, files, *texts))
    return entries


def _files_by(pairs: Iterable[tuple[Any, str]]) -> dict[Any, str]:
    """Group (item, stage) pairs into item -> files of its stages."""
    files: dict[Any, list[str]] = {}
    for item, stage in pairs:
        files.setdefault(item, []).append(f"{stage}.yaml")
    return {item: ", ".join(names) for item, names in files.items()}


def _by_files(stage_keys: Iterable[StageKey]) -> dict[str, list[Entry]]:
    """Group the entries of keys by the files that have them, the largest groups of files first."""
    groups: dict[str, list[Entry]] = {}
    for entry in sorted(_entries(stage_keys), key=lambda entry: -len(entry.files)):
        groups.setdefault(", ".join(entry.files), []).append(entry)
    return groups


def _texts(key: Key) -> Texts:
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


def _describe_type(part: Any, key: Key, bounds: str) -> str | None:
    """Describe one of the types that a key accepts, or return None for a marker."""
    arguments = get_args(part)
    if part is str and key.path_field:
        mark = key.path_field
        return _one_of([*mark.keywords, PATH_TEXTS["model" if mark.keywords else mark.kind]])
    if part in (int, float) and bounds:
        return f"{TYPE_TEXTS[part]}, {bounds}"
    if part in TYPE_TEXTS:
        return TYPE_TEXTS[part]
    if isinstance(part, type) and issubclass(part, BaseModel):
        return "{" + ", ".join(part.model_fields) + "}"

    origin = get_origin(part)
    if origin is Literal:
        return _one_of(map(str, arguments))
    if origin is list:
        return f"a list, each {_describe_annotation(arguments[0])}"
    if origin is dict:
        return f"names, each with {_describe_annotation(arguments[1])}"
    return None


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
        _paragraph(f"{entry.name}   ({', '.join(entry.files)})", "")
        _show_labelled(
            {"value": entry.value, "default": entry.default, "meaning": entry.meaning, "source": entry.source}
        )
        for line in entry.recipes:
            _paragraph(line, "  ", " " * 12)

    def is_inside(stage: str, key: Key) -> bool:
        return any(stage == other and key.path.startswith(f"{outer.path}.") for other, outer in stage_keys)

    inner = [(stage, key) for stage, key in _all_keys() if is_inside(stage, key)]
    if inner:
        titles = (((key.path, key.meaning), stage) for stage, key in stage_keys if key.is_section)
        for (path, meaning), files in _files_by(titles).items():
            terminal.out(f"{path}   ({files})   {meaning}")
        _show_lines(inner)


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


def _show_labelled(texts: dict[str, str | None]) -> None:
    for label, text in texts.items():
        if text:
            _paragraph(text, f"  {label:<8}  ", " " * 12)


def _show_trainer_field(name: str) -> None:
    """Explain a field of TRL's configs. Raises RLHFError C01 if they have none of this name."""
    accepted: list[StageKey] = []
    refused: list[Problem] = []
    for stage in trl_fields.TRAINERS:
        model = config.CONFIGS[stage]
        if key := trl_fields.trainer_keys(model).get(name):
            accepted.append((stage, key))
        else:
            refused += check_trainer({name: None}, model, lambda key: "")
    if accepted:
        _show(accepted)
        return
    if refused[0].code != "C02":
        raise RLHFError.from_problems(refused[:1])
    for problem in dict.fromkeys(refused):  # set by the pipeline, or a key of the stage's section
        terminal.out(f"{problem.text.rstrip(':')}: {problem.hint}")


def _paragraph(text: str, start: str, rest: str | None = None) -> None:
    """Print wrapped text without breaking paths and commands."""
    wrapper = textwrap.TextWrapper(_width(), start, break_long_words=False, break_on_hyphens=False)
    wrapper.subsequent_indent = start if rest is None else rest
    terminal.out(wrapper.fill(text))


def _width() -> int:
    return max(40, min(100, shutil.get_terminal_size((100, 24)).columns))
