"""labels.jsonl of one folder: each label is on disk before the next pair is shown."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from rlhf_cli import terminal
from rlhf_cli.data.labels import LABELS, Label, read_labels
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.files import require_inside, sync
from rlhf_cli.jsonl import to_json

DISK_HINT = "free space on its disk; the pair is still to be labelled, and all other labels are kept"


class LabelStore:
    """The labels of a folder that this process has locked, in the order of the file.

    Lines are only ever appended, so that a process killed at any moment leaves every label that was acknowledged. A
    label is of a pair and an annotator, and a second one is refused: what a client sends twice is stored once.
    """

    def __init__(self, folder: Path) -> None:
        """Read the file, or create it. Raises RLHFError D03, D04, D20, S03."""
        self.path = folder / LABELS
        if not self.path.exists():
            self.path.touch()
            sync(folder)
        require_inside(self.path)
        _repair_end(self.path)
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
        line = (to_json(row, allow_nan=False) + "\n").encode("utf-8")
        try:
            self._require_unchanged()
            self._write(line)
        except OSError as error:
            text = f"the label cannot be written to {shown(self.path)}: {error.strerror or error}"
            raise RLHFError("E03", text, hint=DISK_HINT) from error
        self._size += len(line)

    def _require_unchanged(self) -> None:
        """Raise RLHFError D20 if another program has written the file: a line could be joined to its last one."""
        if self.path.stat().st_size != self._size:
            text = f"{shown(self.path)} was edited while it is labelled, and the label is not saved"
            raise RLHFError("D20", text, hint="run the command again, which reads the file")

    def _write(self, line: bytes) -> None:
        """Append a line and wait until it is on disk, or leave the file as it was. Raises OSError."""
        try:
            with self.path.open("ab", buffering=0) as file:
                written = file.write(line)
                if written != len(line):
                    raise OSError(f"{written} of {len(line)} bytes were written")
                os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):
                os.truncate(self.path, self._size)
            raise


def _repair_end(path: Path) -> None:
    """End the last line of the file, or remove it if a killed process left a part of one.

    An editor may have removed the line break behind a whole label. A part of one was never acknowledged.
    """
    content = path.read_bytes()
    start = content.rfind(b"\n") + 1
    last = content[start:]
    if not last:
        return
    try:
        orjson.loads(last)
    except orjson.JSONDecodeError:
        os.truncate(path, start)
        text = f"an unfinished last line of {len(last)} bytes is removed: it was never acknowledged"
        terminal.say(f"label    {shown(path)}: {text}")
    else:
        with path.open("ab") as file:
            file.write(b"\n")
    sync(path)
