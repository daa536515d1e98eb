"""Load the configs of a run folder: find them, select stages, and give each stage its overrides."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

from rlhf_cli.config.base import Config
from rlhf_cli.config.loading import accepts_key, check_override, keys, load
from rlhf_cli.config.stages import CONFIGS
from rlhf_cli.errors import Problem, RLHFError, closest_match, closest_path, did_you_mean, shell_path, shown
from rlhf_cli.runs.layout import STAGES, configs_in, seed_of


def find_configs(folder: Path) -> dict[str, Path]:
    """Return the configs of a run folder by stage, in the order of the chain. Raises C09 if there are none."""
    if os.path.isfile(folder):
        stage = folder.stem if folder.stem in STAGES else "sft"
        hint = f"for one stage: rlhf {stage} --config {shell_path(folder)}"
        raise RLHFError("C09", f"{shown(folder)} is a file, not the folder of a run", hint=hint)

    if not os.path.isdir(folder):
        near = closest_path(folder, is_candidate=os.path.isdir)
        hint = f"did you mean {near}?" if near else f"rlhf init demo {shell_path(folder)} makes one"
        raise RLHFError("C09", f"no such folder: {shown(folder)}", hint=hint)

    files = {path.stem: path for path in configs_in(folder)}
    if not files and (seed := seed_of(folder)):
        study, _ = seed
        text = f"{shown(folder)} is the run of a seed: its configs are those of {shown(study)}"
        raise RLHFError("C09", text, hint=run_command(folder))
    if not files:
        names = ", ".join(f"{stage}.yaml" for stage in STAGES)
        raise RLHFError("C09", f"{shown(folder)} holds none of {names}", hint="rlhf init --list shows ready ones")
    return files


def run_command(folder: Path) -> str:
    """Return the command that runs a folder, which may be that of a seed."""
    if seed := seed_of(folder):
        study, number = seed
        return f"rlhf run {shell_path(study)} --seeds {number}"
    return f"rlhf run {shell_path(folder)}"


def add_seed(routed: Mapping[str, list[str]], run: Path, seed: int) -> None:
    """Add the overrides of a seed's run: its folder, and the seed of the stages that train."""
    place = f"run={json.dumps(str(run))}"
    for stage, assignments in routed.items():
        assignments += [place] if stage == "eval" else [place, f"seed={seed}"]


def select_stages(
    files: Mapping[str, Path], folder: Path, *, only: Sequence[str], start: str | None, force: Sequence[str]
) -> dict[str, Path]:
    """Return the configs that the options --only, --from (`start`) and --force select, by stage.

    Raises C07 for an unknown stage, C09 for a stage without a config, C17 for options that contradict each other.
    """
    for stage in only:
        _require_config("--only", stage, files, folder)
    for stage in force:
        _require_config("--force", stage, files, folder)
    if start:
        _require_config("--from", start, files, folder)
    if only and start:
        raise RLHFError("C17", "--only and --from contradict each other", hint="give one of the two")

    names = only or STAGES
    if start:
        names = STAGES[STAGES.index(start) :]
    selected = {stage: path for stage, path in files.items() if stage in names}
    excluded = [stage for stage in force if stage not in selected]
    if excluded:
        text = f"--force {excluded[0]} names a stage that --only or --from leaves out"
        raise RLHFError("C17", text, hint=f"{', '.join(selected)} would run")
    return selected


def _require_config(option: str, stage: str, files: Mapping[str, Path], folder: Path) -> None:
    """Raise RLHFError C07 or C09 unless an option names a stage that has a config."""
    if stage not in STAGES:
        text = f"{option} {stage}: not one of {', '.join(STAGES)}"
        raise RLHFError("C07", text, hint=did_you_mean(stage, STAGES))

    if stage not in files:
        names = ", ".join(path.name for path in files.values())
        text = f"{option} {stage}: {shown(folder)} has no {stage}.yaml"
        raise RLHFError("C09", text, hint=f"it holds {names}")


