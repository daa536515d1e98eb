"""The only place that prints, and reads: results and tables on stdout, log lines on stderr (and progress.py's bars)."""

import errno
import hashlib
import io
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TextIO
from unicodedata import combining, east_asian_width

from rlhf_cli import distributed
from rlhf_cli.errors import Problem, redact

SEEN_FILE_VARIABLE = "RLHF_TOLD"  # names to the children the file with a hash a line of what was told before
_here: set[str] = set()


@contextmanager
def share_seen_messages() -> Iterator[None]:
    """Within, what one process tells is not told again by those that are started after it."""
    before = os.environ.get(SEEN_FILE_VARIABLE)
    with tempfile.TemporaryDirectory(prefix="rlhf-", ignore_cleanup_errors=True) as folder:
        os.environ[SEEN_FILE_VARIABLE] = str(Path(folder, "told"))
        try:
            yield
        finally:
            os.environ.pop(SEEN_FILE_VARIABLE)
            if before is not None:
                os.environ[SEEN_FILE_VARIABLE] = before


def is_first_time(text: str) -> bool:
    """Whether the command has not told this text yet; from now on it has. Of several processes the first one tells."""
    if not distributed.is_main_process():
        return False
    line = hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()
    if line in _here or line in _before():
        return False
    _here.add(line)
    with suppress(OSError):  # the disk is full: it is told twice
        if file := os.environ.get(SEEN_FILE_VARIABLE):
            with open(file, "a", encoding="ascii") as lines:
                lines.write(f"{line}\n")
    return True


def _before() -> list[str]:
    """What processes before this one told."""
    try:
        return Path(os.environ[SEEN_FILE_VARIABLE]).read_text(encoding="ascii").split()
    except (KeyError, OSError):  # this command has one process, or none of them told anything yet
        return []


def forget() -> None:
    """Starts a new command in the same process."""
    _here.clear()


# Everything that could move the cursor, recolour or retitle a terminal: C0 but tab and newline, DEL, C1.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
SECONDS_BETWEEN_DRAWINGS = 0.05
READABLE = 48  # columns of a terminal for one of several texts beside one another
DIM, PLAIN = "\x1b[2m", "\x1b[0m"

_said: dict[str, Problem] = {}  # by the line as printed, without its hint
_muted = False
_left: list[TextIO] = []  # streams that nobody reads any more
_cut_off: OSError | None = None  # why a part of stdout is missing, where it went to a file
NOBODY_THERE = (errno.EPIPE, errno.EIO)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def clean(text: str) -> str:
    """The text without secrets, and without control characters except newline and tab: model text is untrusted."""
    return redact(CONTROL.sub("", text))


def say(text: str) -> None:
    """One log line on stderr. Of several processes the first one speaks."""
    if distributed.is_main_process():
        _write(sys.stderr, text)


def out(text: str = "") -> None:
    """A result line on stdout. Of several processes the first one speaks."""
    if distributed.is_main_process():
        _write(sys.stdout, text)


def log_dim(text: str) -> None:
    """`say`, dim on a terminal: numbers beside a text."""
    if distributed.is_main_process():
        _write(sys.stderr, text, dim=True)


def print_partial(text: str) -> None:
    """A part of a text on stdout, as it comes: what follows goes on behind it."""
    if distributed.is_main_process():
        _write(sys.stdout, text, end="")


def is_stdout_open() -> bool:
    """Whether somebody may still read stdout: False once the other end of a pipe is gone."""
    return not any(stream is sys.stdout for stream in _left)


def stdout_error() -> OSError | None:
    """Why stdout is not whole, where its disk is full; None where it is, or where nobody reads it."""
    return _cut_off


def is_interactive() -> bool:
    """Whether somebody types at a terminal and reads the answers there."""
    return bool(sys.stdin and sys.stdin.isatty() and sys.stdout.isatty())


def ask(prompt: str) -> str | None:
    """The next line of stdin, without its line break; None at the end. Bytes that are no text come as surrogates.

    In a talk `prompt` is shown, the line can be edited and older ones called back, and a paste of several lines is one.
    """
    if isinstance(sys.stdin, io.TextIOWrapper) and sys.stdin.errors != "surrogateescape":
        sys.stdin.reconfigure(errors="surrogateescape")
    if not is_interactive():
        line = sys.stdin.readline() if sys.stdin else ""
        return line.removesuffix("\n").removesuffix("\r") if line else None
    import readline  # what `input` edits with

    readline.parse_and_bind("set enable-bracketed-paste on")
    try:
        return input(prompt)
    except EOFError:
        out()
        return None


def log_from_any_rank(text: str) -> None:
    """One log line on stderr, whichever process this is: what went wrong in this one alone."""
    _write(sys.stderr, text if distributed.world_size() == 1 else f"process {distributed.rank()}: {text}")


def log_once(text: str) -> None:
    """A log line that a command says once, however many of its stages come to it."""
    if is_first_time(text):
        say(text)


