"""Progress of long work: a live bar with rate and time left on a terminal, occasional lines elsewhere.

Only the outermost work has a bar; nested work is shown below it, or after it off a terminal.
"""

import sys
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, TypeVar

from rlhf_cli import distributed, terminal
from rlhf_cli.terminal import duration

SECONDS_BETWEEN_LINES = 10.0
SLOW_S = 60.0  # of one call of another's code
BRIEF_S = 2.0  # `brief` work is hidden for this time on a terminal, elsewhere until the first line

T = TypeVar("T")
_open: list["Progress"] = []  # outermost first


class Progress:
    """`with Progress("ppo", 100, "update") as bar: bar.advance(note="reward 1.2")`.

    Off a terminal, prints a line at most every ten seconds and one at the end. `done` units were done earlier and do
    not count for the rate. `brief` work is shown only if it takes longer than usual.
    """

    def __init__(self, label: str, total: int, unit: str = "step", *, done: int = 0, brief: bool = False) -> None:
        self.label = terminal.clean(label)
        self.total = total
        self.unit = unit
        self.brief = brief
        self.done = done
        self.note = ""
        self._done_before = done
        self._bar: Any = None
        self._shown = not brief

    def __enter__(self) -> "Progress":
        self._began = self._last_line = time.monotonic()
        _open.append(self)
        _open[0]._show()
        return self

    def advance(self, n: int = 1, note: str = "") -> None:
        """Count `n` more units as done; `note` is shown after the numbers until the next one."""
        self.done += n
        self.note = terminal.clean(note).replace("\n", " ") or self.note
        if _open:
            _open[0]._show()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self not in _open:  # the outer work has ended first
            return
        depth = _open.index(self)
        del _open[depth:]  # an error may have left nested work open
        if depth:
            return
        if self._bar:
            with suppress(OSError):
                self._bar.stop()
        elif self._shown:
            terminal.say(self._line())

    def nested_status(self) -> str:
        """Return the progress of nested work, outermost first."""
        return ", ".join(part._counts() for part in _open[1:] if part.total > 1)

    def _show(self) -> None:
        if terminal.has_mode("quiet"):
            return
        now = time.monotonic()
        if terminal.is_terminal(sys.stderr) and distributed.is_main_process():
            self._shown |= now - self._began >= BRIEF_S
            if self._shown and not self._bar:
                with suppress(OSError):  # the terminal is closed
                    self._bar = _start_bar(self)
        elif now - self._last_line >= SECONDS_BETWEEN_LINES and (self.done < self.total or self.nested_status()):
            self._last_line = now
            self._shown = True
            terminal.say(self._line())

    def _counts(self) -> str:
        return f"{self.label} {self.done}/{self.total} {self.unit}".rstrip()

    def rate(self) -> str:
        """Return speed and time left as text."""
        seconds = time.monotonic() - self._began
        done = self.done - self._done_before
        if done <= 0 or seconds <= 0:
            return ""
        speed = done / seconds
        rate = f"{speed:.3g} {self.unit}/s" if speed >= 1 else f"{1 / speed:.3g} s/{self.unit}"
        remaining = max(self.total - self.done, 0) / speed
        return f"{rate}, {duration(remaining)} left" if remaining else f"{rate}, {duration(seconds)} in all"

    def _line(self) -> str:
        return ", ".join(part for part in (self._counts(), self.rate(), self.note, self.nested_status()) if part)


def track_progress(label: str, items: Sequence[T]) -> Generator[T]:
    """Yield the items, counted as nested work if a Progress is open. Library users see nothing."""
    if not _open:
        yield from items
        return
    with Progress(label, len(items), "") as progress:
        for item in items:
            yield item
            progress.advance()


def _start_bar(progress: Progress) -> Any:
    """Start a rich Live with the bar. Imports rich lazily, so that short commands never load it."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bars
    from rich.text import Text

    label, rate = (TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[rate]}"))
    bars = Bars(label, BarColumn(), MofNCompleteColumn(), rate)
    task = bars.add_task(progress.label, total=progress.total, rate="")

    def render() -> Any:
        bars.update(task, completed=progress.done, rate=progress.rate())
        texts = filter(None, (progress.note, progress.nested_status()))
        return Group(bars, *(Text(f"  {text}", overflow="ellipsis", no_wrap=True) for text in texts))

    # on a terminal, stdout is printed above the bar
    live = Live(get_renderable=render, console=Console(stderr=True), redirect_stdout=terminal.is_terminal(sys.stdout))
    live.start()
    return live


@contextmanager
def says_if_slow(what: str) -> Iterator[None]:
    """Context manager that prints a line once if the code of others in it takes longer than SLOW_S: it may hang."""
    timer = threading.Timer(SLOW_S, lambda: terminal.log_once(f"{what} takes more than {SLOW_S:g} s"))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
