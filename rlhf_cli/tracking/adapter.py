"""Trackers of accelerate behind the interface of the backends: MLflow, SwanLab and Comet.

They get the numbers and the config; no tables and histograms, for which each library has other means.
"""

import io
import logging
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

from rlhf_cli.errors import shell_path
from rlhf_cli.files import write_text
from rlhf_cli.tracking.backends import NO_STEP, PROJECT, Row, Samples, TrackerRun, hyperparameters

ID_FILE = "rlhf-run-id"


@dataclass(frozen=True)
class Library:
    """What accelerate does not know of a library: how a run is named, found again, and viewed."""

    options: Callable[[TrackerRun, str | None], dict[str, Any]]  # of the adapter, with the id of a run that is resumed
    run_id: Callable[[Any], str]  # of the library's run
    place: Callable[[TrackerRun, Any], str]


class AccelerateTracker:
    """A run of a library that accelerate knows. A resumed stage continues the same run.

    `library` is a key of LIBRARIES. The libraries print nothing and ask for nothing: a missing key is an error.
    """

    def __init__(self, library: str, run: TrackerRun) -> None:
        from accelerate import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        PartialState()  # accelerate's log needs it
        known = LIBRARIES[library]
        id_file = run.name_file(library, ID_FILE)
        resumed_id = id_file.read_text(encoding="utf-8").strip() if id_file.is_file() else None
        with _silenced():
            self.tracker: Any = LOGGER_TYPE_TO_CLASS[library](**known.options(run, resumed_id))
            self.tracker.main_process_only = False  # only the main process has trackers
            self.tracker.start()
            if resumed_id is None:
                self.tracker.store_init_configuration(hyperparameters(run.config))
        write_text(id_file, f"{known.run_id(self.tracker.tracker)}\n")
        self.last = NO_STEP if resumed_id is None else run.logged_step
        self.place = known.place(run, self.tracker.tracker)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers."""
        with _silenced():
            self.tracker.log(dict(values), step=step)

    def table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """Drop the table."""

    def histograms(self, step: int, values: Samples) -> None:
        """Drop the samples."""

    def close(self, exit_code: int) -> None:
        """Finish the run, which has no exit code here."""
        with _silenced():
            self.tracker.finish()


@contextmanager
def _silenced() -> Iterator[None]:
    """Suppress what a library prints. Raises RuntimeError if it asks for something."""
    stdin = sys.stdin
    sys.stdin = io.StringIO()
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    except EOFError as error:
        raise RuntimeError(
            "it asks for input, such as a key: log in with its own command, or set it offline"
        ) from error
    finally:
        sys.stdin = stdin
        logging.disable(level)


def _mlflow(run: TrackerRun, run_id: str | None) -> dict[str, Any]:
    import mlflow

    if "MLFLOW_TRACKING_URI" not in os.environ:
        mlflow.set_tracking_uri(f"sqlite:///{run.name_file('mlflow', 'mlflow.db').resolve()}")
    return {
        "experiment_name": run.project or PROJECT,
        "run_name": run.name,
        "run_id": run_id,
        "tags": {"group": run.group, "stage": run.stage},
    }


def _mlflow_place(run: TrackerRun, _: Any) -> str:
    import mlflow

    return f"run {run.name} (mlflow ui --backend-store-uri {shlex.quote(mlflow.get_tracking_uri())})"


def _swanlab(run: TrackerRun, run_id: str | None) -> dict[str, Any]:
    return {
        "run_name": run.project or PROJECT,  # accelerate's name for the project
        "experiment_name": run.name,
        "group": run.group,
        "job_type": run.stage,
        "logdir": str(run.folder / "swanlab"),
        "id": run_id,
        "resume": "allow",
    }


def _comet(run: TrackerRun, run_id: str | None) -> dict[str, Any]:
    import comet_ml

    # Neither code nor output, as with the other trackers.
    what = comet_ml.ExperimentConfig(
        name=run.name,
        tags=[run.group, run.stage],
        offline_directory=str(run.folder / "comet_ml"),
        log_code=False,
        log_git_metadata=False,
        log_git_patch=False,
        auto_output_logging=False,
        parse_args=False,
    )
    return {
        "run_name": run.project or PROJECT,  # accelerate's name for the project
        "experiment_key": run_id,
        "mode": "get_or_create",
        "experiment_config": what,
    }


LIBRARIES: dict[str, Library] = {
    "mlflow": Library(
        options=_mlflow,
        run_id=lambda active: active.info.run_id,
        place=_mlflow_place,
    ),
    "swanlab": Library(
        options=_swanlab,
        run_id=lambda active: active.id,
        place=lambda run, active: f"run {active.id} in {shell_path(run.folder)}/swanlab, or the server",
    ),
    "comet_ml": Library(
        options=_comet,
        run_id=lambda active: active.get_key(),
        place=lambda run, active: f"experiment {active.get_key()}",
    ),
}
