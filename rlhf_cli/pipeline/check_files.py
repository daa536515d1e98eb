"""Checks of `rlhf check` of configs, data files, parents and outputs. Imports no torch."""

import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from rlhf_cli import runs
from rlhf_cli.config.base import Config
from rlhf_cli.data import sources
from rlhf_cli.errors import RLHFError, closest_path, shown
from rlhf_cli.pipeline.check_report import CheckReport, StageCheck
from rlhf_cli.pipeline.decide import describe_status
from rlhf_cli.runs.resolve import Reference

MODEL_ID = re.compile(r"(?!.*(--|\.\.))\w[\w.-]{0,95}(/\w[\w.-]{0,95})?")  # a model id of the hub


def check_files(
    stages: Sequence[StageCheck], report: CheckReport, unreadable: Collection[Path], *, whole_run: bool
) -> None:
    """Check the data, parents and output of all stages.

    In a whole run, outputs of earlier stages may be missing, and stale output is allowed. `unreadable` are the folders
    of stages whose configs could not be read; no error is reported for the stages that read them.
    """
    to_make = set(unreadable)
    for stage in stages:
        config = stage.config
        _find_data(stage, report)
        _find_parents(stage, to_make, report)
        if not stage.valid:
            text = f"{config.stage}: rows and models, until the errors in {config.file.name} are fixed"
            report.not_checked.append(text)
            continue

        _compare_output(stage, report, whole_run=whole_run)
        output = f"; output: {describe_status(stage.status)}" if stage.status else ""
        report.add(config.stage, shown(config.file), f"config read{output}")
        _add_pending(stage, report)
        if whole_run and not stage.finished:
            to_make |= {config.folder, *(member.folder for member in config.other_members)}


def _find_data(stage: StageCheck, report: CheckReport) -> None:
    config = stage.config
    for key, source in config.sources().items():
        if not sources.is_local(source):
            outcome = "and HF_HUB_OFFLINE is set" if sources.is_offline() else "the stage would fetch it"
            text = f"{config.stage} {key}: {source.shown()} is not in the hub's cache; {outcome}"
            report.not_checked.append(text)
            continue
        with report.collecting():
            sources.locate({key: source})
            stage.data.add(key)


def _find_parents(stage: StageCheck, to_make: Collection[Path], report: CheckReport) -> None:
    config = stage.config
    rejected: set[str] = set()  # several keys may name one folder
    for reference in runs.references(config):
        if Path(reference.path) in to_make:
            stage.pending[reference.key] = Path(reference.path)
        elif _is_uncached_hub_id(config, reference):
            text = f"{reference.path} is not in the hub's cache; fetch it first: hf download {reference.path}"
            report.not_checked.append(f"{config.stage} {reference.key}: {text}")
        elif reference.path not in rejected:
            try:
                stage.parents[reference.key] = runs.open_reference(config, reference)
            except RLHFError as error:
                rejected.add(reference.path)
                report.errors |= dict.fromkeys(error.problems)


def _is_uncached_hub_id(config: Config, reference: Reference) -> bool:
    """Return True if a name can only be a hub id that is not cached, not a misspelt folder beside the config."""
    name = reference.path
    if not MODEL_ID.fullmatch(name) or runs.is_available_locally(name, reference.revision):
        return False
    config_folder = config.file.parent
    owner, slash, _ = name.partition("/")
    if slash:
        return not os.path.isdir(config_folder / owner)
    return closest_path(config_folder / name) is None


def _compare_output(stage: StageCheck, report: CheckReport, *, whole_run: bool) -> None:
    """Set the status of the stage's output, or add the C15 or M05 with which the stage would fail."""
    config = stage.config
    has_parents = len(stage.parents) == len(runs.references(config))
    has_data = len(stage.data) == len(config.sources())
    if not (has_parents and has_data) or stage.pending:
        return
    compare = runs.stage_status if whole_run else runs.require_current
    with report.collecting():
        identity = runs.compute_identity(config, stage.parents, config.sources())
        stage.status = compare(config, identity)


def _add_pending(stage: StageCheck, report: CheckReport) -> None:
    """Add a line for each folder that an earlier stage is to make, under the first key that names it."""
    keys = {folder: key for key, folder in reversed(stage.pending.items())}
    for folder, key in keys.items():
        report.add(stage.config.stage, key, f"{shown(folder)}, which the {folder.name} stage is to make")
