"""Write the folder of a run's next round: `rlhf init next RUN DIR`.

Its reward model and its policy go on from those of the run, on the run's pairs and the new labels; the reference stays
the run's SFT model, and the evaluation compares with the policy before. Nothing of the run is written.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from rlhf_cli import data, terminal
from rlhf_cli.commands.init.folder import all_or_nothing
from rlhf_cli.commands.init.parts import preference_row
from rlhf_cli.config import json_schema
from rlhf_cli.config.base import Config
from rlhf_cli.config.loading import load
from rlhf_cli.config.machinery import yaml_io
from rlhf_cli.config.machinery.fields import with_current_names
from rlhf_cli.config.machinery.paths import path_values, resolve_paths
from rlhf_cli.config.reward import RewardConfig
from rlhf_cli.config.sources import DataSource
from rlhf_cli.data.labels import is_labels_folder
from rlhf_cli.errors import RLHFError, did_you_mean, shell_path, shown
from rlhf_cli.jsonl import write_jsonl
from rlhf_cli.runs.layout import LABELS_FOLDER
from rlhf_cli.runs.parents import open_parent

REQUIRED = ("reward", "ppo")
STAGES = (*REQUIRED, "eval")
PAIRS, EVAL_PAIRS = "data/pairs.jsonl", "data/pairs_eval.jsonl"
FIRST_KEYS = ("seed", "model", "models", "data")  # of a written file
# Options of data that the written pairs no longer need: they have the names and the form of rlhf.
READING = ("columns", "subset", "revision", "max_rows")
COMPARED = "compare"  # labels of held-out prompts: `rlhf label RUN --compare`
HEADER = """# The next round of {run}: written by `rlhf init next` from its {stage}.yaml.

