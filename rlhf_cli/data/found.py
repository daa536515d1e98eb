"""What reading a source came to, and what two sources have in common."""

from collections.abc import Iterable
from copy import copy
from typing import Any, TypeVar

from rlhf_cli import terminal
from rlhf_cli.data import texts
from rlhf_cli.data.forms import DataFile
from rlhf_cli.data.tokens import Conversation

Row = TypeVar("Row")
Other = TypeVar("Other")


class Rows(list[Row]):
    """The usable rows of a source, with what was read and left out. Read without a tokenizer, they hold no tokens.

    `kept`: how many rows of the file they stand for: a prompt may be that of several pairs. `every`: above 1 they are a
    sample, one row in so many.
    """

    def __init__(
        self, rows: Iterable[Row], file: DataFile, prompts: Iterable[str | Conversation], *, kept: int, every: int = 1
    ) -> None:
        super().__init__(rows)
        self.read = file.read
        self.lost = {code: file.dropped[code] for code in sorted(file.dropped, key=lambda c: -file.dropped[c].rows)}
        self.left_out, self.asked = file.left_out, kept + file.left_out
        self.longest = file.longest_usable  # tokens; 0 without a tokenizer
        self.longest_read = file.longest  # with the rows that were left out for it
        self.every = every
        self.source = file.source
        self.prompts = frozenset(map(texts.as_key, prompts))

    @property
    def share_left_out(self) -> float:
        """Of the rows that this part of the source would have; a conversation gives one for each assistant turn."""
        return self.left_out / self.asked if self.asked else 0.0

    def told_left_out(self) -> str:
        """How many were left out of how many; empty where none was."""
        return f"{self.left_out} of {self.asked} left out ({self.share_left_out:.1%})" if self.left_out else ""

    def holding(self, rows: Iterable[Other]) -> "Rows[Other]":
        """Other rows made of these, one of each."""
        made: Any = copy(self)
        made[:] = rows
        return made


def warn_shared(training: Rows, evaluation: Rows, *, where: str | None) -> None:
    """D13: how many of the evaluation's prompts were trained on; `where` names the key of the evaluation's data.

    Where all training rows have one and the same prompt, it tells them apart no more than no prompt would.
    """
    if len(training.prompts) == 1 < len(training):
        return
    if shared := len(training.prompts & evaluation.prompts):
        text = f"{shared} of {len(evaluation.prompts)} evaluation prompts also occur in {training.source.shown()}"
        hint = "remove them from one of the files, or hold out prompts with data.eval_fraction"
        terminal.warn("D13", text, where=where, hint=hint)
