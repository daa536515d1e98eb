"""`rlhf check FILE|DIR`: everything that can be known before a training, found at once, in the stages' own words.

First what needs no torch (configs, files, parents); then tokenizers and every row of data; with `deep` models too.
"""

import json
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_cli import distributed, runs, terminal
from rlhf_cli.commands import run as pipeline
from rlhf_cli.config.base import Config, Options
from rlhf_cli.config.loading import load_partial, stage_of
from rlhf_cli.config.training import CONFIGS
from rlhf_cli.data import hub, sources
from rlhf_cli.errors import Problem, RLHFError, closest_path, shown
from rlhf_cli.runs.parents import Parent
from rlhf_cli.runs.references import Reference
from rlhf_cli.runs.stage_folder import StageStatus


@dataclass
class Report:
    """Filled while the check goes on, shown at its end. Warnings are the terminal's: it shows them as they come."""

    checked: list[dict[str, Any]] = field(default_factory=list)  # stage, what, found, and maybe numbers
    errors: dict[Problem, None] = field(default_factory=dict)  # an ordered set
    not_checked: dict[str, None] = field(default_factory=dict)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Within, an error ends the block and goes into the report."""
        try:
            yield
        except RLHFError as error:
            self.errors |= dict.fromkeys(error.problems)

    def add(self, stage: str, what: str, found: str, **numbers: float) -> None:
        """A line of what was looked at."""
        self.checked.append({"stage": stage, "what": what, "found": found, **numbers})

    def skip(self, what: str) -> None:
        """A thing that could not be looked at, and why."""
        self.not_checked[what] = None

    def show(self, *, as_json: bool) -> int:
        """Print it; returns the exit code."""
        order = list(CONFIGS)
        self.checked.sort(key=lambda one: order.index(one["stage"]))
        if as_json:
            terminal.out(json.dumps(self._as_json(), indent=2))
            return 2 if self.errors else 0
        if self.checked:
            columns = ["stage", "what", "found"]
            terminal.table(columns, [[one[name] for name in columns] for one in self.checked])
        for what in self.not_checked:
            terminal.out(f"not checked: {what}")
        if not self.errors:
            count = len(self.not_checked)
            verdict = f"ok, but for {count} that could not be checked" if count else "ok"
            terminal.out("; ".join([verdict, *self._left_out()]))
        return self.show_errors()

    def _left_out(self) -> Iterator[str]:
        """The rows that stages would leave out, if any: how many of how many, and their share."""
        told = [
            f"{one['stage']} {one['what']} {one['left_out']} of {one['asked']} ({one['left_out'] / one['asked']:.1%})"
            for one in self.checked
            if one.get("left_out")
        ]
        if told:
            yield f"rows left out: {', '.join(told)}"

    def show_errors(self) -> int:
        """Print what is wrong alone; returns the exit code."""
        for problem in self.errors:
            terminal.say(str(problem))
        return 2 if self.errors else 0

    def _as_json(self) -> dict[str, Any]:
        levels = [("error", problem) for problem in self.errors]
        levels += [("warning", problem) for problem in terminal.emitted_problems()]
        problems = [
            {"code": each.code, "text": each.text, "where": each.where, "hint": each.hint, "level": level}
            for level, each in levels
        ]
        not_checked = list(self.not_checked)
        return {"ok": not self.errors, "problems": problems, "checked": self.checked, "not_checked": not_checked}


MODEL_ID = re.compile(r"(?!.*(--|\.\.))\w[\w.-]{0,95}(/\w[\w.-]{0,95})?")  # what the hub takes for a model's name


@dataclass
class Stage:
    """One stage, as far as it was looked at."""

    config: Config
    sound: bool = True  # else some of its values were wrong and stand at their defaults: only its files are looked at
    parents: dict[str, Parent] = field(default_factory=dict)  # those that are there
    waits: dict[str, Path] = field(default_factory=dict)  # key -> folder that an earlier stage is still to make
    data: set[str] = field(default_factory=set)  # keys whose files are there
    status: StageStatus | None = None  # of its output; None where that cannot be known, or would be refused

    @property
    def finished(self) -> bool:
        return self.status is not None and self.status.state == "finished"


def look_at(stages: Sequence[Stage], report: Report, unread: Collection[Path], *, whole_run: bool) -> None:
    """All stages. In a whole run, what an earlier one is still to make may be absent, and stale output moves aside.

    `unread` are the folders of stages whose configs could not be read: what reads them is not to blame.
    """
    to_make = set(unread)
    for stage in stages:
        config = stage.config
        _find_data(stage, report)
        _find_parents(stage, to_make, report)
        if not stage.sound:
            report.skip(f"{config.stage}: its rows and models, before what is wrong in {config.file.name} is mended")
            continue
        if not stage.waits:
            _find_status(stage, report, whole_run=whole_run)
        output = f"; output: {pipeline.describe(stage.status)}" if stage.status else ""
        report.add(config.stage, shown(config.file), f"config read{output}")
        for folder, key in {folder: key for key, folder in reversed(stage.waits.items())}.items():
            report.add(config.stage, key, f"{shown(folder)}, which the {folder.name} stage is to make")
        if whole_run and not stage.finished:
            to_make.add(config.folder)


def _find_data(stage: Stage, report: Report) -> None:
    for key, source in stage.config.sources().items():
        if not sources.is_local(source):
            name = source.shown()
            then = "and the hub may not be asked (HF_HUB_OFFLINE)" if hub.is_offline() else "the stage would fetch it"
            report.skip(f"{stage.config.stage} {key}: {name} is not in the hub's cache; {then}")
            continue
        with report.collecting():
            sources.locate({key: source})
            stage.data.add(key)


def _find_parents(stage: Stage, to_make: Collection[Path], report: Report) -> None:
    config, wrong = stage.config, set()
    for reference in runs.references(config):
        if Path(reference.path) in to_make:
            stage.waits[reference.key] = Path(reference.path)
        elif _is_on_the_hub_alone(config, reference):
            text = f"{reference.path} is not in the hub's cache; fetch it first: hf download {reference.path}"
            report.skip(f"{config.stage} {reference.key}: {text}")
        elif reference.path not in wrong:  # several keys may name one folder
            try:
                stage.parents[reference.key] = runs.open_reference(config, reference)
            except RLHFError as error:
                wrong.add(reference.path)
                report.errors |= dict.fromkeys(error.problems)


def _is_on_the_hub_alone(config: Config, reference: Reference) -> bool:
    """Whether a name can only be a hub id that is not cached, and is not a misspelt folder beside the config."""
    name, beside = reference.path, config.file.parent
    if not MODEL_ID.fullmatch(name) or runs.is_available_locally(name, reference.revision):
        return False
    owner, slash, _ = name.partition("/")
    return not os.path.isdir(beside / owner) if slash else closest_path(beside / name) is None


def _find_status(stage: Stage, report: Report, *, whole_run: bool) -> None:
    """How the stage's output stands to it. Reports C15 and M05 where it would refuse."""
    config = stage.config
    if len(stage.parents) < len(runs.references(config)) or len(stage.data) < len(config.sources()):
        return
    with report.collecting():
        wanted = runs.compute_identity(config, stage.parents, config.sources())
        stage.status = (runs.stage_status if whole_run else runs.require_current)(config, wanted)


