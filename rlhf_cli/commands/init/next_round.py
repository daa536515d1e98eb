"""Write the folder of a run's next round: `rlhf init next RUN DIR`.

Its reward model and its policy start from those of the run, on the run's pairs and the new labels; the reference stays
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
from rlhf_cli.commands.init.pairs import as_conversation
from rlhf_cli.commands.init.parts import preference_row
from rlhf_cli.config import json_schema
from rlhf_cli.config.base import Config
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.loading import load
from rlhf_cli.config.machinery import yaml_io
from rlhf_cli.config.machinery.fields import with_current_names
from rlhf_cli.config.machinery.paths import path_values, resolve_paths
from rlhf_cli.config.reward import RewardConfig
from rlhf_cli.config.sources import DataSource
from rlhf_cli.data.labels import is_labels_folder
from rlhf_cli.data.texts import Pair
from rlhf_cli.errors import RLHFError, did_you_mean, shell_path, shown
from rlhf_cli.jsonl import write_jsonl
from rlhf_cli.models.tokenizers import load_tokenizer
from rlhf_cli.runs.layout import LABELS_FOLDER
from rlhf_cli.runs.parents import open_parent
from rlhf_cli.runs.resolve import open_reference, references

REQUIRED = ("reward", "ppo")
STAGES = (*REQUIRED, "eval")
PAIRS, EVAL_PAIRS = "data/pairs.jsonl", "data/pairs_eval.jsonl"
FIRST_KEYS = ("seed", "model", "models", "data")  # of a written file
# Options of data that the written pairs no longer need: they have the names and the form of rlhf.
READING = ("columns", "subset", "revision", "max_rows")
COMPARED = "compare"  # labels of held-out prompts: `rlhf label RUN --compare`
HEADER = """# The next round of {run}: written by `rlhf init next` from its {stage}.yaml.

"""
TRAIN, EVAL = "data.train", "data.eval"


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
    pairs = _read_pairs(run, reward, names)

    with all_or_nothing(folder) as scratch:
        (scratch / "data").mkdir()
        write_jsonl(scratch / PAIRS, _training_rows(pairs))
        if EVAL in pairs:
            write_jsonl(scratch / EVAL_PAIRS, map(preference_row, pairs[EVAL]))
        for config in configs.values():
            _write_config(config, configs, scratch, folder)
            _copy_code(config, scratch)
        json_schema.write_schemas(scratch, list(configs))

    counts = ", ".join(f"{name} {len(pairs[name])}" for name in names)
    old = f"{len(pairs[TRAIN])} pairs of {shown(run)}"
    terminal.out(f"{shown(folder / PAIRS)}: {old}, and new ones of its labels: {counts}")
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


def _read_pairs(run: Path, reward: RewardConfig, labels: Sequence[str]) -> dict[str, list[Pair]]:
    """Return the pairs of the run's reward model by config key, and those of the labels by their name.

    All have one form: conversations if some are and the model has a chat template, else texts.
    """
    sources = {key: replace(source, share=None) for key, source in reward.sources().items() if key == TRAIN}
    if reward.data.eval is not None:
        sources[EVAL] = reward.sources()[EVAL]
    for name in labels:
        sources[name] = DataSource(str(run / LABELS_FOLDER / name), format=reward.data.format)
    pairs = {key: data.preference_pairs(source, reads_system_texts=False).pairs for key, source in sources.items()}

    are_texts = [isinstance(pair.prompt, str) for each in pairs.values() for pair in each]
    if all(are_texts):
        return pairs
    parent = open_reference(reward, references(reward)[0])
    has_template = bool(load_tokenizer(parent.model).chat_template)
    return {key: [_in_form(pair, has_template=has_template) for pair in each] for key, each in pairs.items()}


def _in_form(pair: Pair, *, has_template: bool) -> Pair:
    """Return a pair as a conversation for a chat template, else as texts."""
    is_text = isinstance(pair.prompt, str)
    if is_text != has_template:
        return pair
    return as_conversation(pair) if is_text else pair.as_text()


def _training_rows(pairs: Mapping[str, list[Pair]]) -> list[dict[str, Any]]:
    """Return the old pairs, and the new ones behind them; margins, which labels do not have, are omitted."""
    if any(pair.margin is not None for pair in pairs[TRAIN]):
        terminal.say("init     the margins of the old pairs are omitted: the new ones have none")
    joined = [pair for key, each in pairs.items() if key != EVAL for pair in each]
    return [preference_row(replace(pair, margin=None)) for pair in joined]


# Configs


def _write_config(config: Config, configs: Mapping[str, Config], scratch: Path, folder: Path) -> None:
    """Write a config of the run for the round."""
    tree = _moved_tree(config, configs, folder)
    before = {stage: os.path.relpath(configs[stage].folder, folder) for stage in REQUIRED}
    if config.stage == "reward":
        first = {"path": tree["model"]["path"], "start": before["reward"]}
        tree["model"] = {**first, **tree["model"], **first}
        tree["data"] = _data_of_round(tree["data"])
    elif config.stage == "ppo":
        first = {"sft": tree["models"]["sft"], "policy": before["ppo"]}
        tree["models"] = {**first, **tree["models"], **first}
    else:
        assert isinstance(config, EvalConfig)
        tree["models"]["previous"] = before["ppo"]
        for name in config.people_judges:  # their labels are of the run's models
            del tree["judges"][name]
            for key in [key for key in config.eval.require if key.startswith(f"win_rate.ppo_vs_sft.{name}.")]:
                del tree["eval"]["require"][key]
            terminal.say(f"init     judges.{name} is omitted: it is labels of other models than the next round's")

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
