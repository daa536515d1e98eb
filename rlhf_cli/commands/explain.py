"""`rlhf explain`: print the meaning, default and source of a config key, or of an error code. Imports no torch."""

import json
import re
import shutil
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rlhf_cli import config, terminal
from rlhf_cli.commands.report import rules
from rlhf_cli.config import trl_fields
from rlhf_cli.config.aliases import ALIASES, find_alias
from rlhf_cli.config.json_schema import split_description
from rlhf_cli.config.paths import PathField, annotation_kind, field_at, field_kind
from rlhf_cli.config.ppo_options import RECIPES
from rlhf_cli.error_codes import CODES
from rlhf_cli.errors import RLHFError, closest_match

PATH_TEXTS = {
    "data": "a file, a folder or a dataset of the hub",
    "model": "a folder or a hub id",
    "run": "a folder",
    "judge": "module:function, a folder or a hub id",
    "template": "a file, a text or chatml",
}
TYPE_TEXTS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
EXIT_TEXTS = {0: "0: it only ever warns", 1: "1: it fails at run time", 2: "2: reported before anything runs"}


@dataclass(frozen=True)
class KeyFacts:
    """Texts about a key."""

    value: str
    default: str
    meaning: str
    source: str | None
    recipes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Entry:
    """A key with the files that have it; equal keys of several stages (sft.bf16, reward.bf16) are one entry."""

    keys: tuple[str, ...]
    files: tuple[str, ...]
    facts: KeyFacts

    @property
    def name(self) -> str:
        return ", ".join(self.keys)


StageKey = tuple[str, str, FieldInfo]  # stage, key, field


def explain(name: str) -> None:
    """Explain a key, section or code; for any other word list related keys and metrics. Case is ignored.

    Raises RLHFError C01 if nothing matches.
    """
    matches = _find(name) or _find(name.lower())
    alias = _find_alias(name) or _find_alias(name.lower())
    if name.upper() in CODES:
        _show_code(name.upper())
    elif matches:
        _show(matches)
        elsewhere = [match for match in _keys_ending_in(name) if match not in matches]
        for key, files in _files_by((key, stage) for stage, key, _ in elsewhere).items():
            terminal.out(f"\nalso {key}   ({files})")
        similar = [match for match in _keys_named_like(name) if match not in matches]
        if similar and not any(_is_section(field) for *_, field in matches):
            terminal.out(f"\nalso with {name.lower()} in the name:")
            _show_lines(similar)
        _show_metrics(name)
    elif alias:
        matches, text = alias
        terminal.out(text + "\n")
        _show(matches)
    elif name.startswith("trainer.") or any(name in trl_fields.fields_of(stage) for stage in trl_fields.TRAINERS):
        _show_trl_field(name.removeprefix("trainer."))
    elif find_alias(name.rpartition(".")[2]) or not (_keys_named_like(name) or _described_by(name) or _metrics(name)):
        raise _unknown_error(name)
    else:
        terminal.out(f"no key is called {name}; this has to do with it:")
        _show_lines(_keys_named_like(name) or _described_by(name))
        _show_metrics(name)


def explain_all() -> None:
    """Print every key of every file, shared ones once, and every error code."""
    for title, entries in every_key().items():
        terminal.out(f"{title}\n{'-' * len(title)}\n")
        for entry in entries:
            _paragraph(f"{entry.name}: {entry.facts.default}   ({entry.facts.value})", "", "    ")
            _paragraph(entry.facts.meaning, "    ")
            for line in ([f"[{entry.facts.source}]"] if entry.facts.source else []) + [*entry.facts.recipes]:
                _paragraph(line, "    ")
            terminal.out()
    terminal.out("Codes, with the exit code of an error; 0 only warns\n" + "-" * 52 + "\n")
    for code, description in CODES.items():
        terminal.out(f"{code}  {description.exit}  {description.title}")


def every_key() -> dict[str, list[Entry]]:
    """Return every key, grouped by the files that have it; the largest groups of files first."""
    groups = _by_files(_entries(each for each in _keys() if not _is_section(each[2])))
    everywhere = ", ".join(f"{stage}.yaml" for stage in config.CONFIGS)
    return {f"Every file: {files}" if files == everywhere else files: entries for files, entries in groups.items()}


