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
from rlhf_cli.errors import CODES, RLHFError, closest_match

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
            for line in (entry.meaning, f"[{entry.source}]" if entry.source else "", *entry.recipes):
                if line:
                    _paragraph(line, "    ")
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
    return [(stage, key) for stage in config.CONFIGS if (key := _key_or_table(stage, name))] or _keys_ending_in(name)


def _keys_ending_in(name: str) -> list[StageKey]:
    return [each for each in _all_keys() if each[1].path.endswith(f".{name}")]


def _related(name: str) -> list[StageKey]:
    """Return the keys whose last part, or else whose meaning, contains all words of `name`."""
    if find_alias(name.rpartition(".")[2]):
        return []
    named = [] if "." in name else [each for each in _all_keys() if _words(name) <= _words(each[1].name)]
    return named or [each for each in _all_keys() if _words(name) <= _words(each[1].meaning)]


def _words(text: str) -> set[str]:
    return set(re.findall("[a-z0-9]+", text.lower()))


def _key_or_table(stage: str, name: str) -> Key | None:
    """Return the key at a path of a stage's config, or the table around a user-defined name (data.columns.prompt)."""
    model, parts = config.CONFIGS[stage], name.split(".")
    if key := key_at(model, parts):
        return key
    depth = next((depth for depth in range(len(parts) - 1, 0, -1) if key_at(model, parts[:depth])), 0)
    table = key_at(model, parts[:depth]) if depth else None
    if table is None or table.path == "trainer" or not table.allows_any_key:
        return None
    inside_an_entry = table.entry is not None and table.entry.section is not None and len(parts) > depth + 1
    return None if inside_an_entry else table


def _find_replacement(name: str) -> tuple[list[StageKey], str] | None:
    """Return the keys that an old or external name stands for, with a text; None if there are none."""
    section, _, last = name.rpartition(".")
    renamed = next((new for old, new in RENAMED.items() if name in (old, old.rpartition(".")[2])), current_name(name))
    if renamed != name:
        return _find(renamed), f"{name} is called {renamed} now"
    alias = find_alias(last)
    if alias is None or alias.key is None:
        return None
    words = ", ".join(f"{old} is {new}" for old, new in alias.values.items() if old != new)
    text = "; ".join(filter(None, (f"{name} is called {alias.key} here", alias.note, words)))
    matches = (_find(f"{section}.{alias.key}") if section else []) or _find(alias.key)
    return (matches, text) if matches else None


def _unknown_error(name: str) -> RLHFError:
    if re.fullmatch(r"[A-Za-z][0-9]{2}", name):
        family = [code for code in CODES if code[0] == name[0].upper()]
        hint = f"there are {family[0]} to {family[-1]}" if family else "rlhf explain --all lists all codes"
        return RLHFError("C01", f"unknown code {name.upper()}", hint=hint)
    last = name.rpartition(".")[2]
    if alias := find_alias(last):
        return RLHFError("C01", f"there is no key {name}", hint=alias.note)
    keys, replaced = [key for _, key in _all_keys()], [old for old, alias in ALIASES.items() if alias.key]
    names = [key.name for key in keys]
    near = closest_match(name, [key.path for key in keys] if "." in name else names + replaced)
    near = near or closest_match(last, names)
    hint = f"did you mean {near}?" if near else "rlhf explain --all lists all keys and codes"
    return RLHFError("C01", f"unknown key {name}", hint=hint)


# Texts


