"""What it costs a run to be safe."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Cost:
    """Counts checkpoints and snapshots, and their share of the wall time since it was made."""

    def __init__(self) -> None:
        self.count, self.seconds, self._began = 0, 0.0, time.monotonic()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Within, one is written."""
        start = time.monotonic()
        yield
        self.count, self.seconds = self.count + 1, self.seconds + time.monotonic() - start

    def __str__(self) -> str:
        share = self.seconds / max(time.monotonic() - self._began, 1e-9)
        checkpoints = "1 checkpoint" if self.count == 1 else f"{self.count} checkpoints"
        return f"{checkpoints} took {self.seconds:.1f} s, {share:.1%} of the time"
