"""The keys of the configs: type, choices, bounds, default and meaning of each, and the source of its default.

This one walk over the config classes serves loading, error messages, `rlhf explain`, the JSON Schema, shell completion
and docs/config.md. keys.toml has the meaning of each key.
"""

import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

BOUNDS = ("gt", "ge", "lt", "le")


@dataclass(frozen=True)
class PathField:
    """Annotation of a key for a file, folder or model; `kind` selects how its text is resolved."""

    kind: str  # data, run, model, value, judge, template or folder
    keywords: tuple[str, ...] = ()  # values that are not paths


@dataclass(frozen=True)
class Key:
    """One key. `path` is its full name, such as ppo.kl_coef; the names of a table's entries are NAME."""

    path: str
    field: FieldInfo
    owner: type[BaseModel] | None = None  # None for an entry of a table

    @property
    def name(self) -> str:
        """Return the last part of the path."""
        return self.path.rpartition(".")[2]

    @cached_property
    def parts(self) -> tuple[Any, ...]:
        """Return the types that the key accepts, and their markers and bounds."""
        return (*self.field.metadata, *flatten_annotation(self.field.annotation))

    @cached_property
    def path_field(self) -> PathField | None:
        """Return how a path is resolved, or None if the key takes no path."""
        return next((part for part in self.parts if isinstance(part, PathField)), None)

    @cached_property
    def section(self) -> type[BaseModel] | None:
        """Return the class of the keys below this one, or None."""
        return next((part for part in self.parts if isinstance(part, type) and issubclass(part, BaseModel)), None)

    @property
    def is_section(self) -> bool:
        """Return True if the key has no value, only keys below it."""
        return self.section is self.field.annotation

    @property
    def allows_any_key(self) -> bool:
        """Return True for a table, and for a section that accepts unknown keys (model.new)."""
        return self.entry is not None or bool(self.section and self.section.model_config.get("extra") == "allow")

    @cached_property
    def entry(self) -> "Key | None":
        """Return the entries of a table such as `rewards`, whose names the user chooses, or of a list of sections."""
        for part in self.parts:
            if get_origin(part) is list and hasattr(get_args(part)[0], "model_fields"):
                return Key(f"{self.path}.NUMBER", FieldInfo.from_annotation(get_args(part)[0]))
            if get_origin(part) is dict:
                _, of_value = get_args(part)
                return Key(f"{self.path}.NAME", FieldInfo.from_annotation(of_value))
        return None

    @cached_property
    def bounds(self) -> dict[str, float]:
        """Return the bounds of a number, by pydantic's names."""
        inner = [part.metadata for part in self.parts if isinstance(part, FieldInfo)]
        markers = [*self.parts, *(marker for metadata in inner for marker in metadata)]
        return {name: getattr(marker, name) for marker in markers for name in BOUNDS if hasattr(marker, name)}

    def default(self, if_required: Any) -> Any:
        """Return the default as a JSON value, or `if_required` for a required key."""
        if self.field.is_required():
            return if_required
        return to_jsonable_python(self.field.get_default(call_default_factory=True))

    def suggestions(self) -> list[str]:
        """Return the values that can be listed: a number's default, choices, true, false, null."""
        default = self.default(None)  # other defaults than numbers are among the choices
        values = [str(default)] if isinstance(default, int | float) and not isinstance(default, bool) else []
        for part in self.parts:
            if get_origin(part) is Literal:
                values += map(str, get_args(part))
            elif isinstance(part, PathField):
                values += part.keywords
            elif part is bool:
                values += ["true", "false"]
            elif part is NoneType:
                values.append("null")
        return list(dict.fromkeys(values))

    @cached_property
    def description(self) -> str:
        """Return the meaning and, in brackets at its end, the source of the default."""
        lines = self.field.description or self._text_of_keys_toml()
        text = " ".join(lines.split())
        _, _, source = text.rpartition("[")
        short = re.split(r"[;\]]", source)[0]
        long = texts_by_class()["sources"].get(short)
        return text.removesuffix(source) + source.replace(short, long, 1) if long else text

    def _text_of_keys_toml(self) -> str:
        """Return the text of the key in the table of its class, of a base class, or of shared keys."""
        classes = self.owner.__mro__ if self.owner else ()
        for name in (*(cls.__name__ for cls in classes), "shared"):
            table = texts_by_class().get(name, {})
            if self.name in table:
                return table[self.name]
        return ""

    @property
    def meaning(self) -> str:
        """Return the description without the source."""
        return split_description(self.description)[0]

    @property
    def source(self) -> str | None:
        """Return the source of the default, or None."""
        return split_description(self.description)[1]


