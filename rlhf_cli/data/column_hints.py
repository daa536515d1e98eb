"""What a user can do about columns: those that a source lacks, and names in data.columns that rlhf does not know."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rlhf_cli.config.sources import DataSource, suffix
from rlhf_cli.data import conversions
from rlhf_cli.data.columns import label_hint, look_alike
from rlhf_cli.data.ratings import COLUMNS as RATED_COLUMNS
from rlhf_cli.data.readers import TABLES, BadRow, Row, RowLocation, format_columns
from rlhf_cli.data.texts import Form
from rlhf_cli.data.values import conversation_fault
from rlhf_cli.errors import RLHFError, closest_match, did_you_mean, shell_word

ANSWER_COLUMNS = {"completion", "chosen"}  # answers of one kind can serve as the other
BESIDE = ("margin", "system", "tools")  # columns that are read beside any form


def form_text(form: Form) -> str:
    """Return the columns of a form for a message."""
    columns = ", ".join(form)
    return f"{{{columns}}}"


class ColumnHints:
    """Hints on the columns of a source that is read as one of the `forms`."""

    def __init__(self, source: DataSource, forms: Sequence[Form]) -> None:
        self.source = source
        self.forms = forms
        self.known = frozenset().union(*forms)

    def refuse_unknown(self) -> None:
        """Raise RLHFError D02 for a name in data.columns that is not one of rlhf."""
        rated: Collection[str] = RATED_COLUMNS if "chosen" in self.known else ()
        known = sorted(self.known.union(BESIDE, rated))
        for name, column in self.source.columns.items():
            if name in known:
                continue
            hint = did_you_mean(name, known)
            is_typo = closest_match(name, known, cutoff=0.8)
            if column in known and not is_typo:
                swapped = self._mapping_text({column: name})
                hint = f"swap the two: {swapped}?"

            option = f"{self.source.section}.columns"
            if self._is_option:
                option = "--column"
            listed = ", ".join(known)
            text = f'{option} names "{name}"; known columns: {listed}'
            raise RLHFError("D02", text, where=self.source.where, hint=hint)

    def no_form(self, location: RowLocation, raw: Row, row: Row, other_format: str) -> BadRow:
        """Return BadRow D02 for a row without a known form; `row` has the names of data.columns."""
        subject = "the row"
        if self.source.section != "data":
            subject += f" of {self.source.section} ({self.source.where})"
        needed = map(form_text, self.forms)
        forms = " or ".join(needed)
        found = format_columns(raw) or "none"
        text = f"{subject} needs {forms}; columns found: {found}"
        return BadRow("D02", text, self._missing(location, raw, row, other_format))

    def _missing(self, location: RowLocation, raw: Row, row: Row, other_format: str) -> str:
        """Return what to do about a row without a known form."""
        wanted = self.forms[0]
        if ("prompt",) in self.forms:
            wanted = ("prompt",)
        missing = [name for name in wanted if name not in row]
        missing = missing or [wanted[0]]

        if other_format and "messages" in row:
            return "each row has one answer, but a pair needs two; use these rows for sft"
        if other_format == conversions.OPENAI:
            return "write rows of prompt and completion, from input.messages and preferred_output"
        labels = label_hint(missing, raw)
        if labels:
            return labels

        lists = [name for name, value in raw.items() if _is_other_list(value, name)]
        free = self._free_columns(raw, lists)
        if lists and not free:
            return f"write each row as a separate object, with the column {missing[0]}"

        hint = self.mapping(missing, free)
        is_table = suffix(location.path) in TABLES
        knows_none = "NAME" in hint and self.known.isdisjoint(raw)
        if is_table and knows_none:
            return f"does the first line name the columns? if so, {hint}"
        return hint

    def _free_columns(self, raw: Row, lists: Sequence[str]) -> Row:
        """Return the columns that may be a missing one.

        Never one that another column of rlhf uses: prompts could be trained on as answers.
        """
        others = self.known - ANSWER_COLUMNS
        used = others.union(lists, self.forms[0], self.source.columns.values())
        return {name: value for name, value in raw.items() if name not in used}

    def mapping(self, missing: Sequence[str], free: Row) -> str:
        """Return the mapping of all missing columns to free ones, with NAME where no column looks alike."""
        mapping: dict[str, str] = {}
        for name in missing:
            column = look_alike(name, free, taken=mapping.values())
            mapping[name] = column or "NAME"
        return f"map the columns, e.g. {self._mapping_text(mapping)}"

    def _mapping_text(self, mapping: Mapping[str, str]) -> str:
        """Return a mapping of columns as the user writes it, in a config or as options of `rlhf init`."""
        if self._is_option:
            words = [shell_word(f"{name}={column}") for name, column in mapping.items()]
            return " ".join(f"--column {word}" for word in words)

        pairs = [f"{name}: {column}" for name, column in mapping.items()]
        joined = ", ".join(pairs)
        return f"{self.source.section}.columns: {{{joined}}}"

    @property
    def _is_option(self) -> bool:
        return self.source.where == "--data"


def _is_other_list(value: Any, column: str) -> bool:
    """Return True for a list that is no list of messages."""
    return isinstance(value, list) and conversation_fault(value, column) is not None
