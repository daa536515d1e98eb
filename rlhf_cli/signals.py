"""SIGTERM, SIGINT and SIGHUP as a wish, not a blow: the loop ends at its next safe place.

A second signal ends the process at once. And a bound on work that others decide the length of.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType

from rlhf_cli import processes

HEARD = b"\nstopping after this step, with a checkpoint; a second signal ends it at once\n"
ONE_BLOW = 0.2  # seconds: what stops a whole group of processes reaches a child twice, itself and through its parent


class StopWish:
    """`with StopWish() as stop:` ...

    `stop.settle(told); if stop.wished: save; raise SystemExit(stop.exit_code)`. Only in the main thread.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.wished: signal.Signals | None = None
        self._heard: signal.Signals | None = None
        self._heard_at = 0.0
        self._before: dict[signal.Signals, object] = {}

    @property
    def exit_code(self) -> int:
        """128 + the signal's number: 130 after SIGINT, 143 after SIGTERM, 129 after SIGHUP."""
        assert self.wished
        return 128 + self.wished

    def settle(self, told: Callable[[signal.Signals | None], Iterable[signal.Signals | None]]) -> None:
        """Make a signal that came to any process of a group by now the wish of all; `told` says what each one heard.

        The wish changes here alone. A signal comes at any time, to one of them, and all must end at the same place.
        """
        if self.wished is None:
            self.wished = next((heard for heard in told(self._heard) if heard), None)

    def __enter__(self) -> "StopWish":
        numbers = [number for number in self.SIGNALS if not is_nohup(number)]
        self._before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._heard is None:
            self._heard, self._heard_at = signal.Signals(number), time.monotonic()
            if processes.is_first():
                with suppress(OSError):  # whoever read it may be gone
                    os.write(2, HEARD)  # straight to the terminal: a print may be what was interrupted
        elif time.monotonic() - self._heard_at > ONE_BLOW:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def is_nohup(number: signal.Signals) -> bool:
    """Whether this is the hang-up of a terminal, and somebody asked to outlive it."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with(parent: int) -> None:
    """In a new child of the process `parent`: SIGTERM when that one is gone, however it went. On Linux alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it was quicker
            os.kill(os.getpid(), signal.SIGTERM)


class TooLong(Exception):
    """Work took longer than `at_most` lets it."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Within, TooLong after so many seconds of the process's own computing; waiting, or a busy machine, does not count.

    Only in the main thread, which alone hears signals; in another one there is no bound.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise TooLong

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
