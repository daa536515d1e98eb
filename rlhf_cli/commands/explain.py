"""`rlhf explain`: what a key does, its default and where that comes from; what a code means. Imports no torch."""

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

PLACES = {
    "data": "a file, a folder or a dataset of the hub",
    "model": "a folder or a hub id",
    "run": "a folder",
    "judge": "module:function, a folder or a hub id",
    "template": "a file, a text or chatml",
}
PLAIN = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
OUTCOMES = {0: "0: it only ever warns", 1: "1: it fails at run time", 2: "2: told before anything runs"}


@dataclass(frozen=True)
class Facts:
    """What is told of a key, in words."""

    value: str
    default: str
    meaning: str
    source: str | None
    recipes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Entry:
    """A key, and the files that have it. Stages that share a section share its keys: sft.bf16, reward.bf16."""

    keys: tuple[str, ...]
    files: tuple[str, ...]
    facts: Facts

    @property
    def name(self) -> str:
        return ", ".join(self.keys)


Found = tuple[str, str, FieldInfo]  # stage, key, field


def explain(name: str) -> None:
    """Print what a key, a section or a code is; of a word that is none of them, the keys and metrics that have to do
    with it. Capitals do not count. Raises RLHFError C01 where there are none.
    """
    found = _find(name) or _find(name.lower())
    said = _renamed(name) or _renamed(name.lower())
    if name.upper() in CODES:
        _show_code(name.upper())
    elif found:
        _show(found)
        elsewhere = [each for each in _ending_in(name) if each not in found]
        for key, files in _files_by((key, stage) for stage, key, _ in elsewhere).items():
            terminal.out(f"\nalso {key}   ({files})")
        like = [each for each in _named_like(name) if each not in found]
        if like and not any(_is_section(field) for *_, field in found):
            terminal.out(f"\nalso with {name.lower()} in the name:")
            _show_lines(like)
        _show_metrics(name)
    elif said:
        new, text = said
        terminal.out(text + "\n")
        _show(new)
    elif name.startswith("trainer.") or any(name in trl_fields.fields_of(stage) for stage in trl_fields.TRAINERS):
        _show_field(name.removeprefix("trainer."))
    elif find_alias(name.rpartition(".")[2]) or not (_named_like(name) or _telling_of(name) or _metrics(name)):
        raise _unknown(name)
    else:
        terminal.out(f"no key is called {name}; this has to do with it:")
        _show_lines(_named_like(name) or _telling_of(name))
        _show_metrics(name)


def explain_all() -> None:
    """Print every key of every file, what several files share once, and every code."""
    for title, entries in every_key().items():
        terminal.out(f"{title}\n{'-' * len(title)}\n")
        for entry in entries:
            _paragraph(f"{entry.name}: {entry.facts.default}   ({entry.facts.value})", "", "    ")
            _paragraph(entry.facts.meaning, "    ")
            for line in ([f"[{entry.facts.source}]"] if entry.facts.source else []) + [*entry.facts.recipes]:
                _paragraph(line, "    ")
            terminal.out()
    terminal.out("Codes, with the exit code of an error; 0 only warns\n" + "-" * 52 + "\n")
    for code, told in CODES.items():
        terminal.out(f"{code}  {told.exit}  {told.title}")


def every_key() -> dict[str, list[Entry]]:
    """Every key of every file, by the files that have it; those of most files come first."""
    found = _by_files(_entries(each for each in _keys() if not _is_section(each[2])))
    everywhere = ", ".join(f"{stage}.yaml" for stage in config.CONFIGS)
    return {f"Every file: {files}" if files == everywhere else files: entries for files, entries in found.items()}


# What is found under a name


def _keys() -> list[Found]:
    return [(stage, key, field) for stage in config.CONFIGS for key, field in config.keys(stage).items()]


def _find(name: str) -> list[Found]:
    """The keys of this full path; or else all that it ends, such as every learning_rate."""
    exact = [found for stage in config.CONFIGS if (found := _at(stage, name))]
    return exact or _ending_in(name)


def _ending_in(name: str) -> list[Found]:
    return [each for each in _keys() if each[1].endswith(f".{name}")]


def _named_like(name: str) -> list[Found]:
    """The keys in whose own names all words of `name` stand."""
    return [] if "." in name else [each for each in _keys() if _words(name) <= _words(each[1].rpartition(".")[2])]


def _telling_of(name: str) -> list[Found]:
    """The keys in whose meanings all words of `name` stand."""
    return [each for each in _keys() if _words(name) <= _words(split_description(each[2].description or "")[0])]


