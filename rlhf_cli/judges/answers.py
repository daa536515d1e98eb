"""RUN/judges/NAME.jsonl: every answer of a judge, by the hash of what it was asked. No stage moves or prunes it."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.files import append_rows, appended_rows, make_folder, repair_end
from rlhf_cli.judges.question import WINNERS, Winner


@dataclass(frozen=True)
class Answer:
    """A judge's answer to one question, and what it cost."""

    winner: Winner
    calls: int
    prompt_tokens: int
    completion_tokens: int


class AnswerFile:
    """The answers of a judge on disk. Each is flushed before its question counts as answered.

    Raises RLHFError D03 for a line that is no answer, S03 for a link out of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._answers = _read(path)

    def __contains__(self, key: str) -> bool:
        return key in self._answers

    def __getitem__(self, key: str) -> Answer:
        return self._answers[key]

    def add(self, key: str, answer: Answer) -> None:
        """Append an answer, and wait until the disk has it."""
        append_rows(self.path, [{"key": key, **asdict(answer)}])
        self._answers[key] = answer


def _read(path: Path) -> dict[str, Answer]:
    """Return the answers by key. A last line that a killed process left incomplete is cut off."""
    make_folder(path.parent)
    repair_end(path)

    answers = {}
    for number, row in appended_rows(path):
        answers[str(row.pop("key", None))] = _answer(row, f"{shown(path)}:{number}")
    return answers


def _answer(row: dict[str, Any], where: str) -> Answer:
    counts: dict[str, Any] = {}
    for name in ("calls", "prompt_tokens", "completion_tokens"):
        counts[name] = row.get(name)

    are_numbers = all(type(count) is int for count in counts.values())
    if row.get("winner") in WINNERS and are_numbers:
        return Answer(row["winner"], **counts)
    hint = "remove the line: the judge is asked again"
    raise RLHFError("D03", "the line is not an answer of a judge", where=where, hint=hint)
