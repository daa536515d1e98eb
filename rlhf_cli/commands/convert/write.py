"""Write the ppo.yaml of converted TRL settings, and list what was not converted."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_cli import config, system, terminal
from rlhf_cli.commands.convert.mapping import NEW, OLD, OPTIONS, Conversion, Row, detect_version
from rlhf_cli.commands.convert.read import read_settings
from rlhf_cli.commands.convert.rules import convert_settings
from rlhf_cli.config.machinery.paths import path_values, resolve_paths
from rlhf_cli.config.machinery.yaml_io import to_yaml, with_comment
from rlhf_cli.errors import RLHFError, did_you_mean, shell_path, shown

FILE = "ppo.yaml"
HEAD = """\
# PPO settings of {name} for TRL {version}, converted by `rlhf convert`. A comment gives the TRL option of a key, and
# its value in TRL if it differs. `rlhf explain KEY` describes a key; docs/commands.md lists differences from TRL.

stage: ppo"""


def convert(file: Path, folder: Path, version: str | None = None) -> None:
    """Write folder/ppo.yaml from TRL's settings in `file`, and print what was not converted.

    `version` is "0.11" or "1.12"; None: detected from the option names. Raises RLHFError C07 for another version, C08,
    C09 or S02 if the file cannot be read or has no option of TRL's PPO, C15 if there already is a ppo.yaml, E03 if the
    folder cannot be written.
    """
    if version not in (None, OLD, NEW):
        hint = did_you_mean(version, (OLD, NEW)) or f"use {NEW} for every version after the step() API"
        raise RLHFError("C07", f"--trl {version}: not one of {OLD}, {NEW}", hint=hint)
    source = read_settings(file)
    if not {setting.name for setting in source.settings} & {*OPTIONS[OLD], *OPTIONS[NEW]}:
        hint = "use a YAML or JSON file, a script with PPOConfig(...), or a text file with the command line"
        raise RLHFError("C09", "the file has no option of TRL's PPO", where=str(file), hint=hint)
    target = folder / FILE
    if os.path.lexists(target):
        text = f"{shown(folder)} already contains {FILE}"
        raise RLHFError("C15", text, hint="nothing was written; name another folder")
    detected, reason = detect_version(source)
    conversion = convert_settings(source, version or detected)
    tree = conversion.tree()
    working_dir = os.getcwd()
    resolve_paths(config.PPOConfig, tree, lambda key: working_dir)
    for path in path_values(config.PPOConfig, tree):
        row = conversion.rows.get(path.key)
        if row and not row.is_default:  # relative to the working directory in TRL, to the folder here
            conversion.rows[path.key] = replace(row, value=path.relative_to(Path(os.path.abspath(folder))))
    system.require_writable(folder, hint="name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / f".tmp-{FILE}"
    try:
        scratch.write_text(page(conversion, str(file)), encoding="utf-8")
        config.load("ppo", scratch)
        scratch.rename(target)  # atomic
    finally:
        scratch.unlink(missing_ok=True)
    terminal.out(f"{shown(file)} is of TRL {conversion.version}: {'set by --trl' if version else reason}")
    for line in _lists(conversion):
        terminal.out(line)
    terminal.out(f"\nwrote {shown(target)}; next: rlhf check {shell_path(target)}")


def page(conversion: Conversion, name: str) -> str:
    """Return the text of ppo.yaml; `name` is the converted file."""
    keys = conversion.tree()
    in_order = {section: keys[section] for section in config.PPOConfig.model_fields if section in keys}
    lines = [HEAD.format(name=_line(name), version=conversion.version)]
    lines += _keys(in_order, "", conversion)
    lines += [line and f"# {line}" for line in _lists(conversion)]
    return "\n".join(lines) + "\n"


def _lists(conversion: Conversion) -> Iterator[str]:
    """Yield lists of the keys that the user has to set, and of the options that were not converted."""
    if conversion.to_set:
        yield from ("", "To be set by you:")
    for key, note in conversion.to_set.items():
        yield _line(f"{key}: {note}")

    if conversion.unconverted:
        yield from ("", "Not converted:")
    for row in conversion.unconverted:
        yield _line(f"{row.option}: {to_yaml(row.trl_value)} ({row.note})")


def _keys(tree: dict[str, Any], above: str, conversion: Conversion) -> Iterator[str]:
    """Yield a line for each key, with a comment: the TRL option, its value in TRL if that differs, and the note."""
    indent = "  " * above.count(".")
    for name, value in tree.items():
        row = conversion.rows.get(above + name)
        if row:
            yield with_comment(f"{indent}{name}: {to_yaml(value)}", _line(_remark(row, name)))
            continue
        if not above:
            yield ""
        yield f"{indent}{name}:"
        yield from _keys(value, f"{above}{name}.", conversion)


def _remark(row: Row, name: str) -> str:
    """Return the comment of a key: the TRL option, its value in TRL if that differs, and the note."""
    is_same = row.value == row.trl_value and isinstance(row.value, bool) == isinstance(row.trl_value, bool)
    option = row.option
    if option and not is_same:
        option += f": {to_yaml(row.trl_value)}"
    return "; ".join(part for part in (option, row.note) if part and part != name)


def _line(text: str) -> str:
    return " ".join(terminal.clean(text).split())
