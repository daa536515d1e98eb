"""What a check sees without torch: files, parents, and what the output holds."""

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlhf_cli import checkpoints, pipeline, sources
from rlhf_cli.check.report import Report
from rlhf_cli.checkpoints import Parent, Reference, Status
from rlhf_cli.config import Config
from rlhf_cli.errors import RLHFError, nearest_file, shown
from rlhf_cli.sources import hub

MODEL_ID = re.compile(r"(?!.*(--|\.\.))\w[\w.-]{0,95}(/\w[\w.-]{0,95})?")  # what the hub takes for a model's name


@dataclass
class Stage:
    """One stage, as far as it was looked at."""

    config: Config
    sound: bool = True  # else some of its values were wrong and stand at their defaults: only its files are looked at
    parents: dict[str, Parent] = field(default_factory=dict)  # those that are there
    waits: dict[str, Path] = field(default_factory=dict)  # key -> folder that an earlier stage is still to make
    data: set[str] = field(default_factory=set)  # keys whose files are there
    status: Status | None = None  # of its output; None where that cannot be known, or would be refused

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
    for reference in checkpoints.references(config):
        if Path(reference.path) in to_make:
            stage.waits[reference.key] = Path(reference.path)
        elif _is_on_the_hub_alone(config, reference):
            text = f"{reference.path} is not in the hub's cache; fetch it first: hf download {reference.path}"
            report.skip(f"{config.stage} {reference.key}: {text}")
        elif reference.path not in wrong:  # several keys may name one folder
            try:
                stage.parents[reference.key] = checkpoints.open_reference(config, reference)
            except RLHFError as error:
                wrong.add(reference.path)
                report.errors |= dict.fromkeys(error.problems)


def _is_on_the_hub_alone(config: Config, reference: Reference) -> bool:
    """Whether a name can only be a hub id that is not cached, and is not a misspelt folder beside the config."""
    name, beside = reference.path, config.file.parent
    if not MODEL_ID.fullmatch(name) or checkpoints.is_here(name, reference.revision):
        return False
    owner, slash, _ = name.partition("/")
    return not os.path.isdir(beside / owner) if slash else nearest_file(beside / name) is None


def _find_status(stage: Stage, report: Report, *, whole_run: bool) -> None:
    """How the stage's output stands to it. Reports C15 and M05 where it would refuse."""
    config = stage.config
    if len(stage.parents) < len(checkpoints.references(config)) or len(stage.data) < len(config.sources()):
        return
    with report.collecting():
        wanted = checkpoints.identity(config, stage.parents, config.sources())
        stage.status = (checkpoints.examine if whole_run else checkpoints.usable)(config, wanted)
