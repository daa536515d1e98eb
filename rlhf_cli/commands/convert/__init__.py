"""`rlhf convert FILE DIR`: write a ppo.yaml from TRL PPO settings. FILE is parsed, never executed; no torch."""

import os
from dataclasses import replace
from pathlib import Path

from rlhf_cli import config, system, terminal
from rlhf_cli.commands.convert import output
from rlhf_cli.commands.convert.options import OptionMapping
from rlhf_cli.commands.convert.read import read_settings
from rlhf_cli.commands.convert.rules import RULES, config_tree, fill_defaults
from rlhf_cli.commands.convert.versions import OPTIONS, ParsedFile, detect_version
from rlhf_cli.config.paths import path_entries, relative, resolve_paths
from rlhf_cli.errors import RLHFError, closest_match, shown

FILE = "ppo.yaml"


def convert(file: Path, folder: Path, version: str | None = None) -> None:
    """Write folder/ppo.yaml from TRL's settings in `file`, and print how each was converted.

    `version` is "0.11" or "1.12"; None: detected from the option names. Raises RLHFError C07 for another version, C08,
    C09 or S02 if the file cannot be read or has no option of TRL's PPO, C15 if there already is a ppo.yaml, E03 if the
    folder cannot be written.
    """
    if version is not None and version not in OPTIONS:
        near = closest_match(version, OPTIONS)
        hint = f"did you mean {near}?" if near else "use 1.12 for every version after the step() API"
        raise RLHFError("C07", f"--trl {version}: not one of {', '.join(OPTIONS)}", hint=hint)
    source = read_settings(file)
    if not any(setting.name in options for setting in source.settings for options in OPTIONS.values()):
        hint = "use a YAML or JSON file, a script with PPOConfig(...), or a text file with the command line"
        raise RLHFError("C09", "the file has no option of TRL's PPO", where=str(file), hint=hint)
    target = folder / FILE
    if os.path.lexists(target):
        text = f"{shown(folder)} already contains {FILE}"
        raise RLHFError("C15", text, hint="nothing trl_value written; name another folder")
    detected, reason = detect_version(source)
    mapping = map_options(source, version or detected)
    _rebase_paths(folder, mapping)
    system.require_writable(folder, hint="name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / f".tmp-{FILE}"
    try:
        scratch.write_text(output.yaml_page(mapping, str(file)), encoding="utf-8")
        scratch.rename(target)  # atomic
    finally:
        scratch.unlink(missing_ok=True)
    try:
        config.load("ppo", target)
    except RLHFError:
        target.unlink()
        raise
    terminal.out(f"{shown(file)} is of TRL {mapping.version}: {'set by --trl' if version else reason}")
    output.show(mapping, file.name, target)


def map_options(source: ParsedFile, version: str) -> OptionMapping:
    """Map the options of a file to the keys of a valid ppo.yaml, with TRL's defaults for the other keys.

    Raises RLHFError if the result is not a valid config and no option is responsible.
    """
    mapping = OptionMapping(version, source)
    for rule in RULES:
        rule(mapping)
    mapping.map_remaining()
    fill_defaults(mapping)
    return mapping


def _rebase_paths(folder: Path, mapping: OptionMapping) -> None:
    """Make paths, relative to the working directory in TRL, relative to `folder`."""
    tree, base = config_tree(mapping), os.getcwd()
    resolve_paths(config.PPOConfig, tree, lambda key: base)
    for container, name, key, mark in path_entries(config.PPOConfig, tree):
        if key in mapping.mapped and mapping.mapped[key].from_file:
            value = relative(container[name], mark, Path(os.path.abspath(folder)))
            mapping.mapped[key] = replace(mapping.mapped[key], value=value)
