"""Logs that outlive the process: metrics.jsonl and samples.jsonl, one JSON object a line."""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_cli.errors import RLHFError
from rlhf_cli.rows import append_jsonl, write_jsonl


class MetricsLog:
    """metrics.jsonl: `step`, the metrics, and `time_s`, seconds since the start of the run (interruptions not counted).

    Lines after `resume_at`, and a last line that was cut off, are taken away: those steps are going to be made again.
    """

    def __init__(self, path: Path, *, resume_at: int = 0) -> None:
        self.path = path
        kept = _keep(path, resume_at)
        self._last = {name: value for name, value in kept[-1].items() if name not in ("step", "time_s")} if kept else {}
        self._began = time.monotonic() - (kept[-1].get("time_s", 0.0) if kept else 0.0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a line. Raises RLHFError R01 for a metric that is not finite."""
        bad = [name for name, value in metrics.items() if not math.isfinite(value)]
        if bad:
            raise RLHFError("R01", f"step {step}: {bad[0]} is {metrics[bad[0]]}")
        self._last = dict(metrics)
        append_jsonl(self.path, {"step": step, **metrics, "time_s": round(time.monotonic() - self._began, 3)})

    def last(self) -> dict[str, float]:
        """The metrics of the newest line; {} before the first."""
        return dict(self._last)


class SamplesLog:
    """samples.jsonl: rows with a `step`; those after `resume_at` are taken away."""

    def __init__(self, path: Path, *, resume_at: int = 0) -> None:
        self.path = path
        _keep(path, resume_at)

    def log(self, row: Mapping[str, Any]) -> None:
        """Add a row."""
        append_jsonl(self.path, row)


def read_log(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a log, none where there is no file. A process may be in the middle of the last one."""
    rows: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").split("\n") if path.exists() else []:  # texts hold other separators
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def _keep(path: Path, step: int) -> list[dict[str, Any]]:
    """Leave only the lines up to `step` in the file, and return them."""
    rows = [row for row in read_log(path) if row["step"] <= step]
    if path.exists():
        scratch = path.with_name(f".tmp-{path.name}")
        write_jsonl(scratch, rows)
        scratch.replace(path)
    return rows
