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
from rlhf_cli.commands.init.folder import all_or_nothing, print_ready
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
from rlhf_cli.data import mixing
from rlhf_cli.data.labels import are_of_held_out_prompts, is_labels_folder
from rlhf_cli.data.texts import Pair
from rlhf_cli.errors import RLHFError, did_you_mean, shell_path, shown
from rlhf_cli.jsonl import write_jsonl
from rlhf_cli.models.tokenizers import load_tokenizer
from rlhf_cli.runs.layout import LABELS_FOLDER
from rlhf_cli.runs.parents import open_parent
from rlhf_cli.runs.resolve import open_reference, references
from rlhf_cli.trees import Tree

REQUIRED = ("reward", "ppo")
STAGES = (*REQUIRED, "eval")
# Section and key of a stage's config that name the run's own model, and the stage of that.
PREVIOUS = {
    "reward": ("model", "start", "reward"),
    "ppo": ("models", "policy", "ppo"),
    "eval": ("models", "previous", "ppo"),
}
PAIRS, EVAL_PAIRS = "data/pairs.jsonl", "data/pairs_eval.jsonl"
FIRST_KEYS = ("seed", "model", "models", "data")  # of a written file
# Options of data that the written pairs no longer need: they have the names and the form of rlhf.
READING = ("columns", "subset", "revision", "max_rows")
HEADER = """# The next round of {run}: written by `rlhf init next` from its {stage}.yaml.

"""
TRAIN, EVAL = "data.train", "data.eval"


def init(run: Path, folder: Path, labels: Sequence[str]) -> None:
    """Write the round of `run` into `folder`, with the labels in RUN/labels of these names (none: all).

    Raises RLHFError C07 for unknown labels, C11 for a run without a reward stage, C15 if the folder holds other files,
    C17 for labels of held-out prompts, D01 without labels, M01 and M10 for unfinished stages, and those of the run's
    configs and data.
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

    counts = ", ".join(f"{name} {len(pairs[_key(name)])}" for name in names)
    old = f"{len(pairs[TRAIN])} pairs of {shown(run)}"
    terminal.out(f"{shown(folder / PAIRS)}: {old}, and new ones of its labels: {counts}")
    print_ready(folder, f"rlhf run {shell_path(folder)}")


def _load_configs(run: Path) -> dict[str, Config]:
    """Return the configs of the run that the round has, too."""
    missing = [stage for stage in REQUIRED if not (run / f"{stage}.yaml").is_file()]
    if missing:
        text = f"{shown(run)} has no {missing[0]}.yaml, and a round trains the reward model and the policy again"
        raise RLHFError("C11", text, hint="name the folder of a run with both, such as one of `rlhf init demo`")

    configs = {}
    for stage in STAGES:
        file = run / f"{stage}.yaml"
        if file.is_file():
            configs[stage] = _as_run(load(stage, file))
    return configs


def _as_run(written: Config) -> Config:
    """Return a config with the values that its stage was run with, which `--set` may have changed."""
    resolved = written.folder / "config.yaml"
    if not resolved.is_file():
        return written
    config = load(written.stage, resolved)
    config._origin = written._origin
    return config


# Pairs


def _label_names(run: Path, wanted: Sequence[str]) -> list[str]:
    """Return the names of the labels to train on: the wanted ones, or all but those of held-out prompts."""
    folders = sorted((run / LABELS_FOLDER).glob("*"))
    known = [folder.name for folder in folders if is_labels_folder(folder)]
    held_out = [folder.name for folder in folders if are_of_held_out_prompts(folder)]
    for name in wanted:
        if name not in known:
            text = f"--labels {name}: {shown(run)} has labels of {', '.join(known) or 'nobody'}"
            raise RLHFError("C07", text, hint=did_you_mean(name, known) or f"rlhf label {shell_path(run)}")
        if name in held_out:
            text = f"--labels {name}: {shown(run / LABELS_FOLDER / name)} holds labels of the evaluation's prompts"
            raise RLHFError("C17", text, hint="name labels that were made without --compare")

    usable = [name for name in known if name not in held_out]
    names = list(dict.fromkeys(wanted)) or usable
    if not names:
        text = f"{shown(run)} has no labels of its policy's answers, which the next round trains on"
        raise RLHFError("D01", text, hint=f"make some: rlhf label {shell_path(run)}, or with --by JUDGE")
    return names


def _key(name: str) -> str:
    """Return labels' name as a key beside those of the config, which it may be equal to."""
    return f"{LABELS_FOLDER}/{name}"


