"""Weights & Biases: its service writes RUN/<stage>/wandb, and sends it on unless WANDB_MODE says offline."""

import os
from collections.abc import Mapping, Sequence

from rlhf_cli.errors import shown
from rlhf_cli.tracking.tracker_run import NO_STEP, PROJECT, Row, TrackerRun

TO_SEND = 60.0  # seconds that a stage waits at its end for a server; WANDB_FINISH_TIMEOUT says otherwise
FLUSH = "x_transaction_log_flush_interval"  # seconds; of its 15, all would be lost of an offline run that is killed


class WandB:
    """A run goes on under the id that it began with, which is kept in wandb/rlhf-run-id."""

    def __init__(self, run: TrackerRun) -> None:
        import wandb

        self.wandb = wandb
        settings = {
            "console": "off",
            "symlink": False,  # a run's folder can be moved
            "save_code": False,
            "finish_timeout": float(os.environ.get("WANDB_FINISH_TIMEOUT", TO_SEND)),
            "finish_timeout_raises": True,
            **({FLUSH: 1.0} if FLUSH in wandb.Settings.model_fields else {}),
        }
        library = wandb.setup(settings=wandb.Settings(silent=True))  # the terminal is ours
        if library.settings.mode == "online" and not wandb.login(prompt=False, verify=False):
            raise RuntimeError("there is no API key: set WANDB_API_KEY, call `wandb login`, or set WANDB_MODE=offline")
        known = run.folder / "wandb" / "rlhf-run-id"
        begun = known.is_file()
        known.parent.mkdir(parents=True, exist_ok=True)
        self.run = wandb.init(
            dir=str(run.folder),
            id=known.read_text(encoding="utf-8").strip() if begun else None,
            resume="allow",
            project=run.project or os.environ.get("WANDB_PROJECT") or PROJECT,
            name=run.name,
            group=run.group,
            job_type=run.stage,
            config=run.config,
            settings=wandb.Settings(**settings),
        )
        known.write_text(f"{self.run.id}\n", encoding="utf-8")
        if self.run.offline:
            # The step that a killed process was in is not written.
            self.last = NO_STEP if not begun else run.saved if run.told <= run.saved else run.told - 1
            self.place = f"{shown(known.parent)} (offline; to send it: wandb sync {shown(known.parent)}/offline-run-*)"
        else:
            self.last = self.run.starting_step - 1  # the server knows
            self.place = self.run.url or shown(known.parent)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """All that is told of a step makes one row of the history."""
        self.run.log(dict(values), step=step)

    def table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """A wandb.Table."""
        columns = list(rows[0])
        self.run.log({name: self.wandb.Table(columns, [[row[column] for column in columns] for row in rows])}, step)

    def histograms(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """A wandb.Histogram each, of 64 bins."""
        self.run.log({name: self.wandb.Histogram(list(samples)) for name, samples in values.items()}, step=step)

    def close(self, exit_code: int) -> None:
        """Raises TimeoutError where the server does not take what is left; it stays in the folder."""
        self.run.finish(exit_code=exit_code)
