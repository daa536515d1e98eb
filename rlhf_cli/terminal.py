"""Terminal input and output. Results and tables go to stdout, log lines to stderr; only this and progress.py print.

With --quiet only errors and the result are printed. With --json at the end of a command, or --markdown, tables are
log lines.
"""

import errno
import hashlib
import io
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TextIO
from unicodedata import combining, east_asian_width

from rlhf_cli import distributed
from rlhf_cli.errors import Problem, RLHFError, redact

SEEN_FILE_VARIABLE = "RLHF_SEEN_MESSAGES"  # names a file with one hash per printed message
_seen: set[str] = set()
# Characters that can move the cursor, recolour or retitle a terminal: C0 except tab and newline, DEL, C1.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
STDERR = 2  # its file descriptor
DIM = "\x1b[2m"
PLAIN = "\x1b[0m"

_warnings: dict[str, Problem] = {}  # by the line as printed, without its hint
_muted = False
Mode = Literal["quiet", "verbose", "json", "markdown"]
_modes: set[Mode] = set()  # of the command line
# Read by the libraries when they are imported, also in child processes.
LIBRARY_LOGS = ("TRANSFORMERS_VERBOSITY", "DATASETS_VERBOSITY", "HF_HUB_VERBOSITY", "ACCELERATE_LOG_LEVEL")
_closed_streams: list[TextIO] = []
_stdout_error: OSError | None = None
READER_GONE = (errno.EPIPE, errno.EIO)
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MINUTE = 60
HOUR = 3600
DAY = 86400


@contextmanager
def share_seen_messages() -> Iterator[None]:
    """Print each message once in this process and the child processes started in this context."""
    with tempfile.TemporaryDirectory(prefix="rlhf-", ignore_cleanup_errors=True) as folder:
        os.environ[SEEN_FILE_VARIABLE] = str(Path(folder, "seen"))
        try:
            yield
        finally:
            _recall(os.environ.pop(SEEN_FILE_VARIABLE))


def _recall(file: str) -> None:
    """Add the messages that other processes of the command printed."""
    with suppress(OSError):  # no message yet
        _seen.update(Path(file).read_text(encoding="ascii").split())


def is_first_time(text: str) -> bool:
    """Return True, and record it, if the command has not printed this text. Only the main process prints."""
    if not distributed.is_main_process():
        return False
    line = hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()
    file = os.environ.get(SEEN_FILE_VARIABLE)
    if file:
        _recall(file)
    if line in _seen:
        return False
    _seen.add(line)
    with suppress(OSError):  # on a full disk the message is printed twice
        if file:
            with open(file, "a", encoding="ascii") as lines:
                lines.write(f"{line}\n")
    return True


def clean(text: str) -> str:
    """Return the text without secrets and control characters except newline and tab: model text is untrusted."""
    return redact(CONTROL.sub("", text))


def set_mode(mode: Mode) -> None:
    """Set an option on what this command prints. Raises RLHFError C11 for two that contradict each other."""
    _modes.add(mode)
    for first, second in (("quiet", "verbose"), ("json", "markdown")):
        if {first, second} <= _modes:
            raise RLHFError("C11", f"--{first} and --{second} contradict each other", hint="give one of the two")
    if mode == "verbose":
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
        for name in LIBRARY_LOGS:
            os.environ.setdefault(name, "info")


def has_mode(mode: Mode) -> bool:
    """Return True if the command line has this option."""
    return mode in _modes


def mode_options() -> list[str]:
    """Return the options for a child process that prints as much as this one."""
    return [f"--{mode}" for mode in ("quiet", "verbose") if mode in _modes]


def stdout_of_children() -> int | None:
    """Return where a child process prints its results: stdout (None), or elsewhere if stdout is for one result."""
    if has_mode("quiet"):
        return subprocess.DEVNULL
    return STDERR if has_mode("json") else None


def say(text: str, *, dim: bool = False) -> None:
    """Print a log line on stderr, on the main process only; `dim` dims it on a terminal."""
    if not has_mode("quiet"):
        error(text, dim=dim)


def error(text: str, *, dim: bool = False) -> None:
    """Print a line on stderr that --quiet does not hide, on the main process only."""
    if distributed.is_main_process():
        _write(sys.stderr, text, dim=dim)


def out(text: str = "", *, end: str = "\n") -> None:
    """Print a line of a result on stdout, on the main process only; without a line break if `end` is empty."""
    if not has_mode("quiet") and distributed.is_main_process():
        _write(_stream_of_tables(), text, end=end)


def answer(text: str = "", *, end: str = "\n") -> None:
    """Print on stdout what the command is for, also with --quiet or --json, on the main process only."""
    if distributed.is_main_process():
        _write(sys.stdout, text, end=end)


def print_json(value: object) -> None:
    """Print a value as JSON on stdout."""
    answer(json.dumps(value, indent=2))


def conclude(place: str, values: Mapping[str, Any]) -> None:
    """Print the result of a command once more for scripts: with --json its values, with --quiet its path."""
    if has_mode("json"):
        print_json(values)
    elif has_mode("quiet"):
        answer(place)


def _stream_of_tables() -> TextIO:
    """Return stdout, or stderr where stdout is for one object."""
    return sys.stderr if has_mode("json") or has_mode("markdown") else sys.stdout


def is_stdout_open() -> bool:
    """Return False once the reader of stdout is gone."""
    return not any(stream is sys.stdout for stream in _closed_streams)


def stdout_error() -> OSError | None:
    """Return the error that truncated stdout (disk full), or None. A missing reader is not an error."""
    return _stdout_error


