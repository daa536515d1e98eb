"""Write the ppo.yaml of converted TRL settings, and list what was not converted."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_cli import config, files, system, terminal
from rlhf_cli.commands.convert.mapping import NEW, OLD, OPTIONS, Conversion, Row, convert_settings, detect_version
from rlhf_cli.commands.convert.read import read_settings
from rlhf_cli.config.machinery.yaml_io import to_yaml, with_comment
from rlhf_cli.errors import RLHFError, shell_path, shown

FILE = "ppo.yaml"
HEAD = """\
# PPO settings of {name} for TRL {version}, converted by `rlhf convert`. A comment gives the TRL option of a key, and
# its value in TRL if it differs. `rlhf explain KEY` describes a key; docs/convert.md lists differences from TRL.

stage: ppo"""


def convert(file: Path, folder: Path, version: str | None = None) -> None:
    """Write folder/ppo.yaml from TRL's settings in `file`, and print what was not converted.

    `version` is "0.11" or "1.12"; None: detected from the option names. Raises RLHFError C07 for another version, C08,
    C09 or S02 if the file cannot be read or has no option of TRL's PPO, C15 if there already is a ppo.yaml, E03 if the
    folder cannot be written.
    """
    if version not in (None, OLD, NEW):
        hint = f"use {NEW} for every version after the step() API"
        raise RLHFError("C07", f"--trl {version}: not one of {OLD}, {NEW}", hint=hint)
    source = read_settings(file)
    if not {*source.options, *source.unread} & {*OPTIONS[OLD], *OPTIONS[NEW]}:
        hint = "use a YAML or JSON file, a script with PPOConfig(...), or a text file with the command line"
        raise RLHFError("C09", "the file has no option of TRL's PPO", where=str(file), hint=hint)
    target = folder / FILE
    if os.path.lexists(target):
        text = f"{shown(folder)} already contains {FILE}"
        raise RLHFError("C15", text, hint="nothing was written; name another folder")

    detected, reason = detect_version(source)
    conversion = convert_settings(source, version or detected)
    system.require_writable(folder, hint="name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    files.write_text(target, page(conversion, str(file)))

    terminal.out(f"{shown(file)} is of TRL {conversion.version}: {'set by --trl' if version else reason}")
    for line in _lists(conversion):
        terminal.out(line)
    terminal.out(f"\nwrote {shown(target)}; next: rlhf check {shell_path(target)}")
    terminal.conclude(shown(target), {})


def page(conversion: Conversion, name: str) -> str:
    """Return the text of ppo.yaml; `name` is the converted file."""
    lines = [HEAD.format(name=_line(name), version=conversion.version)]
    tree = conversion.tree()
    for section in config.PPOConfig.model_fields:
        if section in tree:
            if section not in conversion.rows:
                lines.append("")
            lines += _keys(section, tree[section], conversion)
    for line in _lists(conversion):
        lines.append(f"# {line}" if line else "")
    return "\n".join(lines) + "\n"


def _lists(conversion: Conversion) -> Iterator[str]:
    """Yield lists of the keys that the user has to set, and of the options that were not converted."""
    for title, entries in (("To be set by you:", conversion.to_set), ("Not converted:", conversion.unconverted)):
        if entries:
            yield from ("", title)
        for name, text in entries.items():
            yield _line(f"{name}: {text}")


def _keys(key: str, value: Any, conversion: Conversion) -> Iterator[str]:
    """Yield the line of a key, with a comment, or those of a section."""
    name = key.rpartition(".")[2]
    indent = "  " * key.count(".")
    row = conversion.rows.get(key)
    if row:
        yield with_comment(f"{indent}{name}: {to_yaml(value)}", _line(_remark(conversion, row, name)))
        return
    yield f"{indent}{name}:"
    for inner_name, inner in value.items():
        yield from _keys(f"{key}.{inner_name}", inner, conversion)


def _remark(conversion: Conversion, row: Row, name: str) -> str:
    """Return the comment of a key: the TRL option, its value in TRL if that differs, and the note."""
    parts = []
    if row.option and to_yaml(row.value) != to_yaml(row.trl_value):
        parts.append(f"{row.option}: {to_yaml(row.trl_value)}")
    elif row.option != name:
        parts.append(row.option)
    parts.append(row.note)
    if row.option and row.option not in conversion.source.options:
        parts.append(f"default of TRL {conversion.version}")
    return "; ".join(filter(None, parts))


def _line(text: str) -> str:
    return " ".join(terminal.clean(text).split())