# Lookup by name


def _keys() -> list[StageKey]:
    return [(stage, key, field) for stage in config.CONFIGS for key, field in config.keys(stage).items()]


def _find(name: str) -> list[StageKey]:
    """Return the keys with this path, else all that end in it, such as every learning_rate."""
    exact = [found for stage in config.CONFIGS if (found := _key_at(stage, name))]
    return exact or _keys_ending_in(name)


def _keys_ending_in(name: str) -> list[StageKey]:
    return [each for each in _keys() if each[1].endswith(f".{name}")]


def _keys_named_like(name: str) -> list[StageKey]:
    """Return the keys whose last part contains all words of `name`."""
    return [] if "." in name else [each for each in _keys() if _words(name) <= _words(each[1].rpartition(".")[2])]


def _described_by(name: str) -> list[StageKey]:
    """Return the keys whose description contains all words of `name`."""
    return [each for each in _keys() if _words(name) <= _words(split_description(each[2].description or "")[0])]


def _metrics(name: str) -> list[tuple[str, str]]:
    """Return (metric, title) of the metrics whose names contain all words of `name`."""
    return [(rule.key, rule.title) for rule in rules.RULES if _words(name) <= _words(rule.key)]


def _words(text: str) -> set[str]:
    return set(re.findall("[a-z0-9]+", text.lower()))


def _key_at(stage: str, name: str) -> StageKey | None:
    """Return the key at a path of a stage's config, or the table around a user-defined name (data.columns.prompt)."""
    model, parts = config.CONFIGS[stage], tuple(name.split("."))
    if field := field_at(model, parts):
        return stage, name, field
    depth = next((depth for depth in range(len(parts) - 1, 0, -1) if field_at(model, parts[:depth])), 0)
    above, field = ".".join(parts[:depth]), field_at(model, parts[:depth])
    if field is None or above == "trainer":
        return None
    below = field_kind(field)
    table = below.entries is not None and (annotation_kind(below.entries).model is None or len(parts) == depth + 1)
    hands_on = below.model is not None and below.model.model_config.get("extra") == "allow"
    return (stage, above, field) if table or hands_on else None


def _find_alias(name: str) -> tuple[list[StageKey], str] | None:
    """Return the keys that an old or external name stands for, with a text; None if there are none."""
    section, _, last = name.rpartition(".")
    alias = find_alias(last)
    if alias is None or alias.key is None:
        return None
    new = alias.key
    words = ", ".join(f"{old} is {new_value}" for old, new_value in alias.values.items() if old != new_value)
    text = "; ".join(filter(None, (f"{name} is called {new} here", alias.note, words)))
    return (_find(f"{section}.{new}") if section else []) or _find(new), text


def _unknown_error(name: str) -> RLHFError:
    if re.fullmatch(r"[A-Za-z][0-9]{2}", name):
        family = [code for code in CODES if code[0] == name[0].upper()]
        hint = f"there are {family[0]} to {family[-1]}" if family else "rlhf explain --all lists all codes"
        return RLHFError("C01", f"unknown code {name.upper()}", hint=hint)
    if alias := find_alias(name.rpartition(".")[2]):
        return RLHFError("C01", f"there is no key {name}", hint=alias.note)
    paths, renamed = [key for _, key, _ in _keys()], [old for old, alias in ALIASES.items() if alias.key]
    known = paths if "." in name else [*(path.rpartition(".")[2] for path in paths), *renamed]
    near = closest_match(name, known) or closest_match(
        name.rpartition(".")[2], [path.rpartition(".")[2] for path in paths]
    )
    hint = f"did you mean {near}?" if near else "rlhf explain --all lists all keys and codes"
    return RLHFError("C01", f"unknown key {name}", hint=hint)


# Texts


def _entries(found: Iterable[StageKey]) -> list[Entry]:
    """Merge keys with the same texts in several files into one entry."""
    alike: dict[tuple[str, KeyFacts], list[tuple[str, str]]] = {}
    for stage, key, field in found:
        # A stage's own settings are in the section of its name.
        shared = key.replace(f"{stage}.", ".", 1) if key.startswith(f"{stage}.") else key
        alike.setdefault((shared, _facts(key, field)), []).append((f"{stage}.yaml", key))
    return [
        Entry(tuple(dict.fromkeys(key for _, key in places)), tuple(dict.fromkeys(file for file, _ in places)), facts)
        for (_, facts), places in alike.items()
    ]


