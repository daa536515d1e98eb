"""CPU seconds, memory and tokens of a process. Both environments import this module: standard library only."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any


def real_tokens(prompts: list[list[int]], responses: list[list[int]], stop: int | None) -> int:
    """Count the tokens of prompts, and of responses through the first stop token, without padding."""
    ends = (row.index(stop) + 1 if stop in row else len(row) for row in responses)
    return sum(map(len, prompts)) + sum(ends)


def memory_mb(name: str) -> float:
    """Return VmRSS (current) or VmHWM (peak) of this process in MiB, from Linux's /proc.

    ru_maxrss is not used, because a child inherits it from its parent.
    """
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise KeyError(name)


class PhaseTimer:
    """CPU seconds of all threads, per update and phase.

    A busy machine increases them by up to half, because caches and memory are shared.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def add(self, name: str, seconds: float) -> None:
        self.seconds.setdefault(name, []).append(seconds)

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        start = time.process_time()
        yield
        self.add(name, time.process_time() - start)

    def wrap(self, owner: Any, method: str, name: str) -> None:
        """Measure each call of a method of `owner` as a phase."""
        call: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.measure(name):
                return call(*args, **kwargs)

        setattr(owner, method, timed)

    def medians(self) -> dict[str, float]:
        """Return the median of each phase, without its first measurement if there are others."""
        return {name: round(median(seconds[1:] or seconds), 3) for name, seconds in self.seconds.items()}


def summary(
    timer: PhaseTimer, real: list[int], padded: list[int], rates: list[dict[str, float]], imports_mb: float, **more: Any
) -> dict[str, Any]:
    """Return the result of a process. Tokens are means without the warm-up, rates are medians over all updates."""
    peak, phases = memory_mb("VmHWM"), timer.medians()
    real, padded = real[1:] or real, padded[1:] or padded
    return {
        "cpu_s": phases.pop("step"),
        "phases": phases,
        "real_tokens": round(sum(real) / len(real), 1),
        "padded_tokens": round(sum(padded) / len(padded), 1),
        "updates": timer.seconds["step"],
        "gflops": {name: round(median(rate[name] for rate in rates), 1) for name in rates[0]},
        "imports_mb": round(imports_mb, 1),
        "peak_mb": round(peak, 1),
        **more,
    }
