"""RUN/judges/NAME.jsonl: every answer of a judge, by the hash of what it was asked. No stage moves or prunes it."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.files import append_rows, appended_rows, make_folder, repair_end
from rlhf_cli.judges.question import WINNERS, Winner
from rlhf_cli.runs.locks import lock_folder

FOLDER = "judges"  # of a run, with a file of answers for each judge
EDITED_HINT = "remove the line: the judge is asked again"


@dataclass(frozen=True)
class Answer:
    """A judge's answer to one question, and what it cost."""

    winner: Winner | None  # None: all replies named none; the question is asked again, and the calls were paid for
    calls: int
    prompt_tokens: int
    completion_tokens: int


def answers_path(run: Path, name: str) -> Path:
    """Return the file of a judge's answers."""
    return run / FOLDER / f"{name}.jsonl"


def paid_calls(path: Path) -> int:
    """Return how many calls the answers in a file took, all commands together. Raises RLHFError D03, D12."""
    return sum(answer.calls for _, answer in _read(path))


def describe_paid(paid: int, max_calls: int) -> str:
    """Return how much of max_calls is used as text."""
    return f"{paid:,} calls of this run are paid for, and max_calls allows {max(0, max_calls - paid):,} more"


class AnswerFile:
    """The answers of a judge on disk, locked by this process. Each is flushed before its question counts as answered.

    Raises RLHFError C15 if another process asks the judge, D03 for a line that is no answer, S03 for a link out of the
    folder.
    """

    def __init__(self, path: Path) -> None:
        """Lock and read the file. A last line that a killed process left incomplete is cut off."""
        make_folder(path.parent)
        lock_folder(path, hint="wait for it to end: then its answers are read; or give one of the judges another name")
        repair_end(path)

        self.path = path
        self.paid_before = paid_calls(path)  # when the file was opened
        self._answers = {key: answer for key, answer in _read(path) if answer.winner}

    def get(self, key: str) -> Answer | None:
        return self._answers.get(key)

    def add(self, key: str, answer: Answer) -> None:
        """Append an answer, and wait until the disk has it."""
        append_rows(self.path, [{"key": key, **asdict(answer)}])
        if answer.winner:
            self._answers[key] = answer


def _read(path: Path) -> Iterator[tuple[str, Answer]]:
    """Yield the answers with their keys."""
    for number, row in appended_rows(path, hint=EDITED_HINT):
        yield str(row.pop("key", None)), _answer(row, f"{shown(path)}:{number}")


def _answer(row: dict[str, Any], where: str) -> Answer:
    """Return the answer of a line. Raises RLHFError D03 for another line."""
    winner = row.get("winner", "")
    calls: Any = row.get("calls")
    prompt_tokens: Any = row.get("prompt_tokens")
    completion_tokens: Any = row.get("completion_tokens")
    has_counts = type(calls) is type(prompt_tokens) is type(completion_tokens) is int
    if not has_counts or winner not in (None, *WINNERS):
        raise RLHFError("D03", "the line is not an answer of a judge", where=where, hint=EDITED_HINT)
    return Answer(winner, calls, prompt_tokens, completion_tokens)
