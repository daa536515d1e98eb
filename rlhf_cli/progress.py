"""How far long work has come: a live bar with rate and time left on a terminal, plain lines now and then elsewhere.

One bar is drawn, of the outermost work; below it (off a terminal: behind it) stands what is under way within.
"""

import sys
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar

from rlhf_cli import distributed, terminal
from rlhf_cli.terminal import duration

SECONDS_BETWEEN_LINES = 10.0
BRIEF = 2.0  # seconds that brief work may take unseen on a terminal; elsewhere, until the first line

T = TypeVar("T")
_under_way: list["Progress"] = []  # the outermost first


class Progress:
    """`with Progress("ppo", 100, "update") as bar: bar.advance(note="reward 1.2")`.

    Off a terminal it is a plain line at most every ten seconds, and one at the end. `done` was done before and does not
    count for the rate. `brief` work is shown only where it takes longer than usual.
    """

    def __init__(self, label: str, total: int, unit: str = "step", *, done: int = 0, brief: bool = False) -> None:
        self.label, self.total, self.unit, self.brief = terminal.clean(label), total, unit, brief
        self.done, self.note, self._before = done, "", done
        self._bar: _Bar | None = None
        self._shown = not brief

    def __enter__(self) -> "Progress":
        self._began = self._last_line = time.monotonic()
        _under_way.append(self)
        _under_way[0]._show()
        return self

    def advance(self, n: int = 1, note: str = "") -> None:
        """Counts `n` more units as done; `note` is shown behind the numbers until the next one."""
        self.done += n
        self.note = terminal.clean(note).replace("\n", " ") or self.note
        if _under_way:
            _under_way[0]._show()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self not in _under_way:  # what it stood in has ended before it
            return
        place = _under_way.index(self)
        del _under_way[place:]  # an error may have left inner ones open
        if place:
            return
        if self._bar:
            with suppress(OSError):
                self._bar.stop()
        elif self._shown:
            terminal.say(self._line())

    def nested_status(self) -> str:
        """What is under way within this work, the largest first."""
        return ", ".join(part._counts() for part in _under_way[1:] if part.total > 1)

    def _show(self) -> None:
        now = time.monotonic()
        if terminal.is_terminal(sys.stderr) and distributed.is_main_process():
            self._shown |= now - self._began >= BRIEF
            if self._shown and not self._bar:
                with suppress(OSError):  # a terminal that is gone
                    self._bar = _Bar(self)
        elif now - self._last_line >= SECONDS_BETWEEN_LINES and (self.done < self.total or self.nested_status()):
            self._last_line, self._shown = now, True
            terminal.say(self._line())

    def _counts(self) -> str:
        return f"{self.label} {self.done}/{self.total} {self.unit}".rstrip()

    def rate(self) -> str:
        """Speed and time left, in words."""
        seconds, done = time.monotonic() - self._began, self.done - self._before
        if done <= 0 or seconds <= 0:
            return ""
        speed = done / seconds
        rate = f"{speed:.3g} {self.unit}/s" if speed >= 1 else f"{1 / speed:.3g} s/{self.unit}"
        left = max(self.total - self.done, 0) / speed
        return f"{rate}, {duration(left)} left" if left else f"{rate}, {duration(seconds)} in all"

    def _line(self) -> str:
        return ", ".join(part for part in (self._counts(), self.rate(), self.note, self.nested_status()) if part)


def track_progress(what: str, items: Sequence[T]) -> Generator[T]:
    """The items; where a Progress is under way they are counted within it. A library's user sees nothing."""
    if not _under_way:
        yield from items
        return
    with Progress(what, len(items), "") as part:
        for item in items:
            yield item
            part.advance()


class _Bar:
    """The live bar of a terminal, drawn anew some times a second. rich is imported here, so that short commands never
    load it.
    """

    def __init__(self, progress: Progress) -> None:
        from rich.console import Console, Group
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bars
        from rich.text import Text

        bars = Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}", markup=False),
        )
        task = bars.add_task(progress.label, total=progress.total, rate="")

        def drawn() -> Any:
            bars.update(task, completed=progress.done, rate=progress.rate())
            details = [
                Text(f"  {text}", overflow="ellipsis", no_wrap=True)
                for text in (progress.note, progress.nested_status())
                if text
            ]
            return Group(bars, *details)

        # What is printed goes to stdout itself when that is a file, else above the bar.
        drawable = terminal.is_terminal(sys.stdout)
        self._live = Live(get_renderable=drawn, console=Console(stderr=True), redirect_stdout=drawable)
        self._live.start()
        self.stop = self._live.stop
