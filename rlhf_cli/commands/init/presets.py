"""Presets of `rlhf init`: a run folder of configs, with generated data if it needs any. Imports no torch."""

import re
import subprocess
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_cli import terminal
from rlhf_cli.commands.init.baselines import write_best_of, write_dpo
from rlhf_cli.commands.init.folder import all_or_nothing, print_ready
from rlhf_cli.config import json_schema
from rlhf_cli.demo import arithmetic, world
from rlhf_cli.distributed import RLHF_COMMAND
from rlhf_cli.errors import RLHFError, did_you_mean, shell_path, shown
from rlhf_cli.runs.layout import configs_folder

COPIED = (".yaml", ".py")
BASE_FOLDER = "base"  # subfolder: a run that trains the base model


@dataclass(frozen=True)
class Preset:
    """A folder of configs/, with the size of its synthetic data, commands to run before `rlhf run`, its base model."""

    description: str
    world_sizes: world.Sizes | None = None
    arithmetic_sizes: arithmetic.Sizes | None = None
    preparation: str = ""
    base_config: Mapping[str, Any] | None = None  # fields of the config of a base model that needs a GPU
    prompt: int = 0  # tokens of the longest prompt that is planned for

    def write_data(self, folder: Path, seed: int) -> None:
        """Write the synthetic data into a folder, if there is any."""
        if self.world_sizes:
            world.write(folder, seed, self.world_sizes)
        if self.arithmetic_sizes:
            arithmetic.write(folder, seed, self.arithmetic_sizes)


def _preset(table: dict[str, Any]) -> Preset:
    """Return the preset of a table of presets.toml."""
    for name, kind in (("world_sizes", world.Sizes), ("arithmetic_sizes", arithmetic.Sizes)):
        if name in table:
            table[name] = kind(**table[name])
    return Preset(**table)


_TABLES = tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8"))
PRESETS = {name: _preset(table) for name, table in _TABLES.items()}


def print_list() -> None:
    """Print the presets: their names with --quiet."""
    descriptions = {name: preset.description for name, preset in PRESETS.items()}
    terminal.table(["preset", "what it is"], [[name, text] for name, text in descriptions.items()])
    terminal.conclude("\n".join(PRESETS), {"presets": descriptions})


def require_known(name: str) -> None:
    """Raise RLHFError C07 for a name that is no preset's."""
    if name not in PRESETS:
        hint = did_you_mean(name, PRESETS) or "rlhf init --list"
        raise RLHFError("C07", f"no preset {name!r}; there are {', '.join(PRESETS)}", hint=hint)


def init(
    name: str,
    folder: Path,
    *,
    seed: int = 0,
    adapters: str | None = None,
    gpu: str | None = None,
    baselines: bool = False,
) -> None:
    """Write preset `name` into `folder`: configs with `seed`, synthetic data, and a trained base model if it has one.

    A preset with a large base model is changed if it does not fit `gpu` (None: the one that is here), with `adapters`.
    With `baselines` there are dpo.yaml and best_of/sft.yaml, too. Configs and data are written completely or not at
    all; identical files are kept, so the command can be repeated. Raises RLHFError C07 for an unknown GPU, C11 for
    options without an effect, C15 if the folder holds different files of the same names, E03 if nothing fits. Exits
    with the code of the base model's run if that fails.
    """
    preset = PRESETS[name]
    if (adapters or gpu) and not preset.base_config:
        text = f"--{'adapters' if adapters else 'gpu'} belongs to presets of a large model, and {name} has none"
        raise RLHFError("C11", text, hint="remove it")

    memory = None
    with all_or_nothing(folder) as scratch:
        stages = _copy_configs(configs_folder() / name, scratch, seed)
        if baselines:  # dpo.yaml is fitted to the GPU, too
            write_dpo(scratch)
            stages |= {"sft", "dpo"}
        json_schema.write_schemas(scratch, sorted(stages))
        preset.write_data(scratch, seed)
        if preset.base_config:
            from rlhf_cli.commands.init.fit_preset import fit_preset  # imports torch

            memory = fit_preset(scratch, preset.base_config, preset.prompt, adapters=adapters, gpu=gpu)
        if baselines:  # with the sizes that fit
            write_best_of(scratch)

    if memory:
        terminal.out(memory)
    if preset.world_sizes and preset.world_sizes.texts:
        _train_base(folder)
    steps = [f"rlhf run {shell_path(folder)}"]
    if preset.preparation:
        steps.insert(0, preset.preparation.format(folder=shell_path(folder)))
    print_ready(folder, *steps)


def _copy_configs(source: Path, folder: Path, seed: int) -> set[str]:
    """Copy the files of a preset, its YAMLs with a seed and a schema; return the stages that have one."""
    files = sorted(path.relative_to(source) for path in source.rglob("*") if path.suffix in COPIED)
    for path in files:
        original = (source / path).read_text(encoding="utf-8")
        text = re.sub(r"^seed: 0\b", f"seed: {seed}", original, flags=re.MULTILINE)
        if path.suffix == ".yaml":
            text = json_schema.with_modeline(text, path, Path(json_schema.FOLDER, f"{path.stem}.json"))
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    return {path.stem for path in files if path.suffix == ".yaml"}


def _train_base(folder: Path) -> None:
    """Train the base model of a preset, in a separate run. Exits with its code if that fails."""
    terminal.say(f"init     {shown(folder)}: training its base model, once")
    command = [*RLHF_COMMAND, "run", str(folder / BASE_FOLDER), *terminal.mode_options()]
    result = subprocess.run(command, stdout=terminal.stdout_of_children(), check=False)
    if result.returncode:
        terminal.error(f"init     not finished; resume with: rlhf run {shell_path(folder / BASE_FOLDER)}")
        raise SystemExit(result.returncode)
