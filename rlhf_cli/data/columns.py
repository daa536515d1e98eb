"""Names of columns in other people's files: which look like a column of rlhf, and which hold labels or scores."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rlhf_cli.data.readers import BadRow, describe_value
from rlhf_cli.errors import closest_match

SYSTEM_COLUMNS = ("system", "system_prompt")
# What these hold is meant for the model: that they are not read is a warning, not a line of the log.
MEANT_FOR_THE_MODEL = (*SYSTEM_COLUMNS, "context", "history")
# Parts of names that mean the same as a column of rlhf; the best one first.
SYNONYMS = {
    "prompt": ("prompt", "question", "query", "instruction", "input", "problem"),
    "completion": ("completion", "response", "answer", "output", "reply", "chosen"),
    "chosen": ("chosen", "better", "preferred", "accepted"),
    "rejected": ("rejected", "worse", "dispreferred"),
}
OPPOSITE_OF_CHOSEN = re.compile(r"reject|worse|(non|not|un|dis)[ _-]?(preferred|chosen|accepted)", re.I)
LABEL = re.compile(
    r"label|score|rating|rank|winner|preference|annotat|better_|safer_|choice|vote|helpful|correctness|quality", re.I
)
IDENTIFIER = re.compile(r"(^|_)(id|uuid|hash|url|index|idx|source|dataset|model)$", re.I)
NUMBERED = re.compile(r"(?P<name>.+?)_?(?P<number>[01])")


def is_prose(value: Any) -> bool:
    """Return True for a text of several words; ids and names of sources are not."""
    return isinstance(value, str) and len(value.split()) > 1


def system_text(row: Mapping[str, Any]) -> str:
    """Return the text of the row's system column, "" if it has none. Raises BadRow D06 if it is not text."""
    for name in SYSTEM_COLUMNS:
        value = row.get(name)
        if value is not None and not isinstance(value, str):
            raise BadRow("D06", f'"{name}" is {describe_value(value)}; expected text')
        if value and value.strip():
            return value
    return ""


def label_columns(row: Mapping[str, Any]) -> list[str]:
    """Return the columns that say which answer is better, or how good one is."""
    return [name for name, value in row.items() if LABEL.search(name) and not is_prose(value)]


def look_alike(name: str, row: Mapping[str, Any], taken: Collection[str] = ()) -> str | None:
    """Return the column of a row whose name means `name` of rlhf or is misspelt; None if there is none or several.

    Only columns of texts or lists are considered, no identifiers, and none of those `taken`.
    """
    possible = [
        column
        for column, value in row.items()
        if isinstance(value, str | list) and column not in taken and not IDENTIFIER.search(column)
    ]
    if name != "rejected":
        possible = [column for column in possible if not OPPOSITE_OF_CHOSEN.search(column)]
    for synonym in SYNONYMS.get(name, (name,)):
        found = [column for column in possible if synonym in column.casefold()]
        if len(found) > 1:
            found = [column for column in found if synonym == column.casefold()]
            return found[0] if len(found) == 1 else None
        if found:
            return found[0]
    return closest_match(name, possible, cutoff=0.8)


def label_hint(missing: Sequence[str], row: Mapping[str, Any]) -> str | None:
    """Return what to do about rows whose labels or scores decide the pair, None if the names of columns decide."""
    labels = label_columns(row)
    answers = [name for name in missing if name in ("chosen", "rejected")]
    if not labels or all(look_alike(name, row) for name in answers):
        return None
    if isinstance(row.get("label"), bool) and look_alike("completion", row):
        return "there is no KTO yet: rows of one answer and a label are not read; bring pairs"
    example = _pairs_by_index(labels, row)
    rule = f"write them out: {example}" if example else "write the pairs out, as docs/your-own-data.md shows"
    return f'rlhf does not read labels or scores, and "{labels[0]}" decides which answer is better: {rule}'


def _pairs_by_index(labels: Sequence[str], row: Mapping[str, Any]) -> str | None:
    """Return the three lines of Python that make pairs where a label is the number of one of two answers."""
    matches = [match for name in row if (match := NUMBERED.fullmatch(name)) and is_prose(row[name])]
    answers = sorted(match.string for match in matches if match["name"] == matches[0]["name"])
    label = next((name for name in labels if row[name] in (0, 1) and not isinstance(row[name], bool)), None)
    if len(answers) != 2 or label is None:
        return None
    first, second = answers
    return (
        f'for row in rows: answers = [row["{first}"], row["{second}"]]; '
        f'row["chosen"] = answers[row["{label}"]]; row["rejected"] = answers[1 - row["{label}"]]'
    )
