"""The open trackers of a run, as `output.report_to` names them.

Errors of a tracker never stop a training. Its library is imported when its run is opened, on the main process only.
(TRL imports an installed wandb.)
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from rlhf_cli import distributed, terminal
from rlhf_cli.config.base import Config
from rlhf_cli.errors import RLHFError, redact
from rlhf_cli.tracking.adapter import LIBRARIES, AccelerateTracker
from rlhf_cli.tracking.backends import NO_STEP, TensorBoard, TrackerRun, Trackio, WandB

Tracker = TensorBoard | WandB | AccelerateTracker
Line = Mapping[str, Any]  # of a log: `step`, and numbers by name


class Trackers:
    """Open runs of the trackers in `output.report_to`: `with Trackers(config) as trackers:`.

    A tracker that raises is closed, with a warning (R16), and gets nothing more. Without `report_to` nothing happens.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self._open: dict[str, Tracker] = {}
        self._kept: Sequence[Line] = ()
        self._logged: set[tuple[int, frozenset[str]]] = set()  # a step may have several lines, as of an evaluation

    def resume(self, before: Iterable[Line], kept: Sequence[Line]) -> None:
        """Pass the lines of the earlier log, and those kept on resume. Call it before entering the context."""
        self._logged = {_identity(line) for line in before}
        self._kept = kept

    def __enter__(self) -> "Trackers":
        if distributed.is_main_process():
            for name in dict.fromkeys(self.config.output.report_to):
                self._guarded(name, self._begin, name)
        for line in self._kept:  # sends the full log to a newly added tracker
            self.metrics(line)
        self._kept = ()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        exit_code = 0 if error is None else 1
        if isinstance(error, SystemExit):
            exit_code = int(error.code or 0)
        while self._open:
            name = next(iter(self._open))
            tracker = self._open.pop(name)
            self._guarded(name, tracker.close, exit_code)

    def __bool__(self) -> bool:
        return bool(self._open)

    def metrics(self, line: Line) -> None:
        """Log a line of metrics.jsonl: `step` and numbers."""
        step = line["step"]
        values = {name: value for name, value in line.items() if name != "step"}
        self._send(step, lambda tracker: tracker.metrics(step, values), again=_identity(line) in self._logged)

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log a table whose rows have the same keys; values other than text and numbers are dropped."""
        if rows and self:
            plain = [_cells(row) for row in rows]
            self._send(step, lambda tracker: tracker.table(step, name, plain))

    def histograms(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """Log samples of distributions, by name."""
        filled = {name: samples for name, samples in values.items() if samples}
        self._send(step, lambda tracker: tracker.histograms(step, filled))

    def _send(self, step: int, send: Callable[[Tracker], None], *, again: bool = True) -> None:
        """Send to all trackers. With `again`, skip those that have the step from an earlier start."""
        for name, tracker in list(self._open.items()):
            has_step = step <= tracker.last
            if not (again and has_step):
                self._guarded(name, send, tracker)

    def _begin(self, name: str) -> None:
        config = self.config
        group = Path(config.run).name
        default_name = f"{group}-{config.stage}" if group else config.stage
        run = TrackerRun(
            stage=config.stage,
            folder=config.folder,
            project=config.output.project,
            name=config.output.run_name or default_name,
            group=group,
            config=_redacted(config.dump(relative_to=config.folder)),
            saved_step=max((line["step"] for line in self._kept), default=NO_STEP),
            logged_step=max((step for step, _ in self._logged), default=NO_STEP),
        )
        tracker = TRACKERS[name](run)
        self._open[name] = tracker
        terminal.say(f"{config.stage:<8} {name}: {tracker.place}")

    def _guarded(self, name: str, call: Callable[..., None], *arguments: Any) -> None:
        """Call a tracker; if it raises, warn and close it."""
        try:
            call(*arguments)
        except Exception as error:
            message = " ".join(str(error).split()) or "no message"
            hint = "the run continues without it, and metrics.jsonl has all numbers; see docs/trackers.md"
            terminal.warn("R16", f"{name}: {type(error).__name__}: {message[:300]}", hint=hint)
            tracker = self._open.pop(name, None)
            if tracker:
                with suppress(Exception):
                    tracker.close(1)


def require(config: Config) -> None:
    """Raise RLHFError E06 if a library that output.report_to names is not installed."""
    missing = [name for name in config.output.report_to if find_spec(name) is None]
    if missing:
        text = f"output.report_to names trackers that are not installed: {', '.join(missing)}"
        hint = f"pip install {' '.join(missing)}, or remove {'them' if len(missing) > 1 else 'it'}"
        raise RLHFError("E06", text, where=config.where("output.report_to"), hint=hint)


def _identity(line: Line) -> tuple[int, frozenset[str]]:
    """Return what identifies a line of the log: a step may have several, with different names."""
    return line["step"], frozenset(line)


def _cells(row: Mapping[str, Any], prefix: str = "") -> dict[str, str | float]:
    cells: dict[str, str | float] = {}
    for key, value in row.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            cells |= _cells(value, f"{name}/")
        elif isinstance(value, str):
            cells[name] = redact(value)
        elif isinstance(value, int | float):
            cells[name] = value
    return cells


def _redacted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _redacted(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_redacted(inner) for inner in value]
    return redact(value) if isinstance(value, str) else value


TRACKERS: dict[str, Callable[[TrackerRun], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "trackio": Trackio,
    **{library: partial(AccelerateTracker, library) for library in LIBRARIES},
}
