"""`rlhf convert FILE DIR`: write a ppo.yaml from TRL PPO settings. FILE is parsed, never executed; no torch."""

import os
from dataclasses import replace
from pathlib import Path

from rlhf_cli import config, system, terminal
from rlhf_cli.commands.convert import output
from rlhf_cli.commands.convert import read as files
from rlhf_cli.commands.convert.options import Placing
from rlhf_cli.commands.convert.rules import TOPICS, complete, tree_of
from rlhf_cli.commands.convert.versions import OPTIONS, Read, version_of
from rlhf_cli.config.paths import path_entries, relative, resolve_paths
from rlhf_cli.errors import RLHFError, closest_match, shown

FILE = "ppo.yaml"


def init(file: Path, folder: Path, version: str | None = None) -> None:
    """Write folder/ppo.yaml from TRL's settings in `file`, and say what became of each.

    `version` is "0.11" or "1.12"; None: it is seen by the names. Raises RLHFError C07 for another version, C08, C09 or
    S02 for a file that cannot be read or holds no setting of TRL's PPO, C15 where there is a ppo.yaml, E03 for a folder
    that cannot be written.
    """
    if version is not None and version not in OPTIONS:
        near = closest_match(version, OPTIONS)
        hint = f"did you mean {near}?" if near else "1.12 for all that came after the step API"
        raise RLHFError("C07", f"--trl {version}: not one of {', '.join(OPTIONS)}", hint=hint)
    read = files.read(file)
    if not any(setting.name in options for setting in read.settings for options in OPTIONS.values()):
        hint = "a YAML, a JSON, a script with PPOConfig(...), or a text with the command line"
        raise RLHFError("C09", "nothing here is an option of TRL's PPO", where=str(file), hint=hint)
    target = folder / FILE
    if os.path.lexists(target):
        text = f"{shown(folder)} already holds {FILE}"
        raise RLHFError("C15", text, hint="nothing was written; name another folder")
    seen, why = version_of(read)
    placing = place(read, version or seen)
    _lead_from(folder, placing)
    system.require_writable(folder, hint="name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / f".tmp-{FILE}"
    try:
        scratch.write_text(output.yaml_page(placing, str(file)), encoding="utf-8")
        scratch.rename(target)  # whole or not at all
    finally:
        scratch.unlink(missing_ok=True)
    try:
        config.load("ppo", target)
    except RLHFError:
        target.unlink()
        raise
    terminal.out(f"{shown(file)} is of TRL {placing.version}: {'--trl says so' if version else why}")
    output.show(placing, file.name, target)


def place(read: Read, version: str) -> Placing:
    """The settings of a file in their places, filled up with that TRL's own values; all of it is accepted by a config.

    Raises RLHFError where our settings refuse something that no option is to blame for.
    """
    placing = Placing(version, read)
    for topic in TOPICS:
        topic(placing)
    placing.rest()
    complete(placing)
    return placing


def _lead_from(folder: Path, placing: Placing) -> None:
    """Make paths, which the file has from where TRL was started, lead from `folder`."""
    tree, here = tree_of(placing), os.getcwd()
    resolve_paths(config.PPOConfig, tree, lambda key: here)
    for container, name, key, mark in path_entries(config.PPOConfig, tree):
        if key in placing.placed and placing.placed[key].given:
            value = relative(container[name], mark, Path(os.path.abspath(folder)))
            placing.placed[key] = replace(placing.placed[key], value=value)
