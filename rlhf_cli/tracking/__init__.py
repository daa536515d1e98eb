"""What `output.report_to` names: each tracker is told what is logged, and none can do harm to a training.

A tracker's library is imported when its run is opened, never before, and by the first of several processes alone. (TRL
imports wandb by itself where it is installed.)
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from rlhf_cli import distributed, terminal
from rlhf_cli.config.base import Config
from rlhf_cli.errors import RLHFError, install_hint, redact
from rlhf_cli.tracking.tensorboard import TensorBoard
from rlhf_cli.tracking.tracker_run import NO_STEP, Tracker, TrackerRun
from rlhf_cli.tracking.trackio import Trackio
from rlhf_cli.tracking.wandb import WandB

Line = Mapping[str, Any]  # of a log: its step, and numbers by name


class Trackers:
    """`with Trackers(config) as trackers:`; open within. Without `output.report_to` all of it does nothing.

    One that fails is left alone from then on, with a warning (R16).
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self._open: dict[str, Tracker] = {}
        self._kept: Sequence[Line] = ()
        self._before: set[tuple[int, frozenset[str]]] = set()

    def resume(self, before: Iterable[Line], kept: Sequence[Line]) -> None:
        """Before it is opened: the lines of the log that was there, and those of them that a run goes on from."""
        self._before, self._kept = {_mark(line) for line in before}, kept

    def __enter__(self) -> "Trackers":
        if distributed.is_main_process():
            for name in dict.fromkeys(self.config.output.report_to):
                self._guarded(name, self._begin, name)
        for line in self._kept:  # all of it, where a tracker was named only now
            self.metrics(line)
        self._kept = ()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        code = error.code if isinstance(error, SystemExit) else 0 if error is None else 1
        for name in list(self._open):
            self._guarded(name, self._open.pop(name).close, int(code or 0))

    def __bool__(self) -> bool:
        """Whether anybody listens."""
        return bool(self._open)

    def metrics(self, line: Line) -> None:
        """A line of a log: `step`, and numbers."""
        step, values = line["step"], {name: value for name, value in line.items() if name != "step"}
        self._tell(step, lambda tracker: tracker.metrics(step, values), again=_mark(line) in self._before)

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows of a table, the same keys in each; what is neither text nor number is left out."""
        if rows and self:
            plain = [_cells(row) for row in rows]
            self._tell(step, lambda tracker: tracker.table(step, name, plain))

    def histograms(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """Samples of distributions, by name."""
        filled = {name: samples for name, samples in values.items() if samples}
        self._tell(step, lambda tracker: tracker.histograms(step, filled))

    def _tell(self, step: int, tell: Callable[[Tracker], None], *, again: bool = True) -> None:
        """Those that do not hold it. `again`: it was told before, if the run had come so far."""
        for name, tracker in list(self._open.items()):
            if not (again and step <= tracker.last):
                self._guarded(name, tell, tracker)

    def _begin(self, name: str) -> None:
        tracker = self._open[name] = TRACKERS[name](self._run())
        terminal.say(f"{self.config.stage:<8} {name}: {tracker.place}")

    def _run(self) -> TrackerRun:
        config = self.config
        group = Path(config.run).name
        name = "-".join(part for part in (group, config.stage) if part)
        return TrackerRun(
            config.stage,
            config.folder,
            config.output.project,
            config.output.run_name or name,
            group,
            _redacted(config.dump(relative_to=config.folder)),
            max((line["step"] for line in self._kept), default=NO_STEP),
            max((step for step, _ in self._before), default=NO_STEP),
        )

    def _guarded(self, name: str, call: Callable[..., None], *arguments: Any) -> None:
        """Nothing that is raised within comes through: the tracker is closed, and no more is told to it."""
        try:
            call(*arguments)
        except Exception as error:
            said = " ".join(str(error).split()) or "it says nothing more"
            hint = "the run goes on without it, and its own files hold every number; see docs/commands.md"
            terminal.warn("R16", f"{name}: {type(error).__name__}: {said[:300]}", hint=hint)
            if tracker := self._open.pop(name, None):
                with suppress(Exception):
                    tracker.close(1)


def require(config: Config) -> None:
    """Raises RLHFError E06 where a library that output.report_to names is not installed."""
    missing = [name for name in config.output.report_to if find_spec(name) is None]
    if missing:
        text = f"output.report_to names what is not installed: {', '.join(missing)}"
        hint = f"{install_hint('trackers')}; or take it out"
        raise RLHFError("E06", text, where=config.where("output.report_to"), hint=hint)


def _mark(line: Line) -> tuple[int, frozenset[str]]:
    """What tells a line from the others of its step, such as an evaluation's."""
    return line["step"], frozenset(line)


def _cells(row: Mapping[str, Any], prefix: str = "") -> dict[str, str | float]:
    found: dict[str, str | float] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            found |= _cells(value, f"{prefix}{key}/")
        elif isinstance(value, str | int | float):
            found[prefix + key] = redact(value) if isinstance(value, str) else value
    return found


def _redacted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _redacted(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_redacted(inner) for inner in value]
    return redact(value) if isinstance(value, str) else value


TRACKERS: dict[str, Callable[[TrackerRun], Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "trackio": Trackio}