def _files_by(pairs: Iterable[tuple[Any, str]]) -> dict[Any, str]:
    """Group (item, stage) pairs into item -> files of its stages."""
    files: dict[Any, list[str]] = {}
    for item, stage in pairs:
        files.setdefault(item, []).append(f"{stage}.yaml")
    return {item: ", ".join(names) for item, names in files.items()}


def _by_files(entries: list[Entry]) -> dict[str, list[Entry]]:
    """Group entries by the files that have them, the largest groups of files first."""
    groups: dict[str, list[Entry]] = {}
    for entry in sorted(entries, key=lambda entry: -len(entry.files)):
        groups.setdefault(", ".join(entry.files), []).append(entry)
    return groups


def _is_section(field: FieldInfo) -> bool:
    """Return True if a key has no value of its own, only keys below it."""
    return field_kind(field).model is field.annotation


def _facts(key: str, field: FieldInfo) -> KeyFacts:
    meaning, source = split_description(field.description or "")
    if key == "stage":  # constant in each file
        return KeyFacts(_one_of(config.CONFIGS), "the file's stage", meaning, source)
    default = "required" if field.is_required() else _shown(field.get_default(call_default_factory=True))
    return KeyFacts(_describe_type(field.annotation, tuple(field.metadata)), default, meaning, source, _recipes(key))


def _recipes(key: str) -> tuple[str, ...]:
    """Describe the changes of a default by PPO recipes."""
    changed = {recipe: changes.get(key.removeprefix("ppo.")) for recipe, changes in RECIPES.items()}
    return tuple(f"recipe {recipe}: {_shown(new[0])}  [{new[1]}]" for recipe, new in changed.items() if new)


def _shown(value: Any) -> str:
    """Format a default as in YAML."""
    if isinstance(value, BaseModel):
        return "the keys below"
    if isinstance(value, str):
        return value
    return re.sub(r"e([+-])0", r"e\1", str(value)) if isinstance(value, float) else json.dumps(value)


