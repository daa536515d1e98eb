"""What both sides are asked to do, and what they are measured with.

Standard library alone: the peer's environment has nothing of ours, and reads the same job.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Job:
    """PPO on the reference workload; the first update warms up and is not counted."""

    sft: str  # policy and reference
    reward: str  # reward and value model
    prompts: str  # a JSON file: a list of token ids each
    dense: bool = False  # no stop token: every response has all its tokens, and there is no padding to save
    first: int = 0  # the prompt to begin with
    seed: int = 0
    updates: int = 5
    batch: int = 64
    rows: int = 16  # of a micro-batch
    epochs: int = 4
    response_length: int = 64
    learning_rate: float = 3e-5
    kl_coef: float = 0.05
    threads: int = 1
    settings: dict[str, Any] = field(default_factory=dict)  # other keys of our `ppo:`; the peer knows nothing of them

    @property
    def missing_eos_penalty(self) -> float | None:
        return None if self.dense else 1.0

    @classmethod
    def read(cls, path: str | Path) -> "Job":
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    def batches(self) -> list[list[list[int]]]:
        """The prompts of each update, as token ids."""
        rows = json.loads(Path(self.prompts).read_text(encoding="utf-8"))
        drawn = [rows[(self.first + row) % len(rows)] for row in range(self.updates * self.batch)]
        return [drawn[start : start + self.batch] for start in range(0, len(drawn), self.batch)]


def real_tokens(prompts: list[list[int]], responses: list[list[int]], stop: int | None) -> int:
    """Tokens of prompts and of responses through the first stop token; padding is in neither count."""
    ends = (row.index(stop) + 1 if stop in row else len(row) for row in responses)
    return sum(map(len, prompts)) + sum(ends)


def memory_mb(name: str) -> float:
    """This process's VmRSS (now) or VmHWM (most so far) from Linux's /proc.

    Not ru_maxrss, which a child inherits from the process that started it.
    """
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise KeyError(name)


class Laps:
    """CPU seconds of all threads, of updates and their phases.

    A busy machine stretches them too, for its caches and memory are shared: by half was seen.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def add(self, name: str, seconds: float) -> None:
        self.seconds.setdefault(name, []).append(seconds)

    @contextmanager
    def lap(self, name: str) -> Iterator[None]:
        began = time.process_time()
        yield
        self.add(name, time.process_time() - began)

    def around(self, owner: Any, method: str, name: str) -> None:
        """Count each call of a method as a lap."""
        call: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.lap(name):
                return call(*args, **kwargs)

        setattr(owner, method, timed)

    def medians(self) -> dict[str, float]:
        """Of each name's laps, the first left out where there are more."""
        return {name: round(median(laps[1:] or laps), 3) for name, laps in self.seconds.items()}


def report(
    laps: Laps, real: list[int], padded: list[int], rates: list[dict[str, float]], baseline_mb: float, **more: Any
) -> dict[str, Any]:
    """What each side prints; tokens are means over the updates that count, the machine's rates medians over all."""
    peak, phases = memory_mb("VmHWM"), laps.medians()
    counted, positions = real[1:] or real, padded[1:] or padded
    return {
        "cpu_s": phases.pop("step"),
        "phases": phases,
        "real_tokens": round(sum(counted) / len(counted), 1),
        "padded_tokens": round(sum(positions) / len(positions), 1),
        "updates": laps.seconds["step"],
        "gflops": {name: round(median(rate[name] for rate in rates), 1) for name in rates[0]},
        "imports_mb": round(baseline_mb, 1),
        "peak_mb": round(peak, 1),
        **more,
    }
