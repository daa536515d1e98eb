"""Metrics of a run: the logs metrics.jsonl and samples.jsonl, and the trackers of `output.report_to`.

Errors of a tracker never stop a training. Its library is imported when its run is opened, on the main process only.
(TRL imports an installed wandb.)
"""

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, TypedDict

from rlhf_cli import distributed, terminal
from rlhf_cli.config.base import Config
from rlhf_cli.errors import RLHFError, install_hint, redact, shown
from rlhf_cli.files import MAX_LOG_BYTES, open_regular, read_regular, require_inside, sync
from rlhf_cli.jsonl import append_jsonl, is_number, to_json, write_jsonl
from rlhf_cli.tracking.trackers import NO_STEP, TensorBoard, TrackerRun, Trackio, WandB

Tracker = TensorBoard | WandB
Line = Mapping[str, Any]  # of a log: `step`, and numbers by name
TAIL_BYTES = 65_536  # about 45 updates of PPO


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
        self._logged, self._kept = {(line["step"], frozenset(line)) for line in before}, kept

    def __enter__(self) -> "Trackers":
        if distributed.is_main_process():
            for name in dict.fromkeys(self.config.output.report_to):
                self._guarded(name, self._begin, name)
        for line in self._kept:  # sends the full log to a newly added tracker
            self.metrics(line)
        self._kept = ()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        code = error.code if isinstance(error, SystemExit) else 0 if error is None else 1
        for name in list(self._open):
            self._guarded(name, self._open.pop(name).close, int(code or 0))

    def __bool__(self) -> bool:
        return bool(self._open)

    def metrics(self, line: Line) -> None:
        """Log a line of metrics.jsonl: `step` and numbers."""
        step, values = line["step"], {name: value for name, value in line.items() if name != "step"}
        self._send(step, lambda tracker: tracker.metrics(step, values), again=(step, frozenset(line)) in self._logged)

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
            if not (again and step <= tracker.last):
                self._guarded(name, send, tracker)

    def _begin(self, name: str) -> None:
        config, group = self.config, Path(self.config.run).name
        run = TrackerRun(
            config.stage,
            config.folder,
            config.output.project,
            config.output.run_name or "-".join(part for part in (group, config.stage) if part),
            group,
            _redacted(config.dump(relative_to=config.folder)),
            max((line["step"] for line in self._kept), default=NO_STEP),
            max((step for step, _ in self._logged), default=NO_STEP),
        )
        tracker = self._open[name] = TRACKERS[name](run)
        terminal.say(f"{config.stage:<8} {name}: {tracker.place}")

    def _guarded(self, name: str, call: Callable[..., None], *arguments: Any) -> None:
        """Call a tracker; if it raises, warn and close it."""
        try:
            call(*arguments)
        except Exception as error:
            message = " ".join(str(error).split()) or "no message"
            hint = "the run continues without it, and metrics.jsonl has all numbers; see docs/commands.md"
            terminal.warn("R16", f"{name}: {type(error).__name__}: {message[:300]}", hint=hint)
            if tracker := self._open.pop(name, None):
                with suppress(Exception):
                    tracker.close(1)


def require(config: Config) -> None:
    """Raise RLHFError E06 if a library that output.report_to names is not installed."""
    missing = [name for name in config.output.report_to if find_spec(name) is None]
    if missing:
        text = f"output.report_to names trackers that are not installed: {', '.join(missing)}"
        hint = f"{install_hint('trackers')}; or remove it"
        raise RLHFError("E06", text, where=config.where("output.report_to"), hint=hint)


def _cells(row: Mapping[str, Any], prefix: str = "") -> dict[str, str | float]:
    cells: dict[str, str | float] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            cells |= _cells(value, f"{prefix}{key}/")
        elif isinstance(value, str | int | float):
            cells[prefix + key] = redact(value) if isinstance(value, str) else value
    return cells


def _redacted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _redacted(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_redacted(inner) for inner in value]
    return redact(value) if isinstance(value, str) else value


