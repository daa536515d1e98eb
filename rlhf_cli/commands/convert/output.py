"""The ppo.yaml that comes of it: keys with their names there, TRL's own values apart, at the end what has no place."""

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlhf_cli import terminal
from rlhf_cli.commands.convert.options import Placed, Placing
from rlhf_cli.commands.convert.versions import SOURCES
from rlhf_cli.config.yaml_io import to_yaml, with_comment
from rlhf_cli.errors import shell_path, shown
from rlhf_cli.terminal import clean

WIDTH = 116
HEAD = (
    "PPO as {name} asked TRL {version} for it; written by `rlhf convert`. Behind a key stands what it was "
    "called there, and its value where that differs. `rlhf explain KEY` tells what a key does; docs/commands.md, what "
    "is different here and why."
)
OWN = ("Left out there; TRL {version}'s own values, where this tool has others", "[{source}]")
ENDS = {
    "to say": "For you to say, each as a key above:",
    "unplaced": "Not placed:",
    "unread": "Not read:",
}


def yaml_page(placing: Placing, name: str) -> str:
    """The whole file; `name` is the file that it was made of."""
    lines = [*_comment(HEAD.format(name=name, version=placing.version)), "", "stage: ppo"]
    sections = dict.fromkeys(key.partition(".")[0] for key in placing.placed)
    for section in sorted(sections, key=("seed", "models", "data", "rewards", "ppo", "output").index):
        keys = {key: placed for key, placed in placing.placed.items() if key.partition(".")[0] == section}
        given = {key: placed for key, placed in keys.items() if placed.given or section != "ppo"}
        own = {key: placed for key, placed in keys.items() if key not in given}
        lines += ([""] if section != "seed" else []) + list(_keys(given, [])) if given else ["", f"{section}:"]
        if own:
            source = SOURCES[placing.version]
            told = [f"  # {line.format(version=placing.version, source=source)}" for line in OWN]
            lines += ["", *told, *_keys(own, [section])]
    ends = {
        "to say": [f"{key}: {what}" for key, what in placing.to_say.items()],
        "unplaced": [f"{each.name}: {to_yaml(each.value)} ({each.why})" for each in placing.unplaced],
        "unread": [f"{each.what} ({each.where}): {each.why}" for each in placing.read.unread],
    }
    for kind, rows in ends.items():
        if rows:
            lines += ["", f"# {ENDS[kind]}", *(line for row in rows for line in _comment(row, hang="  "))]
    return "\n".join(clean(line) for line in lines) + "\n"


def _keys(placed: dict[str, Placed], above: Sequence[str]) -> Iterator[str]:
    """The lines of keys below the sections `above`; keys of one section stand together."""
    indent = "  " * len(above)
    start = "".join(f"{section}." for section in above)
    for name in dict.fromkeys(key.removeprefix(start).partition(".")[0] for key in placed):
        key = start + name
        if key in placed:
            yield from _line(placed[key], f"{indent}{name}: {to_yaml(placed[key].value)}", indent)
        else:
            yield f"{indent}{name}:"
            below = {inner: each for inner, each in placed.items() if inner.startswith(f"{key}.")}
            yield from _keys(below, [*above, name])


def _line(placed: Placed, line: str, indent: str) -> Iterator[str]:
    """A key, with what it was behind it, and the note there too or above it."""
    name = placed.key.rpartition(".")[2]
    same = placed.value == placed.was and isinstance(placed.value, bool) == isinstance(placed.was, bool)
    was = "" if not placed.name or (same and placed.name == name) else placed.name
    was += "" if not was or same else f": {to_yaml(placed.was)}"
    whole = with_comment(line, "; ".join(filter(None, (was, placed.note))))
    if len(whole) > WIDTH and placed.note:
        yield from _comment(placed.note, indent)
        whole = with_comment(line, was)
    yield " ".join(whole.splitlines())


def _comment(words: str, indent: str = "", hang: str = "") -> list[str]:
    mark = f"{indent}# "
    return textwrap.wrap(
        " ".join(words.split()), WIDTH, initial_indent=mark, subsequent_indent=mark + hang, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


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
    then = f"; then rlhf ppo --config {shell_path(target)} --nproc {placing.processes}" if placing.processes else ""
    terminal.out(f"\n{shown(target)} is written; next: rlhf check {shell_path(target)}{then}")


def _row(placed: Placed) -> list[str]:
    was = "" if not placed.name else _short(placed.was)
    if placed.name and placed.given and not placed.where:
        was += " (left out)"
    ours = _short(placed.value) if placed.key else ""
    return [placed.name or "-", was, placed.key or "-", ours, placed.note]


def _short(value: Any) -> str:
    text = to_yaml(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
