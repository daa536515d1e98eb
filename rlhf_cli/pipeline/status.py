"""Runs and what `rlhf run` would do next, for `rlhf status` and `rlhf ls`. Reads few files and takes no lock."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Literal

from rlhf_cli import runs
from rlhf_cli.config.base import Config
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.errors import Problem, RLHFError, read_error, shown
from rlhf_cli.evaluation.requirements import check_requirements
from rlhf_cli.pipeline.decide import StageDecision, check_inputs_exist, plan_stages
from rlhf_cli.pipeline.load import add_seed, find_configs, load_valid, route_overrides
from rlhf_cli.runs.identity import StageStatus
from rlhf_cli.runs.layout import STAGES, configs_in, find_run_folders, has_output, is_preset, seed_of
from rlhf_cli.runs.progress import read_stage_at_work
from rlhf_cli.runs.read import Run, Stage, root_of
from rlhf_cli.runs.report import read_report

MAX_DEPTH = 4  # levels of folders to search for runs
Statuses = Mapping[str, StageStatus | RLHFError]  # by stage; or the error with which it would fail


@dataclass(frozen=True)
class NextAction:
    """Action of `rlhf run` on the run as it is."""

    action: Literal["run", "wait", "nothing", "refused"]  # wait: a stage is running
    decisions: Mapping[str, StageDecision] = field(default_factory=dict)  # by stage
    problems: tuple[Problem, ...] = ()  # with which it would fail; of `nothing`, what does not meet `eval.require`


def read_run_and_next(folder: Path, overrides: Sequence[str] = ()) -> tuple[Run, NextAction]:
    """Read a run, or the run of a stage's folder, with its configs, and what `rlhf run` would do with it.

    Raises RLHFError C09 if the folder is not a run, C11 for overrides that belong to no stage.
    """
    root = root_of(folder)
    started = [stage for stage in STAGES if has_output(root / stage)]
    files: dict[str, Path] = {}
    problems: list[Problem] = []
    seed = seed_of(root)
    try:
        files = find_configs(seed[0] if seed else root)
    except RLHFError as error:
        if not started:
            raise
        problems += error.problems
    routed = route_overrides(overrides, list(files))
    if seed:
        add_seed(routed, root, seed[1])
    configs, invalid = load_valid(files.values(), routed)
    problems += invalid

    statuses = {stage: _status(config) for stage, config in configs.items()}
    stages = {}
    for stage in STAGES:
        if stage in files or stage in started:
            stage_folder = configs[stage].folder if stage in configs else root / stage
            status = statuses.get(stage)
            known = status if isinstance(status, StageStatus) else None
            stages[stage] = read_stage_at_work(stage, stage_folder, known)

    run = Run(root.name, root, stages, bases=_unfinished(_bases(root, configs.values())))
    if any(stage.process for stage in run.all_stages.values()):
        return run, NextAction("wait", problems=tuple(problems))
    return run, _next_action(configs, statuses, problems)


def _bases(root: Path, configs: Iterable[Config]) -> list[Path]:
    """Return the stage folders of other runs inside this one that its configs start from, or train as members."""
    run_folder = Path(os.path.abspath(root))
    bases: dict[Path, None] = {}
    for config in configs:
        names = [reference.path for reference in runs.references(config)]
        for name in [*names, *(str(member.folder) for member in config.other_members)]:
            path = config.file.parent / name  # one that does not exist is relative: it may be a hub id
            is_inside = path.name in STAGES and run_folder in path.parent.parents
            if is_inside and (has_output(path) or configs_in(path.parent)):
                bases[path] = None
    return list(bases)


def _unfinished(folders: Iterable[Path]) -> tuple[Stage, ...]:
    stages = [read_stage_at_work(folder.name, folder) for folder in folders]
    return tuple(stage for stage in stages if stage.condition != "finished")


def _status(config: Config) -> StageStatus | RLHFError:
    try:
        return runs.quick_stage_status(config)
    except RLHFError as error:
        return error
    except OSError as error:  # cannot be read, or was deleted at this moment
        return read_error(error, config.folder)


def _next_action(configs: Mapping[str, Config], statuses: Statuses, problems: Sequence[Problem]) -> NextAction:
    def get_status(config: Config) -> StageStatus:
        status = statuses[config.stage]
        if isinstance(status, RLHFError):
            raise status
        return status

    try:
        if problems:
            raise RLHFError.from_problems(problems)
        check_inputs_exist(configs, quick=True)
        decisions = plan_stages(configs, get_status=get_status)
    except RLHFError as error:
        return NextAction("refused", problems=error.problems)

    if any(decision.runs or decision.after for decision in decisions.values()):
        return NextAction("run", decisions)
    try:
        evaluation = configs.get("eval")
        if isinstance(evaluation, EvalConfig):
            report = read_report(evaluation.folder)
            check_requirements(report, evaluation.eval.require, where=evaluation.where)
    except RLHFError as error:
        return NextAction("nothing", decisions, error.problems)
    return NextAction("nothing", decisions)


def find_runs(folders: Sequence[Path], max_folders: int | None = None) -> list[Run]:
    """Find the runs at or below folders, newest first, searching at most `max_folders`; configs are not checked.

    A run inside another that starts from it is part of that run. A preset counts once a stage has written into it.
    Raises RLHFError C09 if a folder does not exist.
    """
    for folder in folders:
        if not os.path.isdir(folder):
            raise RLHFError("C09", f"no such folder: {shown(folder)}")

    paths = chain.from_iterable(find_run_folders(folder, MAX_DEPTH, max_folders) for folder in folders)
    run_paths = dict.fromkeys(Path(os.path.abspath(path)) for path in paths)
    outer = run_paths.keys() & set(chain.from_iterable(path.parents for path in run_paths))
    bases = {path: _bases(path, _valid_configs(path)) for path in outer}
    inner_runs = {base.parent for base in chain.from_iterable(bases.values())}

    found = []
    for path in run_paths:
        stages = {name: read_stage_at_work(name, path / name) for name in STAGES if has_output(path / name)}
        if path not in inner_runs and (stages or not is_preset(path)):
            found.append(Run(path.name, path, stages, bases=_unfinished(bases.get(path, ()))))
    return sorted(found, key=lambda run: -run.changed)


def _valid_configs(folder: Path) -> list[Config]:
    configs, _ = load_valid(configs_in(folder), {})
    return list(configs.values())
