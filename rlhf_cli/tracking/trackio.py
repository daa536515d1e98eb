"""trackio: its database lies in TRACKIO_DIR, by default in the cache of the hub, with all runs of a project in one."""

import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from itertools import chain, count
from pathlib import Path
from typing import Any

from rlhf_cli.tracking.tracker_run import NO_STEP, PROJECT, Row, TrackerRun


class Trackio:
    """A run goes on under the name that it began with, which is kept in trackio/rlhf-run-name: trackio finds it so.

    A second run of the same name in a project is called NAME-2. What trackio cannot do it only ever warns of, often
    from a thread of its own: the warning is raised by the next call.
    """

    def __init__(self, run: TrackerRun) -> None:
        import trackio

        self.trackio, self._problem = trackio, ""
        self._show = warnings.showwarning
        warnings.showwarning = self._note
        known = run.folder / "trackio" / "rlhf-run-name"
        begun, project = known.is_file(), run.project or PROJECT
        try:
            known.parent.mkdir(parents=True, exist_ok=True)
            name = known.read_text(encoding="utf-8").strip() if begun else self._free(project, run.name)
            with self._quietly():
                resume = "allow" if begun else "never"
                self.run = trackio.init(project, name, group=run.group, config=run.config, resume=resume, embed=False)
        except Exception:
            self._finish()
            raise
        known.write_text(f"{name}\n", encoding="utf-8")
        self.last = getattr(self.run, "_next_step", run.told + 1) - 1 if begun else NO_STEP
        self.place = f"run {name} of project {project} (trackio show --project {project})"

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Written within half a second."""
        self._log(step, dict(values))

    def table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """A trackio.Table."""
        self._log(step, {name: self.trackio.Table(data=[dict(row) for row in rows])})

    def histograms(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """A trackio.Histogram each, of 64 bins."""
        self._log(step, {name: self.trackio.Histogram(samples) for name, samples in values.items()})

    def close(self, exit_code: int) -> None:
        """A trackio run does not say how it ended."""
        with self._quietly():
            self._finish()

    def _finish(self) -> None:
        """What is not finished would say so at the end of the process, on stdout."""
        with redirect_stdout(io.StringIO()), suppress(RuntimeError):  # there is none, or no more
            self.trackio.finish()
        if warnings.showwarning == self._note:
            warnings.showwarning = self._show

    def _log(self, step: int, values: dict[str, Any]) -> None:
        with self._quietly():
            self.run.log(values, step=step)

    def _free(self, project: str, name: str) -> str:
        """The name, or with a number behind it the first that no run of this machine has in the project."""
        try:
            taken = {run.name for run in self.trackio.Api().runs(project)}
        except ValueError:  # there is no such project yet
            taken = set()
        return next(each for each in chain([name], (f"{name}-{n}" for n in count(2))) if each not in taken)

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        """Within, what trackio prints is lost. Raises RuntimeError for what it has warned of by then."""
        with redirect_stdout(io.StringIO()):
            yield
        if self._problem:
            raise RuntimeError(self._problem)

    def _note(self, message: Any, category: Any, filename: str, *more: Any, **named: Any) -> None:
        if "trackio" in Path(filename).parts:
            self._problem = self._problem or str(message)
        else:
            self._show(message, category, filename, *more, **named)