TRACKERS: dict[str, Callable[[TrackerRun], Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "trackio": Trackio}


# Logs


class LogPosition(TypedDict):
    """Length and hash of a log when a checkpoint was saved."""

    step: int
    bytes: int
    sha256: str


class Log:
    """A JSON Lines file of rows with a `step`, truncated to the checkpoint's position on resume.

    Repeated steps therefore appear once. A new run starts an empty file.
    """

    def __init__(self, path: Path, position: LogPosition | None = None) -> None:
        self.path = path
        is_main = distributed.is_main_process()
        content = _truncate(path, position) if is_main and position else b""
        if is_main and not position:
            path.unlink(missing_ok=True)
        self._bytes, self._sha256 = len(content), hashlib.sha256(content)

    def append(self, row: Mapping[str, Any]) -> None:
        """Append a row in one write, on the main process only."""
        if not distributed.is_main_process():
            return
        require_inside(self.path)
        line = append_jsonl(self.path, row)
        self._bytes += len(line)
        self._sha256.update(line)

    def position(self, step: int) -> LogPosition:
        """Flush the log to disk and return its position, for a checkpoint saved after `step`."""
        if self._bytes:
            sync(self.path)
            sync(self.path.parent)
        return {"step": step, "bytes": self._bytes, "sha256": self._sha256.hexdigest()}


class MetricsLog(Log):
    """metrics.jsonl: `step`, the metrics, and `time_s`, seconds since the run began without interruptions.

    Lines are sent to the trackers, too.
    """

    def __init__(self, path: Path, position: LogPosition | None = None, trackers: Trackers | None = None) -> None:
        before = read_log(path)
        super().__init__(path, position)
        kept = read_log(path)
        self._trackers = trackers
        if trackers is not None:
            trackers.resume(before, kept)
        seconds = kept[-1].get("time_s") if kept else 0.0
        self._began = time.monotonic() - (float(seconds) if is_number(seconds) else 0.0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the line of a step. Raises RLHFError R01 for a metric that is not finite."""
        invalid = [name for name, value in metrics.items() if not math.isfinite(value)]
        if invalid:
            raise RLHFError("R01", f"step {step}: {invalid[0]} is {metrics[invalid[0]]}")
        line = {"step": step, **metrics, "time_s": round(time.monotonic() - self._began, 3)}
        self.append(line)
        if self._trackers is not None:
            self._trackers.metrics(line)


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the complete rows of a log, [] if there is no file; a line that is being written is skipped.

    Raises RLHFError E08 for what is not a file, or too large.
    """
    return _rows(_content(path))


def newest_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows in the last 64 kB of a log, for its current state. Raises RLHFError E08 for what is no file."""
    if not path.exists():
        return []
    with open_regular(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        return _rows(file.read())


def _content(path: Path) -> bytes:
    return read_regular(path, MAX_LOG_BYTES) if path.exists() else b""


def _rows(content: bytes) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for line in content.split(b"\n"):  # not splitlines: texts may contain other line separators
        try:
            row = json.loads(line)
            to_json(row, allow_nan=False).encode()  # raises for values that this package never logs
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def _truncate(path: Path, position: LogPosition) -> bytes:
    """Truncate a log to the position and return its content.

    If the content was changed, warn and keep the steps up to the position. Raises RLHFError S03 for a link out of the
    folder.
    """
    require_inside(path)
    content = _content(path)[: position["bytes"]]
    if hashlib.sha256(content).hexdigest() == position["sha256"]:
        if path.exists():
            os.truncate(path, position["bytes"])
        return content
    text = f"{shown(path)} was changed or cut after step {position['step']} was saved"
    terminal.warn("M05", f"{text}: lines of earlier steps may be missing or wrong")
    rows = [row for row in read_log(path) if row["step"] <= position["step"]]
    scratch = path.with_name(f".tmp-{path.name}")
    write_jsonl(scratch, rows)
    scratch.replace(path)
    return path.read_bytes()
