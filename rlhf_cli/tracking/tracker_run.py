"""Interface of trackers, and the description of a run that they get."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

NO_STEP = -1
PROJECT = "rlhf"
Row = Mapping[str, str | float]  # of a table; booleans are 1 or 0


@dataclass(frozen=True)
class TrackerRun:
    """A stage that starts or resumes."""

    stage: str
    folder: Path  # RUN/<stage>; a tracker may write into the folder of its own name there
    project: str | None  # None: the tracker's default, or PROJECT
    name: str
    group: str  # the same for all stages of a run
    config: dict[str, Any]  # resolved, JSON-able
    saved_step: int = NO_STEP  # of the checkpoint that it resumes from
    logged_step: int = NO_STEP  # last step of the log before resuming; the steps after `saved_step` are repeated


class Tracker(Protocol):
    """An open run of a tracker. If a method raises, no further method except close is called."""

    last: int  # last step logged by an earlier start; repeated steps up to it must not be logged again
    place: str  # URL, folder or command to view it, for the terminal

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers of a step, by name."""

    def table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """Log rows with the same columns."""

    def histograms(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """Log samples of distributions, by name."""

    def close(self, exit_code: int) -> None:
        """Finish the run after writing or sending everything."""