def is_interactive() -> bool:
    """Return True if both stdin and stdout are terminals."""
    return bool(sys.stdin and sys.stdin.isatty() and sys.stdout.isatty())


def ask(prompt: str) -> str | None:
    """Return the next line of stdin without its line break, or None at the end. Invalid UTF-8 becomes surrogates.

    In an interactive session, `prompt` is shown, lines have editing and history, and a pasted block is one line.
    """
    if isinstance(sys.stdin, io.TextIOWrapper) and sys.stdin.errors != "surrogateescape":
        sys.stdin.reconfigure(errors="surrogateescape")
    if not is_interactive():
        line = sys.stdin.readline() if sys.stdin else ""
        return line.removesuffix("\n").removesuffix("\r") if line else None
    import readline  # enables line editing in `input`

    readline.parse_and_bind("set enable-bracketed-paste on")
    try:
        return input(prompt)
    except EOFError:
        out()
        return None


def log_from_any_rank(text: str) -> None:
    """Print a log line on stderr from any process, with its rank: for errors of one process."""
    _write(sys.stderr, text if distributed.world_size() == 1 else f"process {distributed.rank()}: {text}")


def log_once(text: str) -> None:
    """Print a log line once per command, even if several stages log it."""
    if not _muted and is_first_time(text):
        say(text)


def warn(code: str, text: str, *, where: str | None = None, hint: str | None = None) -> None:
    """Print `warning[CODE]: ...` on stderr once per command, and keep it for `emitted_warnings`."""
    where = where and clean(where)  # file names are untrusted, too
    problem = Problem(code, clean(text), where, hint and clean(hint))
    line = Problem(code, problem.text, where).line("warning")
    if line not in _warnings:
        _warnings[line] = problem
        if not _muted and is_first_time(line):
            say(problem.line("warning"))


@contextmanager
def muted_warnings() -> Iterator[None]:
    """Print no warnings and no lines of `log_once`: another process will. Warnings are kept."""
    global _muted
    before = _muted
    _muted = True
    try:
        yield
    finally:
        _muted = before


def emitted_warnings() -> list[str]:
    """Return the warnings so far, without their hints, for reports and manifests."""
    return list(_warnings)


def emitted_problems() -> list[Problem]:
    """Return the warnings so far as problems."""
    return list(_warnings.values())


def reset() -> None:
    """Forget all warnings and messages: a new command starts in the same process."""
    global _stdout_error
    _stdout_error = None
    _warnings.clear()
    _seen.clear()
    _modes.clear()


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None) -> None:
    """Print a table on stdout, on the main process only: drawn and wrapped on a terminal, else aligned and never
    truncated.
    """
    assert all(len(row) == len(columns) for row in rows), "every row needs a cell for each column"
    if has_mode("quiet") or not distributed.is_main_process():
        return
    stream = _stream_of_tables()
    if is_terminal(stream):
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        grid = Table(title=Text(clean(title)) if title else None)
        for column in columns:
            grid.add_column(Text(clean(column)))
        for row in rows:
            grid.add_row(*(Text(clean(cell)) for cell in row))
        Console(file=stream).print(grid)
        return
    cells = [[clean(cell).replace("\n", "\\n").replace("\t", "\\t") for cell in row] for row in (columns, *rows)]
    widths = [max(_width(row[column]) for row in cells) for column in range(len(columns))]
    if title:
        out(title)
    for row in cells:
        out("  ".join(cell + " " * (width - _width(cell)) for cell, width in zip(row, widths, strict=True)).rstrip())


def is_terminal(stream: TextIO) -> bool:
    """Return True if the stream is a terminal that can redraw."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _width(text: str) -> int:
    """Return the columns a text takes in a fixed-width font: 2 per East Asian character, 0 per combining mark."""
    return sum(0 if combining(char) else 2 if east_asian_width(char) in "WF" else 1 for char in text)


def _write(stream: TextIO, text: str, *, end: str = "\n", dim: bool = False) -> None:
    """Write text and flush; characters that the stream cannot encode are escaped."""
    encoding = stream.encoding or "utf-8"
    shown = clean(text).encode(encoding, "backslashreplace").decode(encoding)
    styled = dim and is_terminal(stream) and not os.environ.get("NO_COLOR")
    try:
        stream.write((f"{DIM}{shown}{PLAIN}" if styled else shown) + end)
        stream.flush()
    except OSError as error:
        if error.errno not in READER_GONE + DISK_FULL:
            raise
        if error.errno in DISK_FULL and stream is sys.stdout:
            global _stdout_error
            _stdout_error = error
        _closed_streams.append(stream)
        # The terminal or pipe is closed, or the disk is full. The run continues and can save; its output is lost.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def duration(seconds: float) -> str:
    """Return a duration as text in at most two units: `under 1 ms`, `0.012 s`, `4.7 s`, `42 s`, `12 min 3 s`, `2 d 5
    h`.
    """
    if 0 < seconds < 0.001:
        return "under 1 ms"
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    rounded = round(seconds)
    for large, unit, small, rest in ((DAY, "d", HOUR, "h"), (HOUR, "h", MINUTE, "min"), (MINUTE, "min", 1, "s")):
        if rounded >= large:
            minor = rounded % large // small
            return f"{rounded // large} {unit}" + (f" {minor} {rest}" if minor else "")
    return f"{rounded} s"


def ago(seconds: float) -> str:
    """Return an age as text: `just now`, `12 min ago`, `3 h ago`, `2 d ago`. Negative ages are `just now`."""
    for size, unit in ((DAY, "d"), (HOUR, "h"), (MINUTE, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return "just now"
