"""Sources of the defaults, which end the descriptions of keys.

The source of a default is the bracket at the end of the key's description, in one of four forms, each optionally
followed by `; remark`:

- a paper: AUTHORS YEAR, arXiv NNNN.NNNNN (or a URL), PART    Ouyang et al. 2022, arXiv 2203.02155, section 3.5
- a system: NAME VERSION, FILE                                TRL 1.16, trl/trainer/sft_config.py
- a page of the documentation, optionally with a section      docs/config.md, section Project defaults
- a command that a user can run                               `rlhf check runs/demo`
"""

import re
from dataclasses import dataclass

FORMS = {
    "paper": r"(?P<authors>[^,;`]+) (?P<year>\d{4}), (?P<where>arXiv \d{4}\.\d{4,5}|https?://[^\s,;]+), "
    r"(?P<part>(?:section|table|equation|appendix|detail|algorithm|figure) [^,;]+)",
    "system": r"(?P<name>[^,;`]+) (?P<version>(?=\S*\d)[\w.+-]+), (?P<file>[\w./-]+\.\w+)",
    "page": r"(?P<page>docs/[a-z-]+\.md)(?:, section (?P<section>[^,;]+))?",
    "command": r"`(?P<command>(?:make|rlhf) [^`]+)`",
}
BRACKET = re.compile(r"(?P<meaning>.*\S)\s+\[(?P<source>[^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*)\]", re.DOTALL)


@dataclass(frozen=True)
class Source:
    """Source of a default: `kind` is paper, system, page or command, `parts` the named groups of its form."""

    kind: str
    parts: dict[str, str]
    remark: str | None


def parse(text: str) -> Source | None:
    """Return the source that the text of a bracket names, or None if it has none of the four forms."""
    for kind, form in FORMS.items():
        if match := re.fullmatch(rf"{form}(?:; (?P<remark>\S.*))?", text):
            parts = {name: value for name, value in match.groupdict().items() if value and name != "remark"}
            return Source(kind, parts, match["remark"])
    return None


def split(description: str) -> tuple[str, str | None]:
    """Return (meaning, source) of a description; the source is None if the description does not end in one."""
    match = BRACKET.fullmatch(description)
    return (match["meaning"], match["source"]) if match and parse(match["source"]) else (description, None)


def in_an_editor(description: str) -> str:
    """Return a description for an editor, with the paper or system of its default and without pages and commands."""
    meaning, found = split(description)
    source = parse(found) if found else None
    if source is None or source.kind in ("page", "command"):
        return meaning
    where = ("authors", "year", "where", "part") if source.kind == "paper" else ("name", "version")
    parts = [source.parts[part] for part in where]
    name = ", ".join([" ".join(parts[:2]), *parts[2:]])
    return f"{meaning} Source of the default: {name}{f'; {source.remark}' if source.remark else ''}."
