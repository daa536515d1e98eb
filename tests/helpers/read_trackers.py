"""Read the contents of TensorBoard (EventAccumulator), wandb (its transaction log) and trackio (its database)."""

import json
import os
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32768, 7  # of a leveldb log, which a .wandb file is, with seven bytes of its own before it


def events(stage: Path) -> Any:
    """TensorBoard's own reader, with every event; what a later start marks as void is gone."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    everything = dict.fromkeys(("scalars", "tensors", "histograms"), 0)
    return EventAccumulator(str(stage / "tensorboard"), size_guidance=everything).Reload()


def tensorboard_steps(stage: Path) -> dict[int, list[dict[str, float]]]:
    """Return the rows of each step: as many as a name has values."""
    read, found = events(stage), {}
    for name in read.Tags()["scalars"]:
        for event in read.Scalars(name):
            rows = found.setdefault(event.step, [])
            row = next((row for row in rows if name not in row), None)
            if row is None:
                row = {}
                rows.append(row)
            row[name] = event.value
    return found


def wandb_records(stage: Path) -> Iterator[Any]:
    """Every record of all starts, in their order."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted((stage / "wandb").glob("*run-*/*.wandb")):
        content, at, whole = path.read_bytes(), HEADER, b""
        while at + HEADER <= len(content):
            if (left := BLOCK - at % BLOCK) < HEADER:
                at += left
                continue
            _, length, kind = struct.unpack_from("<IHB", content, at)
            whole += content[at + HEADER : at + HEADER + length]
            at += HEADER + length
            if kind in (1, 4):  # whole, or the last part
                record = Record()
                record.ParseFromString(whole)
                yield record
                whole = b""


def wandb_history(stage: Path) -> list[dict[str, Any]]:
    """The rows of the history; nested keys joined by `/`, without wandb's own but _step."""
    found = []
    for record in wandb_records(stage):
        if record.WhichOneof("record_type") == "history":
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            found.append({key: value for key, value in row.items() if key == "_step" or key[0] != "_"})
    return found


def wandb_runs(stage: Path) -> list[Any]:
    """The run's record of each start."""
    return [each.run for each in wandb_records(stage) if each.WhichOneof("record_type") == "run"]


def wandb_table(stage: Path, row: dict[str, Any], name: str) -> dict[str, Any]:
    """{columns, data} of a table that a row of the history names."""
    path = row[f"{name}/path"]
    (file,) = (stage / "wandb").glob(f"*run-*/files/{path}")
    return dict(json.loads(file.read_text()))


def trackio_database(project: str) -> sqlite3.Connection:
    return sqlite3.connect(Path(os.environ["TRACKIO_DIR"]) / f"{project}.db")


def trackio_rows(project: str, run: str) -> list[tuple[int, dict[str, Any]]]:
    """(step, values) of each call, in their order."""
    asked = trackio_database(project).execute("SELECT step, metrics FROM metrics WHERE run_name = ? ORDER BY id", [run])
    return [(step, json.loads(values)) for step, values in asked]
