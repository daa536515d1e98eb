"""The only place that prints: results and tables on stdout, log lines and progress on stderr."""

import errno
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TextIO
from unicodedata import combining, east_asian_width

from rlhf_cli import processes
from rlhf_cli.errors import Problem
from rlhf_cli.redaction import redacted
from rlhf_cli.times import duration

# Everything that could move the cursor, recolour or retitle a terminal: C0 but tab and newline, DEL, C1.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
SECONDS_BETWEEN_LINES = 10.0

_said: dict[str, Problem] = {}  # by the line as printed, without its hint
_muted = False
NOBODY_THERE = (errno.EPIPE, errno.EIO)


def clean(text: str) -> str:
    """The text without secrets, and without control characters except newline and tab: model text is untrusted."""
    return redacted(CONTROL.sub("", text))


def say(text: str) -> None:
    """One log line on stderr. Of several processes the first one speaks."""
    if processes.is_first():
        _write(sys.stderr, text)


def out(text: str = "") -> None:
    """A result line on stdout. Of several processes the first one speaks."""
    if processes.is_first():
        _write(sys.stdout, text)


def say_here(text: str) -> None:
    """One log line on stderr, whichever process this is: what went wrong in this one alone."""
    _write(sys.stderr, text if processes.count() == 1 else f"process {processes.rank()}: {text}")


def warn(code: str, text: str, *, where: str | None = None, hint: str | None = None) -> None:
    """`warning[CODE]: ...` on stderr. The same warning is said once in a process, and kept for `warnings_said`."""
    where = where and clean(where)  # a file's name is no better than a model's text
    problem = Problem(code, clean(text), where, hint and clean(hint))
    line = Problem(code, problem.text, where).line("warning")
    if line not in _said:
        _said[line] = problem
        if not _muted:
            say(problem.line("warning"))


@contextmanager
def muted_warnings() -> Iterator[None]:
    """Within, warnings are kept but not shown: somebody else will say them."""
    global _muted
    before, _muted = _muted, True
    try:
        yield
    finally:
        _muted = before


def warnings_said() -> list[str]:
    """The warnings so far, without their hints, for reports and manifests."""
    return list(_said)


def problems_warned_of() -> list[Problem]:
    """The warnings so far, part by part."""
    return list(_said.values())


def forget_warnings() -> None:
    """Starts a new command in the same process: what it warns about is said again."""
    _said.clear()


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None) -> None:
    """A table on stdout: drawn and wrapped on a terminal, aligned plain text (never cut) elsewhere.

    Of several processes the first one shows it.
    """
    assert all(len(row) == len(columns) for row in rows), "every row needs a cell for each column"
    if not processes.is_first():
        return
    if _is_terminal(sys.stdout):
        _drawn_table(columns, rows, title)
        return
    cells = [[clean(cell).replace("\n", "\\n").replace("\t", "\\t") for cell in row] for row in (columns, *rows)]
    widths = [max(_width(row[column]) for row in cells) for column in range(len(columns))]
    if title:
        out(title)
    for row in cells:
        out("  ".join(cell + " " * (width - _width(cell)) for cell, width in zip(row, widths, strict=True)).rstrip())


class Progress:
    """`with Progress("ppo", 100) as bar: bar.advance(note="reward 1.2")`.

    A live bar with rate and time left on a terminal; elsewhere a plain line at most every ten seconds and at the end.
    A `quiet` one shows nothing: for work too short to look at.
    """

    def __init__(self, label: str, total: int, unit: str = "step", *, quiet: bool = False) -> None:
        self.label, self.total, self.unit, self.quiet = clean(label), total, unit, quiet
        self.done, self.note = 0, ""
        self._bar = _Bar(self.label, total) if _is_terminal(sys.stderr) and not quiet and processes.is_first() else None
        self._began = self._last_line = time.monotonic()

    def __enter__(self) -> "Progress":
        self._began = self._last_line = time.monotonic()
        if self._bar:
            self._bar.start()
        return self

    def advance(self, n: int = 1, note: str = "") -> None:
        """Counts `n` more units as done; `note` is shown behind the numbers until the next one."""
        self.done += n
        self.note = clean(note).replace("\n", " ") or self.note
        if self._bar:
            with suppress(OSError):  # a terminal that is gone
                self._bar.update(self.done, f"{self._rate()}  {self.note}")
        elif not self.quiet and time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES and self.done < self.total:
            self._last_line = time.monotonic()
            say(self._line())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar:
            with suppress(OSError):
                self._bar.stop()
        elif not self.quiet:
            say(self._line())

    def _rate(self) -> str:
        """Speed and time left, in words."""
        seconds = time.monotonic() - self._began
        if not self.done or seconds <= 0:
            return ""
        speed = self.done / seconds
        rate = f"{speed:.3g} {self.unit}/s" if speed >= 1 else f"{1 / speed:.3g} s/{self.unit}"
        left = max(self.total - self.done, 0) / speed
        return f"{rate}, {duration(left)} left" if left else f"{rate}, {duration(seconds)} in all"

    def _line(self) -> str:
        parts = [f"{self.label} {self.done}/{self.total} {self.unit}", self._rate(), self.note]
        return ", ".join(part for part in parts if part)


class _Bar:
    """The live bar of a terminal. rich is imported here, so that short commands never load it."""

    def __init__(self, label: str, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress

        # What `out` prints goes to stdout itself when that is a file, else above the bar.
        self._live = RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=Console(stderr=True),
            redirect_stdout=_is_terminal(sys.stdout),
        )
        self._task = self._live.add_task(label, total=total, note="")
        self.start, self.stop = self._live.start, self._live.stop

    def update(self, done: int, note: str) -> None:
        self._live.update(self._task, completed=done, note=note)


def _drawn_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=Text(clean(title)) if title else None)
    for column in columns:
        drawn.add_column(Text(clean(column)))
    for row in rows:
        drawn.add_row(*(Text(clean(cell)) for cell in row))
    Console(file=sys.stdout).print(drawn)


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _width(text: str) -> int:
    """Columns that a text takes in a fixed-width font: East Asian characters are two wide, accents none."""
    return sum(0 if combining(char) else 2 if east_asian_width(char) in "WF" else 1 for char in text)


def _write(stream: TextIO, text: str) -> None:
    """One line; what the stream's encoding cannot show is written as an escape instead of failing."""
    encoding = stream.encoding or "utf-8"
    try:
        stream.write(clean(text).encode(encoding, "backslashreplace").decode(encoding) + "\n")
        stream.flush()
    except OSError as error:
        if error.errno not in NOBODY_THERE:
            raise
        # The terminal is closed, or the other end of a pipe is gone. A run goes on and can save; what it says is lost.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