def _entries(stage_keys: Iterable[StageKey]) -> list[Entry]:
    """Return an entry for each key that has a value; keys with the same texts in several files are one entry."""
    places: dict[tuple[str, Texts], list[StageKey]] = {}
    for stage, key in stage_keys:
        if not key.is_section:
            # A stage's own settings are in the section of its name.
            shared = f".{key.path.removeprefix(f'{stage}.')}" if key.path.startswith(f"{stage}.") else key.path
            places.setdefault((shared, _texts(key)), []).append((stage, key))
    return [
        Entry(tuple(dict.fromkeys(key.path for _, key in alike)), tuple(f"{stage}.yaml" for stage, _ in alike), *texts)
        for (_, texts), alike in places.items()
    ]


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
    changed = {recipe: changes.get(key.path.removeprefix("ppo.")) for recipe, changes in RECIPES.items()}
    recipes = tuple(f"recipe {recipe}: {_shown(new[0])}  [{new[1]}]" for recipe, new in changed.items() if new)
    default = "required" if key.field.is_required() else _shown(key.field.get_default(call_default_factory=True))
    return _describe_values(key), default, key.meaning, key.source, recipes


def _shown(value: Any) -> str:
    """Format a default as in YAML."""
    if isinstance(value, BaseModel):
        return "the keys below"
    if isinstance(value, str | TimesLearningRate):
        return str(value)
    return re.sub(r"e([+-])0", r"e\1", str(value)) if isinstance(value, float) else json.dumps(value)


def _describe_values(key: Key) -> str:
    bounds = " and ".join(f"{word} {key.bounds[name]:.15g}" for name, word in BOUNDS.items() if name in key.bounds)
    words = []
    for part in key.parts:
        origin, arguments = get_origin(part), get_args(part)
        if part is str and key.path_field:
            mark = key.path_field
            words.append(_one_of([*mark.keywords, PATH_TEXTS["model" if mark.keywords else mark.kind]]))
        elif part in TYPE_TEXTS:
            words.append(f"{TYPE_TEXTS[part]}, {bounds}" if bounds and part in (int, float) else TYPE_TEXTS[part])
        elif origin is Literal:
            words.append(_one_of(map(str, arguments)))
        elif origin is list:
            words.append(f"a list, each {_describe_values(Key('', FieldInfo.from_annotation(arguments[0])))}")
        elif origin is dict:
            entry = Key("", FieldInfo.from_annotation(arguments[1]))
            words.append("names, each with " + ("a value" if arguments[1] is Any else _describe_values(entry)))
        elif isinstance(part, type) and issubclass(part, BaseModel):
            words.append("{" + ", ".join(part.model_fields) + "}")
    return (", or " if any("," in word for word in words) else " or ").join(words)


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
    sections = [(stage, f"{key.path}.") for stage, key in stage_keys]
    inner = [
        (stage, key)
        for stage, key in _all_keys()
        if any(stage == outer_stage and key.path.startswith(section) for outer_stage, section in sections)
    ]
    if inner:
        titles = (((key.path, key.meaning), stage) for stage, key in stage_keys if key.is_section)
        for (path, meaning), files in _files_by(titles).items():
            terminal.out(f"{path}   ({files})   {meaning}")
        _show_lines(inner)


def _show_lines(stage_keys: Iterable[StageKey]) -> None:
    """Print a line per key, grouped by files."""
    for files, entries in _by_files(stage_keys).items():
        terminal.out(f"\n{files}")
        name = max(len(entry.name) for entry in entries)
        default = max(len(entry.default) for entry in entries)
        for entry in entries:
            start = f"  {entry.name:<{name}}  {entry.default:<{default}}  "
            sentence = re.split(r"\. (?=[A-Z])", entry.meaning)[0].rstrip(".")
            terminal.out(start + textwrap.shorten(sentence, max(20, _width() - len(start)), placeholder=" ..."))


def _show_labelled(texts: dict[str, str | None]) -> None:
    for label, text in texts.items():
        if text:
            _paragraph(text, f"  {label:<8}  ", " " * 12)


def _show_trainer_field(name: str) -> None:
    """Explain a field of TRL's configs. Raises RLHFError C01 if they have none of this name."""
    stages = {stage: config.CONFIGS[stage] for stage in trl_fields.TRAINERS}
    if accepted := [
        (stage, key) for stage, model in stages.items() if (key := trl_fields.trainer_keys(model).get(name))
    ]:
        _show(accepted)
        return
    refused = [problem for model in stages.values() for problem in check_trainer({name: None}, model, lambda key: "")]
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