def run(
    path: Path, overrides: Sequence[str], options: Options, *, deep: bool, as_json: bool = False, quiet: bool = False
) -> int:
    """Check a stage's file or a run's folder, and print what was found; returns 0, or 2 where something is wrong.

    `quiet` prints errors alone: what comes before a run, whose stages warn themselves.
    """
    report = Report()
    with report.collecting():
        distributed.require_single_process("check")
    with report.collecting(), terminal.muted_warnings() if quiet else nullcontext():
        whole_run = os.path.isdir(path) or not (os.path.isfile(path) or path.suffix in (".yaml", ".yml"))
        if whole_run:
            stages, unread = _of_a_run(path, overrides, report)
        else:
            stages, unread = list(_read(stage_of(path), path, overrides, report)), []
        look_at(stages, report, unread, whole_run=whole_run)
        if sound := [stage for stage in stages if stage.sound]:
            from rlhf_cli.commands.check_models import Trial  # brings in torch

            trial = Trial(report, options, deep=deep, runs_here=quiet)
            for stage in sound:
                trial.run(stage)
    return report.show_errors() if quiet else report.show(as_json=as_json)


def _of_a_run(folder: Path, overrides: Sequence[str], report: Report) -> tuple[list[Stage], list[Path]]:
    """The stages of a folder as far as they can be read, and where those that are not sound would write."""
    files = pipeline.find_configs(folder)
    routed = {stage: list[str]() for stage in files}
    with report.collecting():
        routed = pipeline.route(overrides, list(files))
    stages: list[Stage] = []
    for stage, path in files.items():
        with report.collecting():
            stages += _read(stage, path, routed[stage], report)
    sound = {stage.config.stage for stage in stages if stage.sound}
    return stages, [Path(os.path.abspath(folder)) / stage for stage in files if stage not in sound]


def _read(stage: str, path: Path, overrides: Sequence[str], report: Report) -> Iterator[Stage]:
    """A stage, if its config can be read; what is wrong is in the report."""
    config, problems = load_partial(stage, path, overrides)
    report.errors |= dict.fromkeys(problems)
    if config is not None:
        yield Stage(config, sound=not problems)
