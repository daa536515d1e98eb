"""A stage at work: the process that writes it, its steps, and the time that is left. For `rlhf status`."""

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_cli import system
from rlhf_cli.config.loading import load
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.stages import TRLConfig, settings_of
from rlhf_cli.errors import RLHFError, translate_read_errors
from rlhf_cli.jsonl import is_number
from rlhf_cli.runs.checkpoints import newest_step
from rlhf_cli.runs.identity import StageStatus
from rlhf_cli.runs.layout import MANIFEST
from rlhf_cli.runs.locks import lock_owner
from rlhf_cli.runs.read import Progress, Row, Stage, changed_parents, read_stage, unreadable
from rlhf_cli.runs.stage_folder import recorded_num_processes
from rlhf_cli.tracking.logs import newest_rows

DATED_FILES = (MANIFEST, "metrics.jsonl", "identity.json")


def read_stage_at_work(name: str, folder: Path, status: StageStatus | None = None) -> Stage:
    """Read a stage's folder with its process and progress.

    Without a `status`, only changes of the parents are noticed, not those of its config and data.
    """
    try:
        with translate_read_errors(folder):
            has_config = os.path.isfile(folder / "config.yaml")
            stage = replace(read_stage(name, folder), process=lock_owner(folder), status=status, has_config=has_config)
            if stage.state == "unreadable":
                return stage
            if status is None and stage.condition == "finished":
                stage = replace(stage, outdated=changed_parents(stage))
            return replace(stage, progress=_read_progress(stage))
    except RLHFError as error:
        return unreadable(name, folder, error)
    except OSError:  # moved to .old/ at this moment
        return Stage(name, folder)


def _read_progress(stage: Stage) -> Progress:
    folder = stage.folder
    rows = newest_rows(folder / "metrics.jsonl")
    has_steps = stage.condition != "new" and stage.name != "eval"
    step, steps = _steps(stage, rows) if has_steps else (None, None)
    times = {name: (folder / name).stat().st_mtime for name in DATED_FILES if (folder / name).is_file()}
    return Progress(
        step=step,
        steps=steps,
        time_s=max((finite(row.get("time_s")) for row in rows), default=None),
        left_s=_remaining_s(rows, step, steps) if stage.condition == "running" else None,
        changed=times.get(MANIFEST, max(times.values(), default=None)),
        bytes=system.folder_bytes(folder),
        rows=tuple(rows),
    )


def _steps(stage: Stage, rows: Sequence[Row]) -> tuple[int | None, int | None]:
    """Return the steps completed and the total."""
    logged = max((row["step"] for row in rows), default=None)
    is_running = stage.condition == "running"
    is_finished = stage.state == "finished"
    if is_finished and not is_running and stage.manifest.stopped is None:
        return logged, logged

    completed = logged if is_running or is_finished else newest_step(stage.folder / "state")
    return completed, _total_steps(stage, rows)


def _total_steps(stage: Stage, rows: Sequence[Row]) -> int | None:
    """Return the total steps of a started stage by its saved config; None if they cannot be computed."""
    try:
        config = load(stage.name, stage.folder / "config.yaml")
        if isinstance(config, PPOConfig):
            return config.ppo.across(recorded_num_processes(stage.folder)).num_updates()
    except (RLHFError, ValueError):  # damaged, invalid for its number of processes, or counted in prompts
        return None

    assert isinstance(config, TRLConfig)
    settings = settings_of(config)
    epoch = finite(rows[-1].get("epoch")) if rows else 0.0
    if settings.max_steps is not None or epoch <= 0:
        return settings.max_steps
    step: int = rows[-1]["step"]
    steps_per_epoch = math.ceil(step / epoch - 1e-6)  # a whole number
    return math.ceil(settings.num_train_epochs * steps_per_epoch)


def _remaining_s(rows: Sequence[Row], step: int | None, steps: int | None) -> float | None:
    """Return the seconds to the end, at the speed of the newest lines of the log."""
    if step is None or steps is None:
        return None
    first: Row = rows[0] if len(rows) > 1 else {"step": 0}
    last = rows[-1]
    done = last["step"] - first["step"]
    seconds = finite(last.get("time_s")) - finite(first.get("time_s"))
    if done <= 0 or seconds <= 0:
        return None
    return float(max(0, steps - step) * seconds / done)


def finite(value: Any) -> float:
    """Return a value of a log as a float; 0 if it is not a finite number."""
    return float(value) if is_number(value) and math.isfinite(value) else 0.0
