"""TensorBoard, Weights & Biases and trackio behind one interface. Each library is imported when its run is opened."""

import io
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from rlhf_cli.errors import shell_path, shown
from rlhf_cli.files import write_text
from rlhf_cli.trees import flatten

NO_STEP = -1
PROJECT = "rlhf"
UPLOAD_TIMEOUT_S = 60.0  # of wandb at the end of a stage; WANDB_FINISH_TIMEOUT overrides it
FLUSH = "x_transaction_log_flush_interval"  # of wandb; default 15 seconds, which a killed offline run would lose
Row = Mapping[str, str | float]  # of a table; booleans are 1 or 0
Samples = Mapping[str, Sequence[float]]  # of distributions, by name


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

    def name_file(self, tracker: str, name: str) -> Path:
        """Return the file with the tracker's name or id of this run; it exists if the run is resumed."""
        path = self.folder / tracker / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def hyperparameters(config: Mapping[str, Any]) -> dict[str, str | int | float]:
    """Return the values of a config by keys as for --set; a list or null is JSON."""
    return {
        key: value if isinstance(value, str | int | float) else json.dumps(value)
        for key, value in flatten(config).items()
    }


# A tracker has the methods metrics, table, histograms and close, and two attributes. `last`: the last step logged by an
# earlier start; repeated steps up to it must not be logged again. `place`: URL, folder or command to view it, for the
# terminal. If a method raises, no further method except close is called.


class TensorBoard:
    """Event files in RUN/<stage>/tensorboard. On resume, events after the checkpoint are purged."""

    def __init__(self, run: TrackerRun) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        folder = run.folder / "tensorboard"
        resumed = folder.is_dir()
        self.writer = SummaryWriter(str(folder), purge_step=run.saved_step + 1 if resumed else None)
        self.last = run.saved_step if resumed else NO_STEP
        self.place = f"{shown(folder)} (tensorboard --logdir {shell_path(run.folder.parent)})"
        if self.last == NO_STEP:
            assert self.writer.file_writer
            for summary in hparams(hyperparameters(run.config), {}):
                self.writer.file_writer.add_summary(summary)
            self._text("config", json.dumps(run.config, indent=2, ensure_ascii=False), 0)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Log scalars, in float32."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()  # survives a crash, like metrics.jsonl

    def table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """Log the rows as text: TensorBoard has no tables."""
        texts = ("\n".join(f"{column}: {value}" for column, value in row.items()) for row in rows)
        self._text(name, "\n\n".join(texts), step)

    def histograms(self, step: int, values: Samples) -> None:
        """Log histograms with TensorBoard's bins."""
        import numpy as np

        for name, samples in values.items():
            self.writer.add_histogram(name, np.asarray(samples), step)
        self.writer.flush()

    def close(self, exit_code: int) -> None:
        """Close the event file, which has no exit code."""
        self.writer.close()

    def _text(self, name: str, text: str, step: int) -> None:
        """Log text as a code block, so that model output is not rendered as Markdown."""
        self.writer.add_text(name, "\n".join(f"    {line}" for line in text.splitlines()), step)
        self.writer.flush()


