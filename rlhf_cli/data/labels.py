"""Labels of a run's own answers: RUN/labels/NAME, which `rlhf label` writes and a reward stage trains on.

candidates.jsonl holds the drawn answers, labels.jsonl what people or a judge said of pairs of them. A line of
labels.jsonl is a label, or `{"undo": PAIR, "annotator": NAME}`, which takes back that annotator's label of the pair.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from rlhf_cli import terminal
from rlhf_cli.data.readers import RowIterator, RowLocation
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.files import appended_rows, read_json_object

CANDIDATES = "candidates.jsonl"
LABELS = "labels.jsonl"
SETTINGS = "settings.json"  # what decides the candidates of a folder
COMPARES = "compares"  # in SETTINGS: the labels compare models on held-out prompts
Messages = list[dict[str, Any]]
Choice = Literal["first", "second", "tie", "bad", "skip"]
CHOICES: tuple[str, ...] = get_args(Choice)
PREFERENCES = ("first", "second")  # the choices that a reward model can be trained on
MAX_SECONDS = 86400.0  # for one label
EDITED_HINT = "restore the line, or remove it: its pair is then shown again"


@dataclass(frozen=True)
class Label:
    """What an annotator said of two answers.

    `choice` first or second is the better one of `answers`, whichever was shown first: `order` is [0, 1] or [1, 0].
    """

    pair: str  # its name among the candidates: prompt, then the numbers of both answers
    prompt: str | Messages
    answers: Sequence[str]
    sources: Sequence[str]  # the policies that wrote them
    order: Sequence[int]
    choice: Choice
    annotator: str
    seconds: float  # from when the pair was shown
    time: float  # of the epoch
    ended: Sequence[bool] = (True, True)  # False: the answer was cut off at the longest length
    tags: Sequence[str] = ()
    rlhf: str = ""  # version

    @property
    def prompt_name(self) -> str:
        """Return the row of the prompt: pairs of one prompt have the same."""
        return self.pair.partition(":")[0]

    @property
    def prefers_shown_first(self) -> bool:
        """Return True if the better answer is the one that was shown first; only of a pair with a better one."""
        return self.order[0] == PREFERENCES.index(self.choice)

    def row(self) -> dict[str, Any]:
        """Return the label as a line of labels.jsonl."""
        return asdict(self)


def is_labels_folder(folder: Path) -> bool:
    """Return True if `rlhf label` wrote this folder."""
    return all(os.path.isfile(folder / name) for name in (CANDIDATES, LABELS))


def are_of_held_out_prompts(folder: Path) -> bool:
    """Return True if the labels compare models on the prompts of the evaluation: nothing may be trained on them."""
    settings = read_json_object(folder / SETTINGS) or {}
    return settings.get(COMPARES) is True


def read_labels(path: Path) -> dict[tuple[str, str], tuple[int, Label]]:
    """Return line number and label by (pair, annotator), in the order of the file, without those taken back.

    An unfinished last line is of a killed process, and is no label. Raises RLHFError D03, D04, D12, D20.
    """
    labels: dict[tuple[str, str], tuple[int, Label]] = {}
    for number, row in appended_rows(path, hint=EDITED_HINT):
        location = f"{shown(path)}:{number}"
        if "undo" in row:
            key = row["undo"], row.get("annotator")
            are_names = all(isinstance(name, str) for name in key)
            if not are_names or key not in labels:
                text = f'"undo" names the pair {row["undo"]!r:.40}, of which {key[1]!r:.40} has no label'
                raise RLHFError("D20", text, where=location, hint="remove the line")
            del labels[key]
            continue
        label = _parse_label(row, location)
        key = label.pair, label.annotator
        if key in labels:
            text = f"the pair {label.pair} has a label of {label.annotator} in line {labels[key][0]}"
            raise RLHFError("D20", text, where=location, hint="remove one of the two lines")
        labels[key] = number, label
    return labels


def _parse_label(row: Mapping[str, Any], location: str) -> Label:
    """Return the label of a line. Raises RLHFError D20 if it is not one."""
    problem = _problem(row)
    if problem:
        raise RLHFError("D20", problem, where=location, hint=EDITED_HINT)
    return Label(**{name: row[name] for name in Label.__dataclass_fields__ if name in row})


def _problem(row: Mapping[str, Any]) -> str | None:
    """Return why a line is not a label, or None."""
    missing = [name for name in ("pair", "prompt", "answers", "choice", "annotator") if name not in row]
    if missing:
        return f'"{missing[0]}" is missing'
    if row["choice"] not in CHOICES:
        return f'"choice" is {row["choice"]!r:.40}; it is one of {", ".join(CHOICES)}'
    if not _are_texts(row["answers"], 2):
        return '"answers" is not a list of two texts'
    if not _are_texts(row.get("sources"), 2):
        return '"sources" is not a list of two names'
    if row.get("ended", [True, True]) not in [[first, second] for first in (True, False) for second in (True, False)]:
        return f'"ended" is {row["ended"]!r:.40}; it is a list of two of true and false'
    if row.get("order") not in ([0, 1], [1, 0]):
        return f'"order" is {row.get("order")!r:.40}; it is [0, 1] or [1, 0]'
    if not isinstance(row["pair"], str) or not isinstance(row["annotator"], str):
        return '"pair" or "annotator" is not a text'
    if not isinstance(row["prompt"], str | list):
        return '"prompt" is neither a text nor a list of messages'
    if not all(isinstance(row.get(name), int | float) for name in ("seconds", "time")):
        return '"seconds" or "time" is not a number'
    return None


def _are_texts(value: Any, count: int) -> bool:
    return isinstance(value, list) and len(value) == count and all(isinstance(each, str) for each in value)


# As preference pairs


def preference_pairs_of(folder: Path) -> RowIterator:
    """Yield the row {prompt, chosen, rejected} of each pair with a better answer; say how many pairs have none.

    Of several annotators the majority decides. Raises RLHFError as `read_labels`.
    """
    path = folder / LABELS
    by_pair: dict[str, list[tuple[int, Label]]] = {}
    for number, label in read_labels(path).values():
        by_pair.setdefault(label.pair, []).append((number, label))

    left_out: Counter[str] = Counter()
    for entries in by_pair.values():
        number, label = entries[0]
        choice = majority([each.choice for _, each in entries])
        if choice in PREFERENCES:
            yield RowLocation(path, number), preference_row(label, choice)
        else:
            left_out[choice] += 1

    if left_out:
        counts = ", ".join(f"{count} {choice}" for choice, count in sorted(left_out.items()))
        terminal.log_once(f"data     {shown(folder)}: {sum(left_out.values())} pairs omitted: {counts}")


def majority(choices: Sequence[str]) -> str:
    """Return the choice of most annotators who did not skip the pair, "disputed" if there is no such one."""
    counts = Counter(choice for choice in choices if choice != "skip").most_common(2)
    if not counts:
        return "skip"
    if len(counts) == 2 and counts[0][1] == counts[1][1]:
        return "disputed"
    return counts[0][0]


def preference_row(label: Label, choice: str) -> dict[str, Any]:
    """Return a pair as the reward stage reads it, its answers in the form of the prompt."""
    chosen, rejected = label.answers
    if choice == "second":
        chosen, rejected = rejected, chosen
    if isinstance(label.prompt, str):
        return {"prompt": label.prompt, "chosen": chosen, "rejected": rejected}
    return {"prompt": label.prompt, "chosen": _message(chosen), "rejected": _message(rejected)}


def _message(answer: str) -> Messages:
    return [{"role": "assistant", "content": answer}]