def warn(code: str, text: str, *, where: str | None = None, hint: str | None = None) -> None:
    """`warning[CODE]: ...` on stderr. The same warning is said once in a command, and kept for `emitted_warnings`."""
    where = where and clean(where)  # a file's name is no better than a model's text
    problem = Problem(code, clean(text), where, hint and clean(hint))
    line = Problem(code, problem.text, where).line("warning")
    if line not in _said:
        _said[line] = problem
        if not _muted and is_first_time(line):
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


def emitted_warnings() -> list[str]:
    """The warnings so far, without their hints, for reports and manifests."""
    return list(_said)


def emitted_problems() -> list[Problem]:
    """The warnings so far, part by part."""
    return list(_said.values())


def reset() -> None:
    """Starts a new command in the same process: what it warns about is said again."""
    global _cut_off
    _cut_off = None
    _said.clear()
    forget()


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None) -> None:
    """A table on stdout: drawn and wrapped on a terminal, aligned plain text (never cut) elsewhere.

    Of several processes the first one shows it.
    """
    assert all(len(row) == len(columns) for row in rows), "every row needs a cell for each column"
    if not distributed.is_main_process():
        return
    if is_terminal(sys.stdout):
        _drawn_table(columns, rows, title)
        return
    cells = [[clean(cell).replace("\n", "\\n").replace("\t", "\\t") for cell in row] for row in (columns, *rows)]
    widths = [max(_width(row[column]) for row in cells) for column in range(len(columns))]
    if title:
        out(title)
    for row in cells:
        out("  ".join(cell + " " * (width - _width(cell)) for cell, width in zip(row, widths, strict=True)).rstrip())


def fits_side_by_side(columns: int) -> bool:
    """Whether so many texts can be read beside one another: the width of a terminal."""
    return is_terminal(sys.stdout) and shutil.get_terminal_size().columns >= columns * READABLE


class Columns:
    """`with Columns(["sft", "ppo"]) as columns: columns.add(0, " a piece")`: texts that grow on stdout, side by side.

    Only where `fits_side_by_side`.
    """

    def __init__(self, names: Sequence[str]) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.table import Table
        from rich.text import Text

        self._cells = [Text() for _ in names]
        self._table = Table(expand=True)
        for name in names:
            self._table.add_column(Text(clean(name)), ratio=1)
        self._table.add_row(*self._cells)
        console = Console(file=sys.stdout)
        self._live = Live(
            self._table, console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        self._drawn = 0.0

    def __enter__(self) -> "Columns":
        self._live.start(refresh=True)
        return self

    def add(self, column: int, text: str) -> None:
        """A further piece of a column's text."""
        self._cells[column].append(clean(text))
        if time.monotonic() - self._drawn >= SECONDS_BETWEEN_DRAWINGS:
            self._live.refresh()
            self._drawn = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with suppress(OSError):  # a terminal that is gone
            self._live.stop()


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


def is_terminal(stream: TextIO) -> bool:
    """Whether somebody looks at it who can be shown more than plain lines."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _width(text: str) -> int:
    """Columns that a text takes in a fixed-width font: East Asian characters are two wide, accents none."""
    return sum(0 if combining(char) else 2 if east_asian_width(char) in "WF" else 1 for char in text)


def _write(stream: TextIO, text: str, *, end: str = "\n", dim: bool = False) -> None:
    """One line; what the stream's encoding cannot show is written as an escape instead of failing."""
    encoding = stream.encoding or "utf-8"
    shown = clean(text).encode(encoding, "backslashreplace").decode(encoding)
    styled = dim and is_terminal(stream) and not os.environ.get("NO_COLOR")
    try:
        stream.write((f"{DIM}{shown}{PLAIN}" if styled else shown) + end)
        stream.flush()
    except OSError as error:
        if error.errno not in NOBODY_THERE + FULL:
            raise
        if error.errno in FULL and stream is sys.stdout:
            global _cut_off
            _cut_off = error
        _left.append(stream)
        # The terminal is closed, the other end of a pipe is gone, or the disk of the log is full. A run goes on and can
        # save; what it says is lost.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


MINUTE, HOUR, DAY = 60, 3600, 86400


def duration(seconds: float) -> str:
    """`under 1 ms`, `0.012 s`, `4.7 s`, `42 s`, `12 min 3 s`, `2 d 5 h`: two units at most, none that is 0."""
    if 0 < seconds < 0.001:
        return "under 1 ms"
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    for large, unit, small, rest in ((DAY, "d", HOUR, "h"), (HOUR, "h", MINUTE, "min"), (MINUTE, "min", 1, "s")):
        if whole >= large:
            left = whole % large // small
            return f"{whole // large} {unit}" + (f" {left} {rest}" if left else "")
    return f"{whole} s"


def ago(seconds: float) -> str:
    """`just now`, `12 min ago`, `3 h ago`, `2 d ago`; a time to come, of a clock that is ahead, is now."""
    for size, unit in ((DAY, "d"), (HOUR, "h"), (MINUTE, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return "just now"
