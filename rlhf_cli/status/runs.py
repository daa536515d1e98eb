"""A run: its stages, and what `rlhf run` would do next; and the runs that lie below a folder."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rlhf_cli import checkpoints, pipeline, room
from rlhf_cli.checkpoints import Status
from rlhf_cli.config import Config, EvalConfig, load
from rlhf_cli.errors import Problem, RLHFError, reading, unreadable
from rlhf_cli.evaluation import render
from rlhf_cli.pipeline import STAGES, Step
from rlhf_cli.run_folders import below, configs_in, is_begun, is_preset
from rlhf_cli.status.stages import Stage, read_stage

DEPTH = 4  # folders below the one that is named


@dataclass(frozen=True)
class Next:
    """What `rlhf run` would do about the run as it is: `steps` by stage, or `problems` over which it would refuse.

    `wait`: a stage is being written. `nothing` has problems where what `eval.require` asks for does not hold.
    """

    action: Literal["run", "wait", "nothing", "refused"]
    steps: Mapping[str, Step] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True)
class Run:
    """A run's folder; `next` is None where only its files were looked at."""

    folder: Path
    stages: tuple[Stage, ...]
    bases: tuple[Stage, ...]  # unfinished stages of runs inside of this one that it starts from: base/sft of the demo
    next: Next | None = None

    @property
    def all_stages(self) -> tuple[Stage, ...]:
        """Those of its bases first."""
        return (*self.bases, *self.stages)

    @property
    def bytes(self) -> int:
        """Of the whole folder, data and what was moved aside among it."""
        return room.used(self.folder)

    @property
    def old_bytes(self) -> int:
        """Of what was moved aside, in .old/."""
        return room.used(self.folder / ".old")

    @property
    def changed(self) -> float:
        """When a stage last wrote; of a run that has none, its newest config."""
        times = [stage.changed for stage in self.all_stages if stage.changed is not None]
        files = [path.stat().st_mtime for path in configs_in(self.folder)]
        return max(times or files, default=0.0)


def read_run(folder: Path, overrides: Sequence[str] = ()) -> Run:
    """A run with all that its configs tell; of a stage's folder, the run that it belongs to. Changes nothing.

    Raises RLHFError C09 for a folder that is no run, C11 for overrides that no stage could mean.
    """
    root = folder.parent if folder.name in STAGES and is_begun(folder) else folder
    begun = [stage for stage in STAGES if is_begun(root / stage)]
    configs: dict[str, Config] = {}
    problems: list[Problem] = []
    try:
        files = pipeline.find_configs(root)
    except RLHFError as error:
        if not begun:
            raise
        files, problems = {}, [*error.problems]
    routed = pipeline.route(overrides, list(files))
    for stage, path in files.items():
        try:
            configs |= pipeline.load_all({stage: path}, routed)
        except RLHFError as error:
            problems += error.problems
    looked = {stage: _look(config) for stage, config in configs.items()}
    bases = _unfinished(_bases(root, configs.values()))
    stages = []
    for stage in STAGES:
        if stage in files or stage in begun:
            place = configs[stage].folder if stage in configs else root / stage
            found = looked.get(stage)
            stages.append(read_stage(stage, place, found if isinstance(found, Status) else None))
    return Run(root, tuple(stages), bases, _next(configs, looked, problems, [*bases, *stages]))


def _bases(root: Path, configs: Iterable[Config]) -> list[Path]:
    """The folders of stages of other runs, inside of this one, that its configs start from."""
    here = Path(os.path.abspath(root))
    # What is not there yet may be a hub id, and stands as it was written.
    named = [config.file.parent / one.path for config in configs for one in checkpoints.references(config)]
    inside = [path for path in named if path.name in STAGES and here in path.parent.parents]
    return [path for path in dict.fromkeys(inside) if is_begun(path) or configs_in(path.parent)]


def _unfinished(folders: Iterable[Path]) -> tuple[Stage, ...]:
    found = [read_stage(folder.name, folder) for folder in folders]
    return tuple(stage for stage in found if stage.state != "finished")


def _look(config: Config) -> Status | RLHFError:
    try:
        with reading(config.folder):
            return checkpoints.glance(config)
    except RLHFError as error:
        return error
    except OSError as error:  # gone at this very moment
        return unreadable(error, config.folder)


def _next(
    configs: Mapping[str, Config],
    looked: Mapping[str, Status | RLHFError],
    problems: Sequence[Problem],
    stages: Sequence[Stage],
) -> Next:
    def look(config: Config) -> Status:
        found = looked[config.stage]
        if isinstance(found, RLHFError):
            raise found
        return found

    if any(stage.process for stage in stages):
        return Next("wait", problems=tuple(problems))
    try:
        if problems:
            raise RLHFError.of(problems)
        pipeline.refuse_what_is_missing(configs, quick=True)
        steps = pipeline.forecast(configs, look=look)
    except RLHFError as error:
        return Next("refused", problems=error.problems)
    if any(step.runs or step.after for step in steps.values()):
        return Next("run", steps)
    return Next("nothing", steps, _not_met(configs.get("eval")))


def _not_met(config: Config | None) -> tuple[Problem, ...]:
    """What `eval.require` asks for and a finished evaluation does not hold: `rlhf run` ends with it."""
    try:
        if isinstance(config, EvalConfig):
            report = render.read_report(config.folder)
            render.check_requirements(report, config.eval.require, where=config.where)
    except RLHFError as error:
        return error.problems
    return ()


def find_runs(folders: Sequence[Path], most: int | None = None) -> list[Run]:
    """The runs at or below folders by their files alone, newest first; `most`: see `below`.

    One inside of another that starts from it belongs to that; a preset is none until a stage wrote into it.
    Raises RLHFError C09 for what is no folder.
    """
    for folder in folders:
        if not os.path.isdir(folder):
            raise RLHFError("C09", f"no such folder: {checkpoints.shown(folder)}")
    found = dict.fromkeys(Path(os.path.abspath(path)) for folder in folders for path in below(folder, DEPTH, most))
    outer = {path for inner in found for path in inner.parents if path in found}
    bases = {path: _bases(path, _readable(path)) for path in outer}
    owned = {base.parent for named in bases.values() for base in named}
    runs = [
        Run(
            path,
            tuple(read_stage(stage, path / stage) for stage in STAGES if is_begun(path / stage)),
            _unfinished(bases.get(path, ())),
        )
        for path in found
        if path not in owned
    ]
    return sorted((run for run in runs if run.stages or not is_preset(run.folder)), key=lambda run: -run.changed)


def _readable(folder: Path) -> Iterator[Config]:
    """Those configs of a run in which nothing is wrong."""
    for path in configs_in(folder):
        with suppress(RLHFError):
            yield load(path.stem, path)
