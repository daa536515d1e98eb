"""Where a key's default comes from, as the key's description tells it.

The source of a default stands in brackets at the end of the key's description, in one of three forms, each with an
optional `; remark` behind it:

- a paper: AUTHORS YEAR, arXiv NNNN.NNNNN (or a URL), PART    Ouyang et al. 2022, arXiv 2203.02155, section 3.5
- a system: NAME VERSION, FILE                                TRL 1.16, trl/trainer/sft_config.py
- a command of this repository that holds the default up      `pytest tests/test_config.py::test_the_expert_defaults`
"""

import re
from dataclasses import dataclass

FORMS = {
    "paper": r"(?P<authors>[^,;`]+) (?P<year>\d{4}), (?P<where>arXiv \d{4}\.\d{4,5}|https?://[^\s,;]+), "
    r"(?P<part>(?:section|table|equation|appendix|detail|algorithm|figure) [^,;]+)",
    "system": r"(?P<name>[^,;`]+) (?P<version>(?=\S*\d)[\w.+-]+), (?P<file>[\w./-]+\.\w+)",
    "command": r"`(?P<command>(?:make|pytest|python|rlhf) [^`]+)`",
}
BRACKET = re.compile(r"(?P<meaning>.*\S)\s+\[(?P<source>[^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*)\]", re.DOTALL)


@dataclass(frozen=True)
class Source:
    """Where a default comes from: `kind` is paper, system or command, `parts` the groups of its form."""

    kind: str
    parts: dict[str, str]
    remark: str | None


def parse(text: str) -> Source | None:
    """The source that a bracket's text names; None where it is of none of the three forms."""
    for kind, form in FORMS.items():
        if match := re.fullmatch(rf"{form}(?:; (?P<remark>\S.*))?", text):
            parts = {name: value for name, value in match.groupdict().items() if value and name != "remark"}
            return Source(kind, parts, match["remark"])
    return None


def split(description: str) -> tuple[str, str | None]:
    """(meaning, source) of a description; None where what it ends with is no source."""
    match = BRACKET.fullmatch(description)
    return (match["meaning"], match["source"]) if match and parse(match["source"]) else (description, None)


def in_an_editor(description: str) -> str:
    """A description as an editor shows it: with the paper or the system that the default is of, without commands."""
    meaning, found = split(description)
    source = parse(found) if found else None
    if source is None or source.kind == "command":
        return meaning
    where = ("authors", "year", "where", "part") if source.kind == "paper" else ("name", "version")
    told = [source.parts[part] for part in where]
    name = ", ".join([" ".join(told[:2]), *told[2:]])
    return f"{meaning} Default: see {name}{f'; {source.remark}' if source.remark else ''}."
