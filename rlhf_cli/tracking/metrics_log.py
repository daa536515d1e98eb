"""Logs that outlive the process: metrics.jsonl and samples.jsonl, one JSON object a line."""

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
from rlhf_cli.files import sync
from rlhf_cli.jsonl import append_jsonl, to_json, write_jsonl
from rlhf_cli.tracking import Trackers

NEWEST = 65_536  # bytes: some 45 updates of PPO


class LogPosition(TypedDict):
    """How far a log had come when a state was saved."""

    step: int
    bytes: int
    sha256: str


class Log:
    """A file of rows that have a `step`. With the mark of the state that a run goes on from, all after it is cut off.

    Those steps are going to be made again: no line stands twice, and none is lost. A new run starts an empty file.
    """

    def __init__(self, path: Path, mark: LogPosition | None = None) -> None:
        self.path = path
        kept = b""
        if not distributed.is_main_process():
            pass
        elif mark is None:
            path.unlink(missing_ok=True)
        else:
            kept = _cut(path, mark)
        self._bytes, self._sha256 = len(kept), hashlib.sha256(kept)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row: from now on it is there whatever becomes of this process. Of several the first one writes."""
        if not distributed.is_main_process():
            return
        line = append_jsonl(self.path, row)
        self._bytes += len(line)
        self._sha256.update(line)

    def position(self, step: int) -> LogPosition:
        """For a state saved after `step`, when what is there so far has been forced to the disk."""
        if self._bytes:
            sync(self.path)
            sync(self.path.parent)
        return {"step": step, "bytes": self._bytes, "sha256": self._sha256.hexdigest()}


class MetricsLog(Log):
    """metrics.jsonl: `step`, the metrics, and `time_s`, seconds since the run began, interruptions left out.

    Each line is told to the trackers, too.
    """

    def __init__(self, path: Path, mark: LogPosition | None = None, trackers: Trackers | None = None) -> None:
        before = read_log(path)
        super().__init__(path, mark)
        kept = read_log(path)
        self._trackers = trackers
        if trackers is not None:
            trackers.resume(before, kept)
        self._began = time.monotonic() - (_number(kept[-1].get("time_s")) if kept else 0.0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the line of a step. Raises RLHFError R01 for a metric that is not finite."""
        bad = [name for name, value in metrics.items() if not math.isfinite(value)]
        if bad:
            raise RLHFError("R01", f"step {step}: {bad[0]} is {metrics[bad[0]]}")
        line = {"step": step, **metrics, "time_s": round(time.monotonic() - self._began, 3)}
        self.append(line)
        if self._trackers is not None:
            self._trackers.metrics(line)


def read_log(path: Path) -> list[dict[str, Any]]:
    """The whole rows of a log, none where there is no file. A process may be in the middle of the last one."""
    return _rows(path.read_bytes()) if path.exists() else []


def newest_rows(path: Path) -> list[dict[str, Any]]:
    """Those of `read_log` in the last 64 kB: where the log stands now, however long it is."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - NEWEST))
        return _rows(file.read())


def _rows(content: bytes) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for line in content.split(b"\n"):  # texts hold other separators
        try:
            row = json.loads(line)
            to_json(row, allow_nan=False).encode()  # what no log of ours can hold
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _cut(path: Path, mark: LogPosition) -> bytes:
    """Leave what was there at the mark, and return it. Where it is not what was written, say so, and leave the steps
    up to it.
    """
    content = path.read_bytes()[: mark["bytes"]] if path.exists() else b""
    if hashlib.sha256(content).hexdigest() == mark["sha256"]:
        if path.exists():
            os.truncate(path, mark["bytes"])
        return content
    saved = f"{shown(path)} was changed or cut after step {mark['step']} was saved"
    text = f"{saved}: lines of earlier steps may be missing or wrong"
    terminal.warn("M05", text)
    rows = [row for row in read_log(path) if row["step"] <= mark["step"]]
    scratch = path.with_name(f".tmp-{path.name}")
    write_jsonl(scratch, rows)
    scratch.replace(path)
    return path.read_bytes()
