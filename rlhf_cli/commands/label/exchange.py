"""Pairs to Argilla and Label Studio, and their labels back.

Both get the choices 1, 2, tie, bad and skip, which say what the page's keys say. The order in which the answers are
written is in the file, so that a label comes back for the right one.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_cli import terminal
from rlhf_cli.commands.label.session import SLOTS, LabelSession, Refused, Shown
from rlhf_cli.data.labels import MAX_SECONDS
from rlhf_cli.data.texts import joined_with_roles
from rlhf_cli.data.tokens import Conversation
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.files import write_json
from rlhf_cli.jsonl import open_data, parse_json

QUESTION = "choice"  # its name in both tools


@dataclass(frozen=True)
class ImportedLabel:
    """What an annotator chose in another tool."""

    pair: str
    order: tuple[int, int]
    answers: tuple[str, str]  # in this order
    slot: str
    annotator: str
    seconds: float


def export_pairs(session: LabelSession, path: Path, form: str) -> int:
    """Write all pairs of the session; return their number."""
    write, _ = FORMATS[form]
    rows = [write(session.show(pair, form)) for pair in session.pairs.values()]
    write_json(path, rows)
    terminal.out(f"{shown(path)}: {len(rows)} pairs for {form}")
    return len(rows)


def import_labels(session: LabelSession, path: Path, form: str) -> None:
    """Store the labels of a file that was exported from the tool. The same file a second time adds nothing.

    Raises RLHFError D01, D03, D04, D12 before any label is stored, E03.
    """
    before = session.store_size
    refused = 0
    for label in list(_read(session, path, form)):
        try:
            session.choose(
                label.annotator,
                label.pair,
                label.slot,
                seconds=label.seconds,
                order=label.order,
            )
        except Refused as error:
            refused += 1
            terminal.log_once(f"label    {shown(path)}: {error}")
    omitted = f", {refused} not stored" if refused else ""
    terminal.out(f"{shown(path)}: {session.store_size - before} new labels{omitted}")


def _read(session: LabelSession, path: Path, form: str) -> Iterator[ImportedLabel]:
    """Yield the labels of a file. Raises RLHFError D01, D03, D04; D12, also for other answers than those of a pair."""
    _, read = FORMATS[form]
    with open_data(path) as file:
        rows = parse_json(file.read(), path)
    if not isinstance(rows, list):
        raise RLHFError(
            "D12", "the file is no list of records", where=shown(path), hint=f"export it as JSON from {form}"
        )
    for number, row in enumerate(rows, start=1):
        where = f"{shown(path)}: row {number}"
        try:
            labels = list(read(row))
            valid = all(label.slot in SLOTS and label.order in ((0, 1), (1, 0)) for label in labels)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            valid = False
        if not valid:
            hint = "label the file that `rlhf label --export FILE --format` wrote, and export all of it as JSON"
            raise RLHFError("D12", f"not a labelled pair of {form}", where=where, hint=hint)
        for label in labels:
            _require_answers(session, label, where)
            yield label


def _require_answers(session: LabelSession, label: ImportedLabel, where: str) -> None:
    """Raise RLHFError D12 if a known pair has other answers: its name says nothing of the texts."""
    pair = session.pairs.get(label.pair)
    if pair is None:
        return
    ours = [answer.strip() for answer in Shown(pair, label.order).answers]
    if ours != [answer.strip() for answer in label.answers]:
        text = f"the answers are not those of the pair {label.pair} here"
        hint = "import into the folder that the pairs were exported from, with the same --name and options"
        raise RLHFError("D12", text, where=where, hint=hint)


# Argilla: https://docs.argilla.io/latest/how_to_guides/import_export


def _to_argilla(pair: Shown) -> dict[str, Any]:
    """Return a record of `Dataset.records.from_json`."""
    first, second = pair.answers
    return {
        "id": pair.pair.name,
        "fields": {"prompt": _text(pair.pair.prompt), "first": first, "second": second},
        "metadata": {"order": _order_text(pair)},
        "suggestions": {},
        "responses": {},
        "vectors": {},
    }


def _from_argilla(record: Mapping[str, Any]) -> Iterator[ImportedLabel]:
    """Yield the labels in a record of `Dataset.records.to_json`."""
    order = _parse_order(record["metadata"]["order"])
    answers = _answers(record["fields"])
    for response in record["responses"].get(QUESTION, []):
        annotator = str(response["user_id"])
        yield ImportedLabel(record["id"], order, answers, slot=response["value"], annotator=annotator, seconds=0.0)


# Label Studio: https://labelstud.io/guide/task_format


def _to_label_studio(pair: Shown) -> dict[str, Any]:
    """Return a task."""
    first, second = pair.answers
    order = _order_text(pair)
    return {
        "data": {
            "pair": pair.pair.name,
            "order": order,
            "prompt": _text(pair.pair.prompt),
            "first": first,
            "second": second,
        }
    }


def _from_label_studio(task: Mapping[str, Any]) -> Iterator[ImportedLabel]:
    """Yield the labels in a task of the JSON export."""
    data = task["data"]
    order = _parse_order(data["order"])
    answers = _answers(data)
    for annotation in task["annotations"]:
        if annotation.get("was_cancelled"):
            continue
        by = annotation.get("completed_by")
        annotator = by.get("email", by.get("id")) if isinstance(by, dict) else by
        seconds = min(float(annotation.get("lead_time") or 0.0), MAX_SECONDS)
        for result in annotation["result"]:
            if result["from_name"] == QUESTION:
                (slot,) = result["value"]["choices"]
                yield ImportedLabel(data["pair"], order, answers, slot=slot, annotator=str(annotator), seconds=seconds)


def _text(prompt: str | Conversation) -> str:
    """Return a prompt as one text."""
    return prompt if isinstance(prompt, str) else joined_with_roles(prompt)


def _answers(texts: Mapping[str, Any]) -> tuple[str, str]:
    return str(texts["first"]), str(texts["second"])


def _order_text(pair: Shown) -> str:
    return ",".join(map(str, pair.order))


def _parse_order(text: str) -> tuple[int, int]:
    first, second = text.split(",")
    return int(first), int(second)


Writer = Callable[[Shown], dict[str, Any]]
Reader = Callable[[Mapping[str, Any]], Iterator[ImportedLabel]]
FORMATS: dict[str, tuple[Writer, Reader]] = {
    "argilla": (_to_argilla, _from_argilla),
    "labelstudio": (_to_label_studio, _from_label_studio),
}
