"""Ways in which a file comes to harm, and the matrix of what becomes of a run that finds it so."""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SAME = "same bytes"  # as the file of the other step or run: no damage
SILENT = "SILENT"
PROPERTY = "damage"  # of a test's report: a matrix, for the summary at the end


def _half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    """The lowest bit of four bytes: most JSON stays JSON, and of four bytes of a float32 one is its exponent's."""
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    for place in range(middle, min(middle + 4, len(content))):
        content[place] ^= 1
    path.write_bytes(content)


ALONE: dict[str, Callable[[Path], Any]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "half": _half,
    "4 bytes flipped": flip,
}
OTHER, OTHER_RUN = "another step's", "another run's"
DAMAGES = (*ALONE, OTHER)


def harm(path: Path, how: str, other: Path) -> bool:
    """Damage a file; `other` is that of another step or run. False: it has the same bytes, nothing was damaged."""
    if how in ALONE:
        ALONE[how](path)
        return True
    before, after = path.read_bytes(), other.read_bytes()
    path.write_bytes(after)
    return before != after


@dataclass
class Matrix:
    """What became of each damage, a row for what was damaged. SILENT in a cell: nobody was told of it."""

    title: str
    legend: str = ""
    theirs: bool = False  # done to plain HF Trainer
    cells: dict[str, dict[str, str]] = field(default_factory=dict)

    def put(self, row: str, how: str, what: str) -> None:
        self.cells.setdefault(row, {})[how] = what

    def damages(self) -> list[str]:
        """The cells where something was damaged."""
        return [what for row in self.cells.values() for what in row.values() if what != SAME]

    def silent(self) -> list[str]:
        """Row, damage and cell of all that nobody was told of."""
        found = [(row, how, what) for row, cells in self.cells.items() for how, what in cells.items()]
        return [f"{row}, {how}: {what}" for row, how, what in found if SILENT in what]

    def told(self) -> str:
        """For `record_property(PROPERTY, ...)`: what a report carries, from a worker too."""
        return json.dumps(asdict(self))

    def _table(self) -> list[list[str]]:
        columns = list(dict.fromkeys(how for row in self.cells.values() for how in row))
        return [["", *columns]] + [
            [row, *(cells.get(how, "-") for how in columns)] for row, cells in self.cells.items()
        ]

    def lines(self) -> list[str]:
        """As aligned text."""
        table = self._table()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        rows = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
        return [self.title, *([self.legend] if self.legend else []), *rows, ""]

    def markdown(self) -> list[str]:
        """As a section with a table."""
        head, *rows = [
            "| " + " | ".join(f"**{cell}**" if SILENT in cell else cell for cell in row) + " |" for row in self._table()
        ]
        rule = "|" + "---|" * len(self._table()[0])
        return [f"### {self.title}", "", *([self.legend, ""] if self.legend else []), head, rule, *rows, ""]


def count(matrices: Iterable[Matrix]) -> str:
    """`N cells, K silent`: damages of all of them."""
    made = list(matrices)
    return f"{sum(len(one.damages()) for one in made)} cells, {sum(len(one.silent()) for one in made)} silent"


def reported(properties: Sequence[tuple[str, object]]) -> list[Matrix]:
    """The matrices that a test's report carries."""
    return [Matrix(**json.loads(str(value))) for name, value in properties if name == PROPERTY]


def summary(properties: Iterable[Sequence[tuple[str, object]]]) -> list[str]:
    """What a run of the tests has to show at its end; the same goes as markdown into $DAMAGE_MARKDOWN, if any."""
    made = [matrix for found in properties for matrix in reported(found)]
    if not made:
        return []
    counts = [
        f"{who}: {count(one for one in made if one.theirs == theirs)}"
        for who, theirs in (("ours", False), ("HF Trainer", True))
    ]
    if name := os.environ.get("DAMAGE_MARKDOWN"):
        text = [line for matrix in made for line in matrix.markdown()]
        Path(name).write_text("\n".join([*text, "; ".join(counts)]) + "\n", encoding="utf-8")
    return ["", *(line for matrix in made for line in matrix.lines()), *counts]