def flatten_annotation(annotation: Any) -> Iterator[Any]:
    """Yield the members of unions and the metadata of Annotated, flattened."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *metadata = get_args(annotation)
        yield from metadata
        yield from flatten_annotation(inner)
    elif origin in (Union, UnionType):
        for member in get_args(annotation):
            yield from flatten_annotation(member)
    else:
        yield annotation


@cache
def fields_of(model: type[BaseModel]) -> dict[str, Key]:
    """Return the keys of a config class by name, without those below them."""
    return {name: Key(name, field, model) for name, field in model.model_fields.items()}


@cache
def keys_of(model: type[BaseModel], prefix: str = "") -> dict[str, Key]:
    """Return every key of a config class by path, with sections; entries of a table are `rewards.NAME.weight`."""
    keys: dict[str, Key] = {}
    for field in fields_of(model).values():
        key = replace(field, path=prefix + field.name)
        keys[key.path] = key
        if key.section:
            keys |= keys_of(key.section, f"{key.path}.")
        elif key.entry and key.entry.section:
            keys |= keys_of(key.entry.section, f"{key.entry.path}.")
    return keys


def key_at(model: type[BaseModel], path: Sequence[str], prefix: str = "") -> Key | None:
    """Return the key at a path in a config (rewards, style, weight), or None."""
    name, *rest = path
    full_name = f"{prefix}{name}"
    key = fields_of(model).get(name)
    if key is None:
        return None
    if not rest:
        return replace(key, path=full_name)
    if key.section:
        return key_at(key.section, rest, f"{full_name}.")
    entry_name, *below = rest
    if key.entry and key.entry.section and below:
        return key_at(key.entry.section, below, f"{full_name}.{entry_name}.")
    return None


def key_or_table_at(model: type[BaseModel], path: Sequence[str]) -> Key | None:
    """Return the key at a path, else the innermost key above it with names that the user chooses (data.columns)."""
    for depth in range(len(path), 0, -1):
        key = key_at(model, path[:depth])
        if key and (depth == len(path) or key.allows_any_key):
            return key
    return None


@cache
def texts_by_class() -> dict[str, dict[str, str]]:
    """Return the texts of keys.toml by class and key; `sources` has the short names of sources."""
    return tomllib.loads(Path(__file__).parents[1].joinpath("keys.toml").read_text(encoding="utf-8"))


# Keys whose null means what the machine can; a run may have recorded any value for it.
AUTOMATIC = ("ppo.bf16", "eval.bf16")
# Old name of a key -> its name now. The old one is accepted with a warning (C19).
RENAMED = {
    "data.first_words": "data.truncate_prompt_words",
    "rewards.NAME.number": "rewards.NAME.output",
    "rewards.NAME.reads": "rewards.NAME.input",
}


def current_name(path: str) -> str:
    """Return the path of a key with the name that it has now."""
    for old, new in RENAMED.items():
        section, _, name = old.rpartition(".")
        pattern = re.escape(section).replace("NAME", ".+")
        new_name = new.rpartition(".")[2]
        path = re.sub(rf"^({pattern}\.){name}(?=\.|$)", rf"\g<1>{new_name}", path)
    return path


def with_current_names(tree: Any, prefix: str = "") -> Any:
    """Return the values of a config file under the names that their keys have now."""
    if not isinstance(tree, dict):
        return tree
    renamed = {}
    for name, value in tree.items():
        path = current_name(f"{prefix}{name}")
        renamed[path.removeprefix(prefix)] = with_current_names(value, f"{path}.")
    return renamed


# Sources of defaults

SOURCE_FORMS = {
    "paper": r"(?P<authors>[^,;`]+) (?P<year>\d{4}), (?P<where>arXiv \d{4}\.\d{4,5}|https?://[^\s,;]+), "
    r"(?P<part>(?:section|table|equation|appendix|detail|algorithm|figure) [^,;]+)",
    "system": r"(?P<name>[^,;`]+) (?P<version>(?=\S*\d)[\w.+-]+), (?P<file>[\w./-]+\.\w+)",
    "page": r"(?P<page>docs/[a-z-]+\.md)(?:, section (?P<section>[^,;]+))?",
}
BRACKET = re.compile(r"(?P<meaning>.*\S)\s+\[(?P<source>[^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*)\]", re.DOTALL)


@dataclass(frozen=True)
class DefaultSource:
    """Source of a default: `kind` is paper, system or page, `parts` the named groups of its form."""

    kind: str
    parts: dict[str, str]
    remark: str | None


def parse_source(text: str) -> DefaultSource | None:
    """Return the source that the text of a bracket names, or None if it has none of these forms."""
    for kind, form in SOURCE_FORMS.items():
        match = re.fullmatch(rf"{form}(?:; (?P<remark>\S.*))?", text)
        if match:
            parts = match.groupdict()
            remark = parts.pop("remark")
            return DefaultSource(kind, parts, remark)
    return None


def split_description(description: str) -> tuple[str, str | None]:
    """Split a description into (meaning, source); the source is None if the description does not end in one."""
    match = BRACKET.fullmatch(description)
    if match and parse_source(match["source"]):
        return match["meaning"], match["source"]
    return description, None
