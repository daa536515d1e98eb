"""TensorBoard: event files in RUN/<stage>/tensorboard."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_cli.errors import shown
from rlhf_cli.tracking.tracker_run import NO_STEP, Row, TrackerRun


class TensorBoard:
    """What the earlier start told after the state that a run goes on from is marked as void: it comes again."""

    def __init__(self, run: TrackerRun) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        folder = run.folder / "tensorboard"
        begun = folder.is_dir()
        self.writer = SummaryWriter(str(folder), purge_step=run.saved + 1 if begun else None)
        self.last = run.saved if begun else NO_STEP
        self.place = f"{shown(folder)} (tensorboard --logdir {shown(run.folder.parent)})"
        if run.saved == NO_STEP or not begun:
            assert self.writer.file_writer
            for summary in hparams(flat(run.config), {}):
                self.writer.file_writer.add_summary(summary)
            self._text("config", json.dumps(run.config, indent=2, ensure_ascii=False), 0)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """A scalar each, in float32."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()  # as metrics.jsonl: it is there whatever becomes of this process

    def table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """A text: TensorBoard has no tables."""
        told = ("\n".join(f"{column}: {value}" for column, value in row.items()) for row in rows)
        self._text(name, "\n\n".join(told), step)

    def histograms(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """In TensorBoard's own bins."""
        import numpy as np

        for name, samples in values.items():
            self.writer.add_histogram(name, np.asarray(samples), step)
        self.writer.flush()

    def close(self, exit_code: int) -> None:
        """An event file does not say how a run ended."""
        self.writer.close()

    def _text(self, name: str, text: str, step: int) -> None:
        """As code, so that nothing in a model's text is taken for Markdown."""
        self.writer.add_text(name, "\n".join(f"    {line}" for line in text.splitlines()), step)
        self.writer.flush()


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str | float]:
    """Keys as `--set` has them, and their values; what is no number is written as JSON."""
    found: dict[str, str | float] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value if isinstance(value, str | int | float) else json.dumps(value)
    return found
