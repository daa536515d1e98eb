"""The logs of a run, metrics.jsonl and samples.jsonl: rows of a step, truncated to the checkpoint on resume."""

import hashlib
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from rlhf_cli import distributed, terminal
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.files import MAX_LOG_BYTES, open_regular, read_regular, require_inside, sync
from rlhf_cli.jsonl import append_jsonl, is_number, to_json, write_jsonl
from rlhf_cli.tracking.trackers import Trackers

TAIL_BYTES = 65_536  # about 45 updates of PPO


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
        content = b""
        if distributed.is_main_process():
            if position:
                content = _truncate(path, position)
            else:
                path.unlink(missing_ok=True)
        self._bytes = len(content)
        self._sha256 = hashlib.sha256(content)

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
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise RLHFError("R01", f"step {step}: {name} is {value}")
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
