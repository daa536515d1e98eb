"""labels.jsonl of one folder: each label is on disk before the next pair is shown."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_cli import terminal
from rlhf_cli.data.labels import LABELS, Label, read_labels
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.files import append_rows, repair_end, sync

DISK_HINT = "free space on its disk; the pair is still to be labelled, and all other labels are kept"


class LabelStore:
    """The labels of a folder that this process has locked, in the order of the file.

    Lines are only ever appended, so that a process killed at any moment leaves every label that was acknowledged. A
    label is of a pair and an annotator, and a second one is refused: what a client sends twice is stored once.
    """

    def __init__(self, folder: Path) -> None:
        """Read the file, or create it. Raises RLHFError D03, D04, D12, D20, S03."""
        self.path = folder / LABELS
        if not self.path.exists():
            self.path.touch()
            sync(folder)
        removed = repair_end(self.path)
        if removed:
            text = f"an unfinished last line of {removed} bytes is removed: it was never acknowledged"
            terminal.say(f"label    {shown(self.path)}: {text}")
        self._labels = {key: label for key, (_, label) in read_labels(self.path).items()}
        self._size = self.path.stat().st_size

    @property
    def labels(self) -> list[Label]:
        return list(self._labels.values())

    def get(self, pair: str, annotator: str) -> Label | None:
        return self._labels.get((pair, annotator))

    def add(self, label: Label) -> None:
        """Append a label. Raises RLHFError E03 if it cannot be written, D20 if the file has been edited meanwhile.

        Then the file is as before.
        """
        key = label.pair, label.annotator
        assert key not in self._labels
        self._append(label.row())
        self._labels[key] = label

    def last(self, annotator: str) -> Label | None:
        """Return the annotator's latest label."""
        mine = [label for label in self._labels.values() if label.annotator == annotator]
        return mine[-1] if mine else None

    def undo(self, label: Label, time: float) -> None:
        """Take a label back, by a further line. Raises RLHFError as `add`."""
        self._append({"undo": label.pair, "annotator": label.annotator, "time": time})
        del self._labels[label.pair, label.annotator]

    def _append(self, row: Mapping[str, Any]) -> None:
        try:
            self._require_unchanged()
            append_rows(self.path, [row])
            self._size = self.path.stat().st_size
        except OSError as error:
            text = f"the label cannot be written to {shown(self.path)}: {error.strerror or error}"
            raise RLHFError("E03", text, hint=DISK_HINT) from error

    def _require_unchanged(self) -> None:
        """Raise RLHFError D20 if another program has written the file: a line could be joined to its last one."""
        if self.path.stat().st_size != self._size:
            text = f"{shown(self.path)} was edited while it is labelled, and the label is not saved"
            raise RLHFError("D20", text, hint="run the command again, which reads the file")
