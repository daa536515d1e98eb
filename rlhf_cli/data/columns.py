"""Names of columns in other people's files: which look like a column of rlhf, and which hold labels or scores."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rlhf_cli.data.readers import BadRow, describe_value
from rlhf_cli.errors import closest_match

SYSTEM_COLUMNS = ("system", "system_prompt")
# What these hold is meant for the model: that they are not read is a warning, not a line of the log.
MEANT_FOR_THE_MODEL = (*SYSTEM_COLUMNS, "context", "history", "tools", "functions", "documents")
# Parts of names that mean the same as a column of rlhf; the best one first.
SYNONYMS = {
    "prompt": ("prompt", "question", "query", "instruction", "input", "problem"),
    "completion": ("completion", "response", "answer", "output", "reply", "chosen"),
    "chosen": ("chosen", "better", "preferred", "accepted"),
    "rejected": ("rejected", "worse", "dispreferred"),
}
NAMES_OF_THE_BETTER = ("chosen", "preferred", "better", "best", "accepted")
OPPOSITE_OF_CHOSEN = re.compile(r"reject|worse|(non|not|un|dis)[ _-]?(preferred|chosen|accepted)", re.I)
LABEL = re.compile(
    r"label|score|rating|rank|winner|preference|annotat|better_|safer_|choice|vote|helpful|correctness|quality", re.I
)
IDENTIFIER = re.compile(r"(^|_)(id|uuid|hash|url|index|idx|source|dataset|model)$", re.I)
WORD = re.compile(r"[^\W\d_]+")
NUMBERED = re.compile(r".+[01]")


def is_prose(value: Any) -> bool:
    """Return True for a text of several words, or of a script that may write them without spaces."""
    if not isinstance(value, str):
        return False
    words = WORD.findall(value)
    return len(words) > 1 or any(not word.isascii() for word in words)


def is_prompt_name(name: str) -> bool:
    """Return True for the name of a column that is usually a prompt: question, query, instruction."""
    return name.casefold() in SYNONYMS["prompt"]


def system_text(row: Mapping[str, Any]) -> str:
    """Return the text of the row's system column, "" if it has none. Raises BadRow D06 if it is not text."""
    for name in SYSTEM_COLUMNS:
        value = row.get(name)
        if value is not None and not isinstance(value, str):
            raise BadRow("D06", f'"{name}" is {describe_value(value)}; expected text')
        if value and value.strip():
            return value
    return ""


def tools_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the schemas in the row's tools column, a list or its JSON text; [] without any. Raises BadRow D06."""
    value = row.get("tools")
    tools = value
    if isinstance(value, str):
        with suppress(ValueError):
            tools = json.loads(value)
    tools = tools or []
    if not (isinstance(tools, list) and all(isinstance(tool, dict) and tool for tool in tools)):
        raise BadRow("D06", f'"tools" is {describe_value(value)}; expected a list of JSON schemas')
    return tools


def refuse_template_variables(row: Mapping[str, Any]) -> None:
    """Raise BadRow D19 for variables of the chat template in the row: all rows are rendered alike."""
    if row.get("chat_template_kwargs"):
        text = '"chat_template_kwargs" of a row is not read: all rows are rendered with the same variables'
        raise BadRow("D19", text, "set data.chat_template_kwargs for all rows, and remove the column")


def label_columns(row: Mapping[str, Any]) -> list[str]:
    """Return the columns that say which answer is better, or how good one is."""
    return [name for name, value in row.items() if _is_label(name, value, row)]


def _is_label(name: str, value: Any, row: Mapping[str, Any]) -> bool:
    """Return True for a score, or for a value that names another column: "A" of response_a, or "response_a"."""
    if is_prose(value):
        return False
    if LABEL.search(name):
        return True
    means_better = any(word in name.casefold() for word in NAMES_OF_THE_BETTER)
    if not (means_better and value and isinstance(value, str)):
        return False
    end_of_name = re.compile(rf"(^|[^a-z]){re.escape(value.casefold())}$")
    others = [column.casefold() for column in row if column != name]
    return any(end_of_name.search(column) for column in others)


def look_alike(name: str, row: Mapping[str, Any], taken: Collection[str] = ()) -> str | None:
    """Return the column of a row whose name means `name` of rlhf or is misspelt; None if there is none or several.

    Only columns of texts or lists are considered, no identifiers, and none of those `taken`.
    """
    possible = []
    for column, value in row.items():
        is_content = isinstance(value, str | list) and not _is_label(column, value, row)
        is_opposite = name != "rejected" and OPPOSITE_OF_CHOSEN.search(column)
        if is_content and not is_opposite and column not in taken and not IDENTIFIER.search(column):
            possible.append(column)
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
    example = _pairs_by_index(labels, row)
    rule = f"write them out: {example}" if example else "write the pairs out, as docs/data-formats.md shows"
    return f'"{labels[0]}" decides which answer is better, in a way that rlhf does not read: {rule}'


def _pairs_by_index(labels: Sequence[str], row: Mapping[str, Any]) -> str | None:
    """Return the three lines of Python that make pairs where a label is the number of one of two answers."""
    numbered = [name for name in row if NUMBERED.fullmatch(name) and is_prose(row[name])]
    answers = sorted(name for name in numbered if name[:-1] == numbered[0][:-1])
    indices = [name for name in labels if row[name] in (0, 1) and not isinstance(row[name], bool)]
    if len(answers) != 2 or not indices:
        return None
    first, second = answers
    label = indices[0]
    return (
        f'for row in rows: answers = [row["{first}"], row["{second}"]]; '
        f'row["chosen"] = answers[row["{label}"]]; row["rejected"] = answers[1 - row["{label}"]]'
    )
