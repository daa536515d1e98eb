"""Graded preferences: how much better the better answer of a pair is, as the margin of the reward model's loss.

Llama 2 (Touvron et al. 2023, arXiv 2307.09288, section 3.2.2 and Table 27, the small margin): the loss of a pair is
-log sigmoid(r_chosen - r_rejected - m), with m = 1 for significantly better, 2/3 for better, 1/3 for slightly better,
and 0 for negligibly better. HelpSteer's grades 3, 2 and 1 mean the same.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rlhf_cli.config.sources import DataSource
from rlhf_cli.data.readers import BadRow, Row, RowIterator, RowLocation

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


class Margins:
    """Margins of pairs whose answers are rated: so much for each point between the two ratings."""

    def __init__(self, per_point: float) -> None:
        self.per_point = per_point

    @classmethod
    def of(cls, source: DataSource, default: float) -> "Margins":
        """Return the margins that data.margin_per_point sets, or else `default` for each point."""
        return cls(default if source.margin_per_point is None else source.margin_per_point)

    def columns(self, gap: float) -> dict[str, float]:
        """Return the column `margin` of a pair whose ratings differ by `gap`; none if a point has no margin."""
        return {"margin": gap * self.per_point} if self.per_point else {}

    def __str__(self) -> str:
        return f", a margin of {self.per_point:.3g} for each point" if self.per_point else ""


class GradedPairs:
    """Pairs with a column of grades beside `chosen` and `rejected`, which becomes their margin."""

    def __init__(self, column: str, source: DataSource) -> None:
        self.column = column
        self.source = source
        self.margins = Margins.of(source, MARGIN_PER_GRADE)
        self.num_pairs = 0
        self.omitted: Counter[str] = Counter()

    @classmethod
    def of(cls, row: Row, source: DataSource) -> "GradedPairs | None":
        """Return a reader of pairs like this one, None if they have no grades, or a margin instead."""
        named = source.columns.get("rating")
        if named:
            return cls(named, source) if named in row else None
        if row.get("margin") not in (None, ""):
            return None
        for name in GRADES:
            if name in row and _is_grade(row[name], name):
                return cls(name, source)
        return None

    def pairs(self, rows: RowIterator, note: Callable[[RowLocation, BadRow], None]) -> RowIterator:
        """Yield the rows with their margins, omit and count ties; `note` gets those with a bad grade."""
        for location, row in rows:
            try:
                strength = self._strength(row)
            except BadRow as bad:
                note(location, bad)
                continue
            if strength is not None and strength >= self.source.min_rating_gap:
                self.num_pairs += 1
                yield location, row | self.margins.columns(strength)
            elif strength is not None:
                self.omitted[f"pairs closer than {self.source.min_rating_gap:g}"] += 1

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

    def summary(self) -> str:
        """Return what the margins are made of, for a line of the log."""
        text = f'{self.num_pairs} pairs graded by "{self.column}"{self.margins}'
        return f"{text}; omitted: {self._omitted_text()}" if self.omitted else text

    def _omitted_text(self) -> str:
        return ", ".join(f"{count} {reason}" for reason, count in self.omitted.items())

    def why_no_pair(self) -> str | None:
        """Return why there is no pair, or None if there is one or no row was read."""
        if self.num_pairs or not self.omitted:
            return None
        return f'no pair has a better answer by "{self.column}": {self._omitted_text()}'