class WandB:
    """A wandb run. wandb writes RUN/<stage>/wandb and uploads it, unless WANDB_MODE is offline."""

    def __init__(self, run: TrackerRun) -> None:
        import wandb

        self.library: Any = wandb
        settings = {
            "console": "off",
            "symlink": False,  # a run's folder can be moved
            "save_code": False,
            "finish_timeout": float(os.environ.get("WANDB_FINISH_TIMEOUT", UPLOAD_TIMEOUT_S)),
            "finish_timeout_raises": True,
            **({FLUSH: 1.0} if FLUSH in wandb.Settings.model_fields else {}),
        }
        library = wandb.setup(settings=wandb.Settings(silent=True))  # print nothing
        if library.settings.mode == "online" and not wandb.login(prompt=False, verify=False):
            raise RuntimeError("there is no API key: set WANDB_API_KEY, call `wandb login`, or set WANDB_MODE=offline")
        id_file = run.name_file("wandb", "rlhf-run-id")
        resumed = id_file.is_file()
        self.run = wandb.init(
            dir=str(run.folder),
            id=id_file.read_text(encoding="utf-8").strip() if resumed else None,
            resume="allow",
            project=run.project or os.environ.get("WANDB_PROJECT") or PROJECT,
            name=run.name,
            group=run.group,
            job_type=run.stage,
            config=run.config,
            settings=wandb.Settings(**settings),
        )
        write_text(id_file, f"{self.run.id}\n")
        folder = shown(id_file.parent)
        if self.run.offline:
            self.last = NO_STEP
            if resumed:  # a killed process did not write its last step
                self.last = max(run.saved_step, run.logged_step - 1)
            self.place = f"{folder} (offline; to send it: wandb sync {shell_path(id_file.parent)}/offline-run-*)"
        else:
            self.last = self.run.starting_step - 1  # from the server
            self.place = self.run.url or folder

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers; all logs of a step form one row of the history."""
        self._log(step, dict(values))

    def table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """Log a Table of the library."""
        columns = list(dict.fromkeys(chain.from_iterable(rows)))  # a row may lack a score
        cells = [list(map(row.get, columns)) for row in rows]
        self._log(step, {name: self.library.Table(columns, cells)})

    def histograms(self, step: int, values: Samples) -> None:
        """Log a Histogram of the library, of 64 bins, per name."""
        self._log(step, {name: self.library.Histogram(list(samples)) for name, samples in values.items()})

    def _log(self, step: int, values: dict[str, Any]) -> None:
        self.run.log(values, step=step)

    def close(self, exit_code: int) -> None:
        """Finish the run. Raises TimeoutError if the upload does not end in time; the data stays in the folder."""
        self.run.finish(exit_code=exit_code)


class Trackio(WandB):
    """A trackio run, with the methods of wandb. The database, in TRACKIO_DIR or the hub's cache, has all of a project.

    A second run of the same name in a project becomes NAME-2. trackio reports errors as warnings, often from its own
    thread; the next call raises them.
    """

    def __init__(self, run: TrackerRun) -> None:
        import trackio

        self.library = trackio
        self._problem = ""
        self._show = warnings.showwarning
        warnings.showwarning = self._record_warning
        project = run.project or PROJECT
        try:
            name_file = run.name_file("trackio", "rlhf-run-name")
            resumed = name_file.is_file()
            name = name_file.read_text(encoding="utf-8").strip() if resumed else self._unused_name(project, run.name)
            with self._silenced():
                resume = "allow" if resumed else "never"
                self.run = trackio.init(project, name, group=run.group, config=run.config, resume=resume, embed=False)
        except Exception:
            self._finish()
            raise
        write_text(name_file, f"{name}\n")
        self.last = getattr(self.run, "_next_step", run.logged_step + 1) - 1 if resumed else NO_STEP
        self.place = f"run {name} of project {project} (trackio show --project {project})"

    def _log(self, step: int, values: dict[str, Any]) -> None:
        """Log values, which are written within half a second."""
        with self._silenced():
            super()._log(step, values)

    def close(self, exit_code: int) -> None:
        """Finish the run; trackio records no exit code."""
        with self._silenced():
            self._finish()

    def _finish(self) -> None:
        """Finish the run now: an unfinished one would print on stdout when the process ends."""
        with redirect_stdout(io.StringIO()), suppress(RuntimeError):  # no run is open
            self.library.finish()
        if warnings.showwarning == self._record_warning:
            warnings.showwarning = self._show

    def _unused_name(self, project: str, name: str) -> str:
        """Return the name, or NAME-2, NAME-3, ..., whichever is unused in the project on this machine."""
        taken: set[str] = set()
        with suppress(ValueError):  # no such project yet
            taken = {run.name for run in self.library.Api().runs(project)}
        number = 1
        unused = name
        while unused in taken:
            number += 1
            unused = f"{name}-{number}"
        return unused

    @contextmanager
    def _silenced(self) -> Iterator[None]:
        """Suppress trackio's output. Raises RuntimeError for its warnings so far."""
        with redirect_stdout(io.StringIO()):
            yield
        if self._problem:
            raise RuntimeError(self._problem)

    def _record_warning(self, message: Any, category: Any, filename: str, *args: Any, **kwargs: Any) -> None:
        if "trackio" in Path(filename).parts:
            self._problem = self._problem or str(message)
        else:
            self._show(message, category, filename, *args, **kwargs)
