"""Damages to files, and the table of what a run does with each."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SAME = "same bytes"  # as the file of the other step or run: no damage
SILENT = "SILENT"  # the damage was not reported
PROPERTY = "damage"  # property of a test's report: a matrix, printed at the end


def flip(path: Path) -> None:
    """Flip the lowest bit of four bytes: most JSON stays JSON, and one byte of a float32 is its exponent's."""
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    for place in range(middle, min(middle + 4, len(content))):
        content[place] ^= 1
    path.write_bytes(content)


ALONE: dict[str, Callable[[Path], Any]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "4 bytes flipped": flip,
}
OTHER, OTHER_RUN = "another step's", "another run's"
DAMAGES = (*ALONE, OTHER)


def harm(path: Path, how: str, other: Path) -> bool:
    """Damage a file; `other` is that of another step or run. Return False if it has the same bytes."""
    if how in ALONE:
        ALONE[how](path)
        return True
    before, after = path.read_bytes(), other.read_bytes()
    path.write_bytes(after)
    return before != after


@dataclass
class Matrix:
    """The result of each damage, a row for each damaged file."""

    title: str
    legend: str = ""
    cells: dict[str, dict[str, str]] = field(default_factory=dict)

    def put(self, row: str, how: str, result: str) -> None:
        self.cells.setdefault(row, {})[how] = result

    def damages(self) -> list[str]:
        """Return the cells of real damages."""
        return [result for row in self.cells.values() for result in row.values() if result != SAME]

    def silent(self) -> list[str]:
        """Return row, damage and cell of all that was not reported."""
        found = [(row, how, result) for row, cells in self.cells.items() for how, result in cells.items()]
        return [f"{row}, {how}: {result}" for row, how, result in found if SILENT in result]

    def as_json(self) -> str:
        """Return the value for `record_property(PROPERTY, ...)`, which also reaches the main process from a worker."""
        return json.dumps(asdict(self))

    def lines(self) -> list[str]:
        """Return the matrix as aligned text."""
        columns = list(dict.fromkeys(how for row in self.cells.values() for how in row))
        table = [["", *columns]]
        table += [[row, *(cells.get(how, "-") for how in columns)] for row, cells in self.cells.items()]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        rows = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
        return [self.title, self.legend, *rows, ""]


def summary(properties: Iterable[Sequence[tuple[str, object]]]) -> list[str]:
    """Return the lines that a run of the tests prints at its end."""
    values = [str(value) for found in properties for name, value in found if name == PROPERTY]
    matrices = [Matrix(**json.loads(value)) for value in values]
    cells, silent = (sum(len(part(matrix)) for matrix in matrices) for part in (Matrix.damages, Matrix.silent))
    lines = [line for matrix in matrices for line in matrix.lines()]
    return ["", *lines, f"{cells} cells, {silent} silent"] if matrices else []
