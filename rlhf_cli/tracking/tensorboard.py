"""TensorBoard: event files in RUN/<stage>/tensorboard."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_cli.errors import shown
from rlhf_cli.tracking.tracker_run import NO_STEP, Row, TrackerRun


class TensorBoard:
    """TensorBoard event files. On resume, events after the checkpoint are purged, because the steps are repeated."""

    def __init__(self, run: TrackerRun) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        folder = run.folder / "tensorboard"
        resumed = folder.is_dir()
        self.writer = SummaryWriter(str(folder), purge_step=run.saved_step + 1 if resumed else None)
        self.last = run.saved_step if resumed else NO_STEP
        self.place = f"{shown(folder)} (tensorboard --logdir {shown(run.folder.parent)})"
        if run.saved_step == NO_STEP or not resumed:
            assert self.writer.file_writer
            for summary in hparams(flatten(run.config), {}):
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

    def histograms(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
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


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str | float]:
    """Return the config flattened to keys as for `--set`; values other than text and numbers are JSON."""
    flattened: dict[str, str | float] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flattened |= flatten(value, f"{prefix}{key}.")
        else:
            flattened[prefix + key] = value if isinstance(value, str | int | float) else json.dumps(value)
    return flattened