def route_overrides(overrides: Sequence[str], stages: Sequence[str]) -> dict[str, list[str]]:
    """Assign each `--set` to the stage that has the key, else its section; with a leading `*.` to all that do.

    `ppo:KEY=VALUE` is for that stage. Raises C11 for text that is not KEY=VALUE, an unknown section, a key of several
    stages without `*.`, and a stage that does not run here.
    """
    routed: dict[str, list[str]] = {stage: [] for stage in stages}
    problems = []
    for text in overrides:
        problem = check_override(text)
        if problem:
            problems.append(problem)
            continue

        key = text.partition("=")[0].strip()
        stage, colon, _ = key.partition(":")
        if colon and stage in routed:
            routed[stage].append(text.strip().removeprefix(f"{stage}:"))
            continue
        if colon:
            problems.append(_unknown_stage_problem(stage, key, stages))
            continue

        owners = _owners_of(key, stages)
        for stage in owners:
            routed[stage].append(text)
        if len(owners) > 1 and not key.startswith("*."):
            problems.append(_ambiguous_key_problem(key, text, owners))
        elif not owners:
            problems.append(_unknown_key_problem(key, stages))
    if problems:
        raise RLHFError.from_problems(problems)
    return routed


def _section_of(key: str) -> str:
    return key.removeprefix("*.").partition(".")[0]


def _owners_of(key: str, stages: Sequence[str]) -> list[str]:
    """Return the stages that have the key, or else those that have its section."""
    have_section = [stage for stage in stages if _section_of(key) in CONFIGS[stage].model_fields]
    have_key = [stage for stage in have_section if accepts_key(stage, key)]
    return have_key or have_section


def _ambiguous_key_problem(key: str, text: str, owners: Sequence[str]) -> Problem:
    files = ", ".join(f"{stage}.yaml" for stage in owners)
    hint = f"-s '*.{text}' sets it in all of them, -s '{owners[0]}:{text}' in one"
    return Problem("C11", f"{_section_of(key)} is in {files}", f"--set {key}", hint)


def _unknown_stage_problem(stage: str, key: str, stages: Sequence[str]) -> Problem:
    text = f"{stage}: not one of the stages that run here ({', '.join(stages)})"
    return Problem("C11", text, f"--set {key}", did_you_mean(stage, stages))


def _unknown_key_problem(key: str, stages: Sequence[str]) -> Problem:
    section = _section_of(key)
    text = f"no stage that runs here ({', '.join(stages)}) has a section {section}"
    near = _similar_key(key, stages)
    return Problem("C11", text, f"--set {key}", f"did you mean {near}?" if near else None)


def _similar_key(key: str, stages: Sequence[str]) -> str | None:
    """Return a key of a stage that ends in this one, or else the section with the closest name."""
    for path in chain.from_iterable(keys(stage) for stage in stages):
        if path.endswith(f".{key}"):
            return path

    sections = chain.from_iterable(CONFIGS[stage].model_fields for stage in stages)
    return closest_match(_section_of(key), sorted(sections))


def load_valid(
    files: Iterable[Path], routed: Mapping[str, Sequence[str]]
) -> tuple[dict[str, Config], dict[Problem, None]]:
    """Return the valid configs by stage, and the problems of the others as an ordered set."""
    configs: dict[str, Config] = {}
    problems: dict[Problem, None] = {}
    for path in files:
        try:
            configs[path.stem] = load(path.stem, path, routed.get(path.stem, ()))
        except RLHFError as error:
            problems |= dict.fromkeys(error.problems)
    return configs, problems


def load_all(files: Mapping[str, Path], routed: Mapping[str, Sequence[str]]) -> dict[str, Config]:
    """Load the configs of a run by stage. Raises RLHFError with the problems of all of them."""
    configs, problems = load_valid(files.values(), routed)
    if problems:
        raise RLHFError.from_problems(list(problems))
    return configs