def _metrics(name: str) -> list[tuple[str, str]]:
    """(metric, title) of those in whose names all words of `name` stand."""
    return [(rule.key, rule.title) for rule in rules.RULES if _words(name) <= _words(rule.key)]


def _words(text: str) -> set[str]:
    return set(re.findall("[a-z0-9]+", text.lower()))


def _at(stage: str, name: str) -> Found | None:
    """The key that a path names in a stage's file; of a name of the user's own (data.columns.prompt) what holds it."""
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


def _renamed(name: str) -> tuple[list[Found], str] | None:
    """The keys that an old or foreign name means, and how to say so."""
    section, _, last = name.rpartition(".")
    found = find_alias(last)
    if found is None or found.key is None:
        return None
    new = found.key
    words = ", ".join(f"{theirs} is {ours}" for theirs, ours in found.values.items() if theirs != ours)
    text = "; ".join(filter(None, (f"{name} is called {new} here", found.note, words)))
    return (_find(f"{section}.{new}") if section else []) or _find(new), text


def _unknown(name: str) -> RLHFError:
    if re.fullmatch(r"[A-Za-z][0-9]{2}", name):
        family = [code for code in CODES if code[0] == name[0].upper()]
        hint = f"there are {family[0]} to {family[-1]}" if family else "rlhf explain --all lists all codes"
        return RLHFError("C01", f"unknown code {name.upper()}", hint=hint)
    if theirs := find_alias(name.rpartition(".")[2]):
        return RLHFError("C01", f"there is no key {name}", hint=theirs.note)
    paths, renamed = [key for _, key, _ in _keys()], [old for old, theirs in ALIASES.items() if theirs.key]
    known = paths if "." in name else [*(path.rpartition(".")[2] for path in paths), *renamed]
    near = closest_match(name, known) or closest_match(
        name.rpartition(".")[2], [path.rpartition(".")[2] for path in paths]
    )
    hint = f"did you mean {near}?" if near else "rlhf explain --all lists all keys and codes"
    return RLHFError("C01", f"unknown key {name}", hint=hint)


# Keys in words


def _entries(found: Iterable[Found]) -> list[Entry]:
    """One entry for what is told alike of several files."""
    alike: dict[tuple[str, Facts], list[tuple[str, str]]] = {}
    for stage, key, field in found:
        # A stage's numbers stand in the section of its name.
        shared = key.replace(f"{stage}.", ".", 1) if key.startswith(f"{stage}.") else key
        alike.setdefault((shared, _facts(key, field)), []).append((f"{stage}.yaml", key))
    return [
        Entry(tuple(dict.fromkeys(key for _, key in places)), tuple(dict.fromkeys(file for file, _ in places)), facts)
        for (_, facts), places in alike.items()
    ]


def _files_by(told: Iterable[tuple[Any, str]]) -> dict[Any, str]:
    """What is told of stages -> the files of those stages."""
    found: dict[Any, list[str]] = {}
    for what, stage in told:
        found.setdefault(what, []).append(f"{stage}.yaml")
    return {what: ", ".join(files) for what, files in found.items()}


def _by_files(entries: list[Entry]) -> dict[str, list[Entry]]:
    """Entries by the files that have them, those of most files first."""
    found: dict[str, list[Entry]] = {}
    for entry in sorted(entries, key=lambda entry: -len(entry.files)):
        found.setdefault(", ".join(entry.files), []).append(entry)
    return found


def _is_section(field: FieldInfo) -> bool:
    """Whether a key has no value but those of the keys below it."""
    return field_kind(field).model is field.annotation


def _facts(key: str, field: FieldInfo) -> Facts:
    meaning, source = split_description(field.description or "")
    if key == "stage":  # one word in each file
        return Facts(_one_of(config.CONFIGS), "the file's stage", meaning, source)
    default = "required" if field.is_required() else _shown(field.get_default(call_default_factory=True))
    return Facts(_in_words(field.annotation, tuple(field.metadata)), default, meaning, source, _recipes(key))


def _recipes(key: str) -> tuple[str, ...]:
    """What each recipe of PPO makes of a default."""
    told = {recipe: changes.get(key.removeprefix("ppo.")) for recipe, changes in RECIPES.items()}
    return tuple(f"recipe {recipe}: {_shown(new[0])}  [{new[1]}]" for recipe, new in told.items() if new)


