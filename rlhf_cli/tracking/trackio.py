"""trackio: its database is in TRACKIO_DIR, by default in the hub's cache, and holds all runs of a project."""

import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from itertools import chain, count
from pathlib import Path
from typing import Any

from rlhf_cli.tracking.tracker_run import NO_STEP, PROJECT, Row, TrackerRun


class Trackio:
    """A trackio run. Its name is stored in trackio/rlhf-run-name, so that a resumed run is found again.

    A second run of the same name in a project becomes NAME-2. trackio reports errors as warnings, often from its own
    thread; the next call raises them.
    """

    def __init__(self, run: TrackerRun) -> None:
        import trackio

        self.trackio, self._problem = trackio, ""
        self._show = warnings.showwarning
        warnings.showwarning = self._record_warning
        name_file = run.folder / "trackio" / "rlhf-run-name"
        resumed, project = name_file.is_file(), run.project or PROJECT
        try:
            name_file.parent.mkdir(parents=True, exist_ok=True)
            name = name_file.read_text(encoding="utf-8").strip() if resumed else self._unused_name(project, run.name)
            with self._silenced():
                resume = "allow" if resumed else "never"
                self.run = trackio.init(project, name, group=run.group, config=run.config, resume=resume, embed=False)
        except Exception:
            self._finish()
            raise
        name_file.write_text(f"{name}\n", encoding="utf-8")
        self.last = getattr(self.run, "_next_step", run.logged_step + 1) - 1 if resumed else NO_STEP
        self.place = f"run {name} of project {project} (trackio show --project {project})"

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers, which are written within half a second."""
        self._log(step, dict(values))

    def table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """Log a trackio.Table."""
        self._log(step, {name: self.trackio.Table(data=[dict(row) for row in rows])})

    def histograms(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """Log a trackio.Histogram of 64 bins per name."""
        self._log(step, {name: self.trackio.Histogram(samples) for name, samples in values.items()})

    def close(self, exit_code: int) -> None:
        """Finish the run; trackio records no exit code."""
        with self._silenced():
            self._finish()

    def _finish(self) -> None:
        """Finish the run now: an unfinished one would print on stdout when the process ends."""
        with redirect_stdout(io.StringIO()), suppress(RuntimeError):  # no run is open
            self.trackio.finish()
        if warnings.showwarning == self._record_warning:
            warnings.showwarning = self._show

    def _log(self, step: int, values: dict[str, Any]) -> None:
        with self._silenced():
            self.run.log(values, step=step)

    def _unused_name(self, project: str, name: str) -> str:
        """Return the name, or NAME-2, NAME-3, ..., whichever is unused in the project on this machine."""
        try:
            taken = {run.name for run in self.trackio.Api().runs(project)}
        except ValueError:  # no such project yet
            taken = set()
        return next(free for free in chain([name], (f"{name}-{n}" for n in count(2))) if free not in taken)

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
