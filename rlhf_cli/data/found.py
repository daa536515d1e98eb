"""What reading a source came to, and what two sources have in common."""

from collections.abc import Iterable
from typing import TypeVar

from rlhf_cli import terminal
from rlhf_cli.data import texts
from rlhf_cli.data.forms import DataFile
from rlhf_cli.data.tokens import Conversation

Row = TypeVar("Row")


class Rows(list[Row]):
    """The usable rows of a source, with what was read and left out. Read without a tokenizer, they hold no tokens."""

    def __init__(self, rows: Iterable[Row], file: DataFile, prompts: Iterable[str | Conversation]) -> None:
        super().__init__(rows)
        self.read = file.read
        self.left_out = sum(lost.rows for lost in file.dropped.values())
        self.longest = file.longest_usable  # tokens; 0 without a tokenizer
        self.source = file.source
        self.prompts = frozenset(map(texts.as_key, prompts))


def warn_shared(training: Rows, evaluation: Rows, *, where: str | None) -> None:
    """D13: how many of the evaluation's prompts were trained on; `where` names the key of the evaluation's data.

    Where all training rows have one and the same prompt, it tells them apart no more than no prompt would.
    """
    if len(training.prompts) == 1 < len(training):
        return
    if shared := len(training.prompts & evaluation.prompts):
        text = f"{shared} of {len(evaluation.prompts)} evaluation prompts also occur in {training.source.shown()}"
        hint = "take them out of one of the two; data.eval_fraction holds prompts out"
        terminal.warn("D13", text, where=where, hint=hint)