def _describe_type(annotation: Any, notes: tuple[Any, ...] = ()) -> str:
    """Describe the values of a type. `notes` are pydantic's bounds and markers."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inside = [each for note in arguments[1:] for each in (note.metadata if isinstance(note, FieldInfo) else [note])]
        return _describe_type(arguments[0], (*notes, *inside))
    if origin in (Union, UnionType):
        words = ["null" if each is NoneType else _describe_type(each, notes) for each in arguments]
        return (", or " if any("," in word for word in words) else " or ").join(words)
    mark = next((note for note in notes if isinstance(note, PathField)), None)
    if mark:
        return _one_of([*mark.keywords, PATH_TEXTS["model"]]) if mark.keywords else PATH_TEXTS[mark.kind]
    if origin is Literal:
        return _one_of(map(str, arguments))
    if origin is list:
        return f"a list, each {_describe_type(arguments[0])}"
    if origin is dict:
        return "names, each with " + ("a value" if arguments[1] is Any else _describe_type(arguments[1]))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "{" + ", ".join(annotation.model_fields) + "}"
    found = {word: getattr(note, name) for name, word in BOUNDS.items() for note in notes if hasattr(note, name)}
    bounds = " and ".join(f"{word} {bound:.15g}" for word, bound in found.items())
    return f"{TYPE_TEXTS[annotation]}, {bounds}" if bounds else TYPE_TEXTS[annotation]


def _one_of(words: Iterable[str]) -> str:
    known = list(words)
    return f"one of {', '.join(known)}" if len(known) > 1 else known[0]


# On the terminal


def _show(found: list[StageKey]) -> None:
    """Print each key in full, and a line per key below a section."""
    for number, entry in enumerate(_entries(each for each in found if not _is_section(each[2]))):
        _show_facts(entry.name, entry.files, entry.facts, first=number == 0)
    inner = [each for each in _keys() if any(_contains(outer, each) for outer in found)]
    if not inner:
        return
    sections = [
        ((key, split_description(field.description or "")[0]), stage)
        for stage, key, field in found
        if _is_section(field)
    ]
    for (key, meaning), files in _files_by(sections).items():
        terminal.out(f"{key}   ({files})   {meaning}")
    _show_lines(inner)


def _show_lines(found: Iterable[StageKey]) -> None:
    """Print a line per key, grouped by files."""
    for files, entries in _by_files(_entries(each for each in found if not _is_section(each[2]))).items():
        terminal.out(f"\n{files}")
        name = max(len(entry.name) for entry in entries)
        default = max(len(entry.facts.default) for entry in entries)
        for entry in entries:
            start = f"  {entry.name:<{name}}  {entry.facts.default:<{default}}  "
            sentence = re.split(r"\. (?=[A-Z])", entry.facts.meaning)[0].rstrip(".")
            terminal.out(start + textwrap.shorten(sentence, max(20, _width() - len(start)), placeholder=" ..."))


def _show_metrics(name: str) -> None:
    if found := _metrics(name):
        terminal.out("\nmetrics of PPO (docs/tuning.md)")
        width = max(len(key) for key, _ in found)
        for key, title in found:
            terminal.out(f"  {key:<{width}}  {title}")


def _contains(outer: StageKey, inner: StageKey) -> bool:
    return outer[0] == inner[0] and inner[1].startswith(f"{outer[1]}.")


def _show_facts(name: str, files: Iterable[str], facts: KeyFacts, *, first: bool) -> None:
    if not first:
        terminal.out()
    _paragraph(f"{name}   ({', '.join(files)})", "")
    lines = {"value": facts.value, "default": facts.default, "meaning": facts.meaning, "source": facts.source}
    for label, text in lines.items():
        if text:
            _paragraph(text, f"  {label:<8}  ", " " * 12)
    for line in facts.recipes:
        _paragraph(line, "  ", " " * 12)


def _show_code(code: str) -> None:
    entry = CODES[code]
    terminal.out(f"{code}  {entry.title}")
    outcome = EXIT_TEXTS[entry.exit] + (f"; only a warning {entry.warns}" if entry.warns else "")
    for label, text in (("meaning", entry.meaning), ("fix", entry.fix), ("exit", outcome)):
        _paragraph(text, f"  {label:<8}  ", " " * 12)


def _show_trl_field(name: str) -> None:
    """Explain a TRL field that `trainer:` accepts. Raises RLHFError C01 if TRL has no such field."""
    fields = {stage: trl_fields.fields_of(stage).get(name, {}) for stage in trl_fields.TRAINERS}
    refused = {
        stage: trl_fields.check_trainer({name: field.get("default")}, config.CONFIGS[stage], lambda key: "")
        for stage, field in fields.items()
    }
    elsewhere = dict.fromkeys(each for problems in refused.values() for each in problems if each.code == "C02")
    for problem in elsewhere:  # set by the pipeline, or has a key of its own
        terminal.out(f"{problem.text.rstrip(':')}: {problem.hint}")
    if elsewhere:
        return
    if all(refused.values()):
        raise RLHFError.from_problems(refused["sft"])
    version = trl_fields.source_versions()["trl"].rpartition(".")[0]
    stages = [stage for stage in fields if not refused[stage]]
    groups = [stages] if len({str(fields[stage]) for stage in stages}) == 1 else [[stage] for stage in stages]
    for number, alike in enumerate(groups):
        field = fields[alike[0]]
        facts = KeyFacts(
            _one_of(field.get("choices") or [" or ".join(trl_fields.TYPE_NAMES[kind] for kind in field["types"])]),
            _shown(field["default"]),
            f"The field {name} of TRL's {' and '.join(map(trl_fields.TRAINERS.__getitem__, alike))}, unchanged.",
            f"TRL {version}, trl/trainer/{alike[0]}_config.py",
        )
        _show_facts(f"trainer.{name}", [f"{stage}.yaml" for stage in alike], facts, first=number == 0)


def _paragraph(text: str, start: str, rest: str | None = None) -> None:
    """Print wrapped text without breaking paths and commands."""
    wrapper = textwrap.TextWrapper(_width(), start, break_long_words=False, break_on_hyphens=False)
    wrapper.subsequent_indent = start if rest is None else rest
    terminal.out(wrapper.fill(text))


def _width() -> int:
    return max(40, min(100, shutil.get_terminal_size((100, 24)).columns))
