"""Graded preferences: how much better the better answer of a pair is, as the margin of the reward model's loss.

Llama 2 (Touvron et al. 2023, arXiv 2307.09288, section 3.2.2 and Table 27, the small margin): the loss of a pair is
-log sigmoid(r_chosen - r_rejected - m), with m = 1 for significantly better, 2/3 for better, 1/3 for slightly better,
and 0 for negligibly better. HelpSteer's grades 3, 2 and 1 mean the same.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rlhf_cli.config.sources import DataSource
from rlhf_cli.data.readers import BadRow, Row, RowIterator, RowLocation

Note = Callable[[RowLocation, BadRow], None]
GRADES = ("preference_strength", "overall_preference")  # names of columns, of HelpSteer2 and HelpSteer3
HIGHEST = 3.0
MARGIN_PER_GRADE = 1 / HIGHEST
WORDS = {
    "significantly better": 3.0,
    "much better": 3.0,
    "better": 2.0,
    "slightly better": 1.0,
    "negligibly better": 0.0,
    "negligibly better / unsure": 0.0,
    "unsure": 0.0,
}
TIES = ("tie", "equal", "same", "about the same")
UNRATED = ("", "N/A", "n/a", "None")  # texts in place of a grade or rating


def grade_of(value: Any, column: str) -> float | None:
    """Return the number of a grade, None without one. Raises BadRow D21 if it is none from -3 to 3."""
    if value is None or (isinstance(value, str) and value.strip() in UNRATED):
        return None
    grade = value
    if isinstance(value, str):  # a cell of a table
        with suppress(ValueError):
            grade = float(value)
    if isinstance(grade, int | float) and not isinstance(grade, bool) and abs(grade) <= HIGHEST:
        return float(grade)
    raise BadRow("D21", f'"{column}" is {value!r:.40}; expected a grade from -{HIGHEST:g} to {HIGHEST:g}')


def _word(value: Any) -> str | None:
    return value.strip().casefold() if isinstance(value, str) else None


def _is_grade(value: Any, column: str) -> bool:
    if _word(value) in (*WORDS, *TIES):
        return True
    try:
        grade_of(value, column)
    except BadRow:
        return False
    return True


class JudgedPairs(ABC):
    """Pairs whose better answer a column tells, with their margins and counts."""

    form_name = ""  # of rows that are no pairs yet

    def __init__(self, column: str, source: DataSource, default_margin: float) -> None:
        """`default_margin`: that of each point between two answers, unless data.margin_per_point sets it."""
        self.column = column
        self.source = source
        self.margin_per_point = default_margin
        if source.margin_per_point is not None:
            self.margin_per_point = source.margin_per_point
        self.num_pairs = 0
        self.omitted: Counter[str] = Counter()

    @abstractmethod
    def pairs(self, rows: RowIterator, note: Note) -> RowIterator:
        """Yield the pairs of the rows, omit and count others; `note` gets the rows with a bad judgement."""

    def why_no_pair(self) -> str | None:
        """Return why there is no pair, or None if there is one or no row was read."""
        if self.num_pairs or not self.omitted:
            return None
        return f'no pair has a better answer by "{self.column}": {self.omitted_text()}'

    def margin(self, gap: float) -> dict[str, float]:
        """Return the column `margin` of a pair whose answers differ by `gap`; none if a point has no margin."""
        return {"margin": gap * self.margin_per_point} if self.margin_per_point else {}

    def summary(self) -> str:
        """Return what the pairs are made of, for a line of the log."""
        text = self.made_of()
        if self.margin_per_point:
            text += f", a margin of {self.margin_per_point:.3g} for each point"
        return f"{text}; omitted: {self.omitted_text()}" if self.omitted else text

    def made_of(self) -> str:
        """Return the number of pairs and what decided them."""
        return f'{self.num_pairs} pairs graded by "{self.column}"'

    def omitted_text(self) -> str:
        """Return the numbers of what is omitted."""
        return ", ".join(f"{count} {reason}" for reason, count in self.omitted.items())


class GradedPairs(JudgedPairs):
    """Pairs with a column of grades beside `chosen` and `rejected`, which becomes their margin."""

    @classmethod
    def of(cls, row: Row, source: DataSource) -> "GradedPairs | None":
        """Return a reader of pairs like this one, None if they have no grades, or a margin instead."""
        named = source.columns.get("rating")
        if named:
            return cls(named, source, MARGIN_PER_GRADE) if named in row else None
        if row.get("margin") not in (None, ""):
            return None
        for name in GRADES:
            if name in row and _is_grade(row[name], name):
                return cls(name, source, MARGIN_PER_GRADE)
        return None

    def pairs(self, rows: RowIterator, note: Note) -> RowIterator:
        """Yield the rows with their margins, omit and count ties; `note` gets those with a bad grade."""
        least = self.source.min_rating_gap
        for location, row in rows:
            try:
                strength = self._strength(row)
            except BadRow as bad:
                note(location, bad)
                continue
            if strength is None:
                continue
            if strength < least:
                self.omitted[f"pairs closer than {least:g}"] += 1
                continue
            self.num_pairs += 1
            yield location, row | self.margin(strength)

    def _strength(self, row: Row) -> float | None:
        """Return how much better the chosen answer is; None for a pair that is counted as omitted."""
        if self.column not in row:
            raise BadRow("D12", f'no column "{self.column}", which the rows before have')
        value = row[self.column]
        word = _word(value)
        if word in WORDS:
            return WORDS[word]
        if word in TIES:
            self.omitted["ties"] += 1
            return None

        grade = grade_of(value, self.column)
        if not grade:
            self.omitted["pairs without a grade" if grade is None else "ties"] += 1
            return None
        return abs(grade)
