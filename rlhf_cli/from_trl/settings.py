"""What a reader finds in a file of TRL's: options by their names there, and what it could not read."""

import json
import re
from dataclasses import dataclass, field
from typing import Any

NUMBER = re.compile(r"[-+]?[\d_]*\.?\d[\d_]*\.?([eE][-+]?\d+)?")
WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None, "": None}


@dataclass(frozen=True)
class Setting:
    """An option as the file has it, by TRL's name. `where` is FILE:LINE.

    `call` is the function whose argument says it, where that has another name.
    """

    name: str
    value: Any
    where: str
    call: str = ""

    @property
    def shown(self) -> str:
        """What the file calls it."""
        return self.call or self.name


@dataclass(frozen=True)
class Unread:
    """Something that belongs to the settings, and whose value the text alone does not tell."""

    what: str
    where: str
    why: str


@dataclass
class Read:
    """All that a file tells. `signs` are the classes of TRL's that it names."""

    settings: list[Setting] = field(default_factory=list)
    unread: list[Unread] = field(default_factory=list)
    signs: set[str] = field(default_factory=set)

    def add(self, name: str, value: Any, where: str, call: str = "") -> None:
        """An option and its value."""
        self.settings.append(Setting(name, value, where, call))

    def lose(self, what: str, where: str, why: str) -> None:
        """Something that could not be read; told once."""
        if (lost := Unread(what, where, why)) not in self.unread:
            self.unread.append(lost)


def value_of(text: str) -> Any:
    """The value that a text stands for, as transformers' argument parser and Python's JSON read it."""
    if text in WORDS:
        return WORDS[text]
    try:
        if NUMBER.fullmatch(text):
            return float(text) if re.search(r"[.eE]", text) else int(text)
        return json.loads(text) if text[0] in "{[" else text
    except (ValueError, RecursionError):
        return text
