"""Weights & Biases: its service writes RUN/<stage>/wandb and uploads it unless WANDB_MODE is offline."""

import os
from collections.abc import Mapping, Sequence

from rlhf_cli.errors import shown
from rlhf_cli.tracking.tracker_run import NO_STEP, PROJECT, Row, TrackerRun

UPLOAD_TIMEOUT_S = 60.0  # at the end of a stage; WANDB_FINISH_TIMEOUT overrides it
FLUSH = "x_transaction_log_flush_interval"  # default 15 seconds, which a killed offline run would lose


class WandB:
    """A wandb run. Its id is stored in wandb/rlhf-run-id, so that a resumed run is the same run."""

    def __init__(self, run: TrackerRun) -> None:
        import wandb

        self.wandb = wandb
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
        id_file = run.folder / "wandb" / "rlhf-run-id"
        resumed = id_file.is_file()
        id_file.parent.mkdir(parents=True, exist_ok=True)
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
        id_file.write_text(f"{self.run.id}\n", encoding="utf-8")
        if self.run.offline:
            # a killed process did not write its last step
            self.last = (
                NO_STEP if not resumed else run.saved_step if run.logged_step <= run.saved_step else run.logged_step - 1
            )
            self.place = (
                f"{shown(id_file.parent)} (offline; to send it: wandb sync {shown(id_file.parent)}/offline-run-*)"
            )
        else:
            self.last = self.run.starting_step - 1  # from the server
            self.place = self.run.url or shown(id_file.parent)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers; all logs of a step form one row of the history."""
        self.run.log(dict(values), step=step)

    def table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """Log a wandb.Table."""
        columns = list(rows[0])
        self.run.log({name: self.wandb.Table(columns, [[row[column] for column in columns] for row in rows])}, step)

    def histograms(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """Log a wandb.Histogram of 64 bins per name."""
        self.run.log({name: self.wandb.Histogram(list(samples)) for name, samples in values.items()}, step=step)

    def close(self, exit_code: int) -> None:
        """Finish the run. Raises TimeoutError if the upload does not end in time; the data stays in the folder."""
        self.run.finish(exit_code=exit_code)