def _shown(value: Any) -> str:
    """A default as it would be written in a YAML; a section that may be null: what is below it."""
    if isinstance(value, BaseModel):
        return "the keys below"
    if isinstance(value, str):
        return value
    return re.sub(r"e([+-])0", r"e\1", str(value)) if isinstance(value, float) else json.dumps(value)


def _in_words(annotation: Any, notes: tuple[Any, ...] = ()) -> str:
    """What a key takes. `notes` are bounds and marks that pydantic keeps beside the type."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inside = [each for note in arguments[1:] for each in (note.metadata if isinstance(note, FieldInfo) else [note])]
        return _in_words(arguments[0], (*notes, *inside))
    if origin in (Union, UnionType):
        words = ["null" if each is NoneType else _in_words(each, notes) for each in arguments]
        return (", or " if any("," in word for word in words) else " or ").join(words)
    mark = next((note for note in notes if isinstance(note, PathField)), None)
    if mark:
        return _one_of([*mark.keywords, PLACES["model"]]) if mark.keywords else PLACES[mark.kind]
    if origin is Literal:
        return _one_of(map(str, arguments))
    if origin is list:
        return f"a list, each {_in_words(arguments[0])}"
    if origin is dict:
        return "names, each with " + ("a value" if arguments[1] is Any else _in_words(arguments[1]))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "{" + ", ".join(annotation.model_fields) + "}"
    found = {word: getattr(note, name) for name, word in BOUNDS.items() for note in notes if hasattr(note, name)}
    bounds = " and ".join(f"{word} {bound:.15g}" for word, bound in found.items())
    return f"{PLAIN[annotation]}, {bounds}" if bounds else PLAIN[annotation]


def _one_of(words: Iterable[str]) -> str:
    known = list(words)
    return f"one of {', '.join(known)}" if len(known) > 1 else known[0]


# On the terminal


def _show(found: list[Found]) -> None:
    """Each key in full; of a section one line for each key below it."""
    for number, entry in enumerate(_entries(each for each in found if not _is_section(each[2]))):
        _show_facts(entry.name, entry.files, entry.facts, first=number == 0)
    inner = [each for each in _keys() if any(_holds(outer, each) for outer in found)]
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


def _show_lines(found: Iterable[Found]) -> None:
    """One line for each key, by the files that have it."""
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


def _holds(outer: Found, inner: Found) -> bool:
    return outer[0] == inner[0] and inner[1].startswith(f"{outer[1]}.")


def _show_facts(name: str, files: Iterable[str], facts: Facts, *, first: bool) -> None:
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
    told = CODES[code]
    terminal.out(f"{code}  {told.title}")
    outcome = OUTCOMES[told.exit] + (f"; only a warning {told.warns}" if told.warns else "")
    for label, text in (("meaning", told.meaning), ("fix", told.fix), ("exit", outcome)):
        _paragraph(text, f"  {label:<8}  ", " " * 12)


def _show_field(name: str) -> None:
    """A field of TRL's that `trainer:` hands on. Raises RLHFError C01 where TRL has none of this name."""
    fields = {stage: trl_fields.fields_of(stage).get(name, {}) for stage in trl_fields.TRAINERS}
    refused = {
        stage: trl_fields.check_trainer({name: field.get("default")}, config.CONFIGS[stage], lambda key: "")
        for stage, field in fields.items()
    }
    elsewhere = dict.fromkeys(each for problems in refused.values() for each in problems if each.code == "C02")
    for problem in elsewhere:  # set by the pipeline, or a key of ours
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
        facts = Facts(
            _one_of(field.get("choices") or [" or ".join(trl_fields.TYPE_NAMES[kind] for kind in field["types"])]),
            _shown(field["default"]),
            f"The field {name} of TRL's {' and '.join(map(trl_fields.TRAINERS.__getitem__, alike))}, unchanged.",
            f"TRL {version}, trl/trainer/{alike[0]}_config.py",
        )
        _show_facts(f"trainer.{name}", [f"{stage}.yaml" for stage in alike], facts, first=number == 0)


def _paragraph(text: str, start: str, rest: str | None = None) -> None:
    """Wrapped text; paths and commands are never broken."""
    wrapper = textwrap.TextWrapper(_width(), start, break_long_words=False, break_on_hyphens=False)
    wrapper.subsequent_indent = start if rest is None else rest
    terminal.out(wrapper.fill(text))


def _width() -> int:
    return max(40, min(100, shutil.get_terminal_size((100, 24)).columns))