"""
Rows = list[dict[str, Any]]


def init(run: Path, folder: Path, labels: Sequence[str]) -> None:
    """Write the round of `run` into `folder`, with the labels in RUN/labels of these names (none: all).

    Raises RLHFError C07 for unknown labels, C11 for a run without a reward stage, C15 if the folder holds other files,
    D01 without labels, M01 and M10 for unfinished stages, and those of the run's configs and data.
    """
    configs = _load_configs(run)
    for stage in REQUIRED:
        open_parent(str(configs[stage].folder), expect=(stage,), key="RUN", where="")
    names = _label_names(run, labels)
    reward = configs["reward"]
    assert isinstance(reward, RewardConfig)
    old = _read_pairs(replace(reward.sources()["data.train"], share=None))
    new = {name: _read_pairs(DataSource(str(run / LABELS_FOLDER / name))) for name in names}

    with all_or_nothing(folder) as scratch:
        (scratch / "data").mkdir()
        write_jsonl(scratch / PAIRS, _joined(old, new))
        if reward.data.eval is not None:
            write_jsonl(scratch / EVAL_PAIRS, _read_pairs(reward.sources()["data.eval"]))
        for config in configs.values():
            _write_config(config, configs, scratch, folder)
            _copy_code(config, scratch)
        json_schema.write_schemas(scratch, list(configs))

    counts = ", ".join(f"{name} {len(rows)}" for name, rows in new.items())
    terminal.out(f"{shown(folder / PAIRS)}: {len(old)} pairs of {shown(run)}, and new ones of its labels: {counts}")
    terminal.out(f"{shown(folder)} is ready; next: rlhf run {shell_path(folder)}")


def _load_configs(run: Path) -> dict[str, Config]:
    """Return the configs of the run that the round has, too."""
    missing = [stage for stage in REQUIRED if not (run / f"{stage}.yaml").is_file()]
    if missing:
        text = f"{shown(run)} has no {missing[0]}.yaml, and a round trains the reward model and the policy again"
        raise RLHFError("C11", text, hint="name the folder of a run with both, such as one of `rlhf init demo`")
    files = {stage: run / f"{stage}.yaml" for stage in STAGES}
    return {stage: load(stage, file) for stage, file in files.items() if file.is_file()}


# Pairs


def _label_names(run: Path, wanted: Sequence[str]) -> list[str]:
    """Return the names of the labels to train on: the wanted ones, or all but those of held-out prompts."""
    folders = sorted((run / LABELS_FOLDER).glob("*"))
    known = [folder.name for folder in folders if is_labels_folder(folder)]
    for name in wanted:
        if name not in known:
            text = f"--labels {name}: {shown(run)} has labels of {', '.join(known) or 'nobody'}"
            raise RLHFError("C07", text, hint=did_you_mean(name, known) or f"rlhf label {shell_path(run)}")
    names = list(wanted) or [name for name in known if name.partition(".")[0] != COMPARED]
    if not names:
        text = f"{shown(run)} has no labels of its policy's answers, which the next round trains on"
        raise RLHFError("D01", text, hint=f"make some: rlhf label {shell_path(run)}, or with --by JUDGE")
    return names


def _read_pairs(source: DataSource) -> Rows:
    """Return the pairs of a source as rows {prompt, chosen, rejected[, margin]}."""
    pairs = data.preference_pairs(source, reads_system_texts=False).pairs
    return [preference_row(pair) for pair in pairs]


def _joined(old: Rows, new: Mapping[str, Rows]) -> Rows:
    """Return the old pairs and the new ones; margins, which labels do not have, are left out and said."""
    if any("margin" in row for row in old):
        terminal.say("init     the margins of the old pairs are left out: the new ones have none")
        old = [{name: value for name, value in row.items() if name != "margin"} for row in old]
    return [*old, *(row for rows in new.values() for row in rows)]


# Configs


def _write_config(config: Config, configs: Mapping[str, Config], scratch: Path, folder: Path) -> None:
    """Write a config of the run for the round."""
    tree = _moved_tree(config, configs, folder)
    before = {stage: os.path.relpath(configs[stage].folder, folder) for stage in REQUIRED}
    if config.stage == "reward":
        tree["model"] = {**tree["model"], "start": before["reward"]}
        tree["data"] = _data_of_round(tree["data"])
    elif config.stage == "ppo":
        first = {"sft": tree["models"]["sft"], "policy": before["ppo"]}
        tree["models"] = {**first, **tree["models"], **first}
    else:
        tree["models"]["previous"] = before["ppo"]

    file = scratch / f"{config.stage}.yaml"
    header = HEADER.format(run=os.path.relpath(config.file.parent, folder), stage=config.stage)
    text = header + yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    schema = Path(json_schema.FOLDER, f"{config.stage}.json")
    file.write_text(json_schema.with_modeline(text, Path(file.name), schema), encoding="utf-8")


def _moved_tree(config: Config, configs: Mapping[str, Config], folder: Path) -> dict[str, Any]:
    """Return the written keys of a config with paths relative to `folder`.

    What names the run's own reward model or policy names the round's.
    """
    tree: dict[str, Any] = with_current_names(yaml_io.read(config.file).tree)
    resolve_paths(type(config), tree, lambda key: str(config.file.parent))
    own = {str(configs[stage].folder): f"RUN/{stage}" for stage in REQUIRED}
    for value in list(path_values(type(config), tree)):
        value.replace(own.get(value.text) or value.relative_to(folder))

    for name in ("run", "stage"):
        tree.pop(name, None)
    tree.get("output", {}).pop("run_name", None)
    first = [name for name in FIRST_KEYS if name in tree]
    return {name: tree[name] for name in [*first, *tree] if tree[name] != {}}


def _data_of_round(section: dict[str, Any]) -> dict[str, Any]:
    """Return the section `data` of reward.yaml for the pairs that were written."""
    kept = {name: value for name, value in section.items() if name not in READING}
    if kept.get("format") == "transcripts":  # they are conversations now
        del kept["format"]
    kept["train"] = PAIRS
    if kept.get("eval") is not None:
        kept["eval"] = EVAL_PAIRS
    return kept


def _copy_code(config: Config, scratch: Path) -> None:
    """Copy the Python files beside the run's configs, where reward functions and judges are imported from."""
    home = config.file.parent
    named = [file for file in config.code().values() if file.is_relative_to(home)]
    for file in {*named, *home.glob("*.py")}:
        target = scratch / file.relative_to(home)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
