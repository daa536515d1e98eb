"""What every tracker is told of a run, and what it is asked to take."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

NO_STEP = -1  # a step before the first
PROJECT = "rlhf"
Row = Mapping[str, str | float]  # of a table: a bool is 1 or 0


@dataclass(frozen=True)
class TrackerRun:
    """A stage that begins, or goes on."""

    stage: str
    folder: Path  # RUN/<stage>; a tracker may write into the folder of its own name there
    project: str | None  # None: the tracker's own way to find one, or PROJECT
    name: str
    group: str  # the same for all stages of a run
    config: dict[str, Any]  # resolved, JSON-able
    saved: int = NO_STEP  # the step of the state that it goes on from
    told: int = NO_STEP  # the last step that the log held when it was begun again: what came after `saved` comes again


class Tracker(Protocol):
    """One run of a tracker, open. Whatever it raises, it is left alone from then on."""

    last: int  # the last step that it holds of an earlier start: what is told again up to it, it would hold twice
    place: str  # where to look, for a line on the terminal

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step, by name."""

    def table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """Rows with the same columns each."""

    def histograms(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """Samples of distributions, by name."""

    def close(self, exit_code: int) -> None:
        """Nothing more comes: of what was told all is written, or sent."""
