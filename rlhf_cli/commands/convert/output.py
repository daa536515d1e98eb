"""Output of a conversion: the commented ppo.yaml, and the tables on the terminal."""

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlhf_cli import terminal
from rlhf_cli.commands.convert.options import MappedOption, OptionMapping
from rlhf_cli.commands.convert.versions import SOURCES
from rlhf_cli.config.yaml_io import to_yaml, with_comment
from rlhf_cli.errors import shell_path, shown
from rlhf_cli.terminal import clean

WIDTH = 116
HEAD = (
    "PPO settings of {name} for TRL {version}, converted by `rlhf convert`. Comments give the TRL option of a key, and "
    "its value in TRL if it differs. `rlhf explain KEY` describes a key; docs/commands.md lists differences from TRL."
)
DEFAULTS_HEADING = ("Defaults of TRL {version} that differ from the defaults of this tool", "[{source}]")
FOOTERS = {
    "missing": "To be set by you:",
    "unsupported": "Not supported:",
    "unparsed": "Not parsed:",
}


def yaml_page(mapping: OptionMapping, name: str) -> str:
    """Return the text of ppo.yaml; `name` is the converted file."""
    lines = [*_comment(HEAD.format(name=name, version=mapping.version)), "", "stage: ppo"]
    sections = dict.fromkeys(key.partition(".")[0] for key in mapping.mapped)
    for section in sorted(sections, key=("seed", "models", "data", "rewards", "ppo", "output").index):
        keys = {key: option for key, option in mapping.mapped.items() if key.partition(".")[0] == section}
        main = {key: option for key, option in keys.items() if option.from_file or section != "ppo"}
        defaults = {key: option for key, option in keys.items() if key not in main}
        lines += ([""] if section != "seed" else []) + list(_keys(main, [])) if main else ["", f"{section}:"]
        if defaults:
            source = SOURCES[mapping.version]
            heading = [f"  # {line.format(version=mapping.version, source=source)}" for line in DEFAULTS_HEADING]
            lines += ["", *heading, *_keys(defaults, [section])]
    footers = {
        "missing": [f"{key}: {note}" for key, note in mapping.to_set.items()],
        "unsupported": [f"{option.name}: {to_yaml(option.value)} ({option.reason})" for option in mapping.unsupported],
        "unparsed": [f"{value.name} ({value.where}): {value.reason}" for value in mapping.parsed.unparsed],
    }
    for kind, rows in footers.items():
        if rows:
            lines += ["", f"# {FOOTERS[kind]}", *(line for row in rows for line in _comment(row, hang="  "))]
    return "\n".join(clean(line) for line in lines) + "\n"


def _keys(options: dict[str, MappedOption], above: Sequence[str]) -> Iterator[str]:
    """Yield the lines of keys below the sections `above`, grouped by section."""
    indent = "  " * len(above)
    start = "".join(f"{section}." for section in above)
    for name in dict.fromkeys(key.removeprefix(start).partition(".")[0] for key in options):
        key = start + name
        if key in options:
            yield from _line(options[key], f"{indent}{name}: {to_yaml(options[key].value)}", indent)
        else:
            yield f"{indent}{name}:"
            below = {inner: option for inner, option in options.items() if inner.startswith(f"{key}.")}
            yield from _keys(below, [*above, name])


def _line(option: MappedOption, line: str, indent: str) -> Iterator[str]:
    """Yield the line of a key, with the TRL option and the note as a comment behind or above it."""
    name = option.key.rpartition(".")[2]
    same = option.value == option.trl_value and isinstance(option.value, bool) == isinstance(option.trl_value, bool)
    remark = "" if not option.name or (same and option.name == name) else option.name
    remark += "" if not remark or same else f": {to_yaml(option.trl_value)}"
    commented_line = with_comment(line, "; ".join(filter(None, (remark, option.note))))
    if len(commented_line) > WIDTH and option.note:
        yield from _comment(option.note, indent)
        commented_line = with_comment(line, remark)
    yield " ".join(commented_line.splitlines())


def _comment(text: str, indent: str = "", hang: str = "") -> list[str]:
    mark = f"{indent}# "
    return textwrap.wrap(
        " ".join(text.split()), WIDTH, initial_indent=mark, subsequent_indent=mark + hang, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


COLUMNS = ("TRL option", "value", "key", "value", "note")


def show(mapping: OptionMapping, name: str, target: Path) -> None:
    """Print tables of converted options, TRL's defaults, and unsupported or unparsed options; then the next command."""
    given_options = [option for option in mapping.mapped.values() if option.from_file]
    defaults = [option for option in mapping.mapped.values() if not option.from_file]
    locations = list(dict.fromkeys(setting.where for setting in mapping.parsed.settings))
    order = {where: index for index, where in enumerate(locations)}
    rows = sorted(given_options + mapping.skipped, key=lambda option: order.get(option.where, len(order)))
    terminal.table(COLUMNS, [_row(option) for option in rows])
    if defaults:
        terminal.out(f"\nNot in {name}: defaults of TRL {mapping.version} that differ from the defaults of this tool")
        terminal.table(COLUMNS, [_row(option) for option in defaults])
    if mapping.unsupported:
        terminal.out("\nNot supported")
        unsupported = [[option.name, _short(option.value), option.reason] for option in mapping.unsupported]
        terminal.table(("TRL option", "value", "reason"), unsupported)
    if mapping.parsed.unparsed:
        terminal.out("\nNot parsed")
        unparsed = [[value.name, value.where, value.reason] for value in mapping.parsed.unparsed]
        terminal.table(("option", "location", "reason"), unparsed)
    if mapping.to_set:
        terminal.out("\nTo be set by you")
        terminal.table(("key", "note"), [list(row) for row in mapping.to_set.items()])
    stage_command = (
        f"; then rlhf ppo --config {shell_path(target)} --nproc {mapping.processes}" if mapping.processes else ""
    )
    terminal.out(f"\nwrote {shown(target)}; next: rlhf check {shell_path(target)}{stage_command}")


def _row(option: MappedOption) -> list[str]:
    trl_value = "" if not option.name else _short(option.trl_value)
    if option.name and option.from_file and not option.where:
        trl_value += " (default)"
    value = _short(option.value) if option.key else ""
    return [option.name or "-", trl_value, option.key or "-", value, option.note]


def _short(value: Any) -> str:
    text = to_yaml(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