def _read_pairs(run: Path, reward: RewardConfig, labels: Sequence[str]) -> dict[str, list[Pair]]:
    """Return the pairs of the run's reward model by config key, and those of the labels by `_key`.

    All have one form: conversations if some are and the model has a chat template, else texts.
    """
    sources = {TRAIN: reward.sources()[TRAIN]}
    if reward.data.eval is not None:
        sources[EVAL] = reward.sources()[EVAL]
    for name in labels:
        sources[_key(name)] = DataSource(str(run / LABELS_FOLDER / name), format=reward.data.format)
    pairs = {key: _pairs_of(source) for key, source in sources.items()}

    are_texts = [isinstance(pair.prompt, str) for each in pairs.values() for pair in each]
    if all(are_texts):
        return pairs
    parent = open_reference(reward, references(reward)[0])
    has_template = bool(load_tokenizer(parent.model).chat_template)
    return {key: [_in_form(pair, has_template=has_template) for pair in each] for key, each in pairs.items()}


def _pairs_of(source: DataSource) -> list[Pair]:
    """Return all pairs of a source, or those of each source of a list as often as its weight says."""
    pairs = []
    for number, part in enumerate(source.each()):
        read = data.preference_pairs(replace(part, share=None), reads_system_texts=False)
        pairs += mixing.drawn(read.pairs, part, mixing.seed_of(source, number))
    return pairs


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
    rows = []
    for key, each in pairs.items():
        if key != EVAL:
            rows += [preference_row(replace(pair, margin=None)) for pair in each]
    return rows


# Configs


def _write_config(config: Config, configs: Mapping[str, Config], scratch: Path, folder: Path) -> None:
    """Write a config of the run for the round."""
    tree = _moved_tree(config, configs, folder)
    if isinstance(config, RewardConfig):
        tree["data"] = _data_of_round(tree["data"])
    if isinstance(config, EvalConfig):
        _drop_people(config, tree)

    file = scratch / f"{config.stage}.yaml"
    header = HEADER.format(run=os.path.relpath(config.file.parent, folder), stage=config.stage)
    text = header + yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    schema = Path(json_schema.FOLDER, f"{config.stage}.json")
    file.write_text(json_schema.with_modeline(text, Path(file.name), schema), encoding="utf-8")


def _drop_people(config: EvalConfig, tree: Tree) -> None:
    """Remove the judges that are labels of the run's own answers, and what is required of them."""
    for name in config.people_judges:
        del tree["judges"][name]
        required = tree.get("eval", {}).get("require", {})
        for key in [key for key in required if name in key.split(".")]:
            del required[key]
        text = "its labels are of answers of the run, not of the round"
        terminal.out(f"{config.file.name}: judges.{name} is omitted, and what is required of it: {text}")


def _moved_tree(config: Config, configs: Mapping[str, Config], folder: Path) -> Tree:
    """Return the written keys of a config, and the one of PREVIOUS, with paths relative to `folder`.

    What names the run's own reward model or policy names the round's.
    """
    tree = with_current_names(yaml_io.read(config.file).tree)
    resolve_paths(type(config), tree, lambda key: str(config.file.parent))
    changed = _take_over(tree, load(config.stage, config.file).dump(), config.dump())
    if changed:
        text = f"as the stage was run, not as {shown(config.file)} says: {', '.join(changed)}"
        terminal.out(f"{shown(folder / config.file.name)}: {text}")

    own = {str(configs[stage].folder): f"RUN/{stage}" for stage in REQUIRED}
    for value in list(path_values(type(config), tree)):
        value.replace(own.get(value.text, value.text))
    section, key, stage = PREVIOUS[config.stage]
    if not (isinstance(config, RewardConfig) and config.reward.ensemble):  # members start from new heads
        tree[section][key] = str(configs[stage].folder)
    for value in list(path_values(type(config), tree)):
        value.replace(value.relative_to(folder))

    for name in ("run", "stage"):
        tree.pop(name, None)
    tree.get("output", {}).pop("run_name", None)
    first = [name for name in FIRST_KEYS if name in tree]
    return {name: tree[name] for name in [*first, *tree] if tree[name] != {}}


def _take_over(tree: Tree, written: Tree, ran: Tree, prefix: str = "") -> list[str]:
    """Set in `tree` the values of `ran` that differ from `written`; return their keys."""
    removed = [name for name in written if name not in ran]  # entries of a table
    for name in removed:
        tree.pop(name, None)

    changed = [f"{prefix}{name}" for name in removed]
    for name, value in ran.items():
        before = written.get(name)
        if value == before:
            continue
        if isinstance(value, dict) and isinstance(before, dict):
            section = tree.get(name) or {}
            changed += _take_over(section, before, value, f"{prefix}{name}.")
            tree[name] = section
        else:
            tree[name] = value
            changed.append(f"{prefix}{name}")
    return changed


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
    files = set(home.glob("*.py"))
    for file in config.code().values():
        if file.is_relative_to(home):
            package = home / file.relative_to(home).parts[0]
            files |= {file, *package.rglob("*.py")}

    for file in files:
        target = scratch / file.relative_to(home)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
