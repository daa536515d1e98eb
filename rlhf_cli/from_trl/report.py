"""What became of each option, on stdout."""

from pathlib import Path
from typing import Any

from rlhf_cli import terminal
from rlhf_cli.config.written import written
from rlhf_cli.errors import quoted, shown
from rlhf_cli.from_trl.placing import Placed, Placing

COLUMNS = ("there", "value", "here", "value", "note")


def show(placing: Placing, name: str, target: Path) -> None:
    """Tables of what was placed, of TRL's own values, and of what was not placed or read; then what is next."""
    given = [placed for placed in placing.placed.values() if placed.given]
    own = [placed for placed in placing.placed.values() if not placed.given]
    places = list(dict.fromkeys(setting.where for setting in placing.read.settings))
    order = {where: at for at, where in enumerate(places)}
    rows = sorted(given + placing.nothing, key=lambda placed: order.get(placed.where, len(order)))
    terminal.table(COLUMNS, [_row(placed) for placed in rows])
    if own:
        terminal.out(f"\nLeft out of {name}: TRL {placing.version}'s own values, where this tool has others")
        terminal.table(COLUMNS, [_row(placed) for placed in own])
    if placing.unplaced:
        terminal.out("\nNot placed")
        rows_ = [[each.name, _short(each.value), each.why] for each in placing.unplaced]
        terminal.table(("there", "value", "why"), rows_)
    if placing.read.unread:
        terminal.out("\nNot read")
        terminal.table(("what", "where", "why"), [[each.what, each.where, each.why] for each in placing.read.unread])
    if placing.to_say:
        terminal.out("\nFor you to say")
        terminal.table(("key", "what it is"), [list(row) for row in placing.to_say.items()])
    then = f"; then rlhf ppo --config {quoted(target)} --nproc {placing.processes}" if placing.processes else ""
    terminal.out(f"\n{shown(target)} is written; next: rlhf check {quoted(target)}{then}")


def _row(placed: Placed) -> list[str]:
    was = "" if not placed.name else _short(placed.was)
    if placed.name and placed.given and not placed.where:
        was += " (left out)"
    ours = _short(placed.value) if placed.key else ""
    return [placed.name or "-", was, placed.key or "-", ours, placed.note]


def _short(value: Any) -> str:
    text = written(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
