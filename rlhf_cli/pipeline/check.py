"""`rlhf check FILE|DIR`: find all errors that can be known before training, with the stages' own checks."""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from rlhf_cli import distributed, system, terminal
from rlhf_cli.config.base import Options
from rlhf_cli.config.loading import load_partial, stage_of
from rlhf_cli.pipeline import run as pipeline
from rlhf_cli.pipeline.check_files import Report, StageCheck, check_files


def run(
    path: Path, overrides: Sequence[str], options: Options, *, deep: bool, as_json: bool = False, quiet: bool = False
) -> int:
    """Check a stage's file or a run folder and print the report; return 0, or 2 if there are errors.

    `quiet` prints errors only. `rlhf run` uses it, since its stages print the warnings themselves.
    """
    report = Report()
    report.attempt(distributed.require_single_process, "check")
    with report.collecting(), terminal.muted_warnings() if quiet else nullcontext():
        system.remove_accelerate_variables()
        whole_run = os.path.isdir(path) or not (os.path.isfile(path) or path.suffix in (".yaml", ".yml"))
        if whole_run:
            stages, unreadable = _load_run(path, overrides, report)
        else:
            stages, unreadable = _load_stage(stage_of(path), path, overrides, report), []
        check_files(stages, report, unreadable, whole_run=whole_run)
        if valid := [stage for stage in stages if stage.valid]:
            from rlhf_cli.pipeline.check_models import StageValidator  # imports torch

            validator = StageValidator(report, options, deep=deep, runs_here=quiet)
            for stage in valid:
                validator.check(stage)
    return report.show_errors() if quiet else report.show(as_json=as_json)


def _load_run(folder: Path, overrides: Sequence[str], report: Report) -> tuple[list[StageCheck], list[Path]]:
    """Load the configs of a folder; return the readable ones and the output folders of the invalid ones."""
    files = pipeline.find_configs(folder)
    routed = report.attempt(pipeline.route_overrides, overrides, list(files)) or dict.fromkeys(files, ())
    stages: list[StageCheck] = []
    for stage, path in files.items():
        stages += report.attempt(_load_stage, stage, path, routed[stage], report) or []
    valid = {stage.config.stage for stage in stages if stage.valid}
    return stages, [Path(os.path.abspath(folder)) / stage for stage in files if stage not in valid]


def _load_stage(stage: str, path: Path, overrides: Sequence[str], report: Report) -> list[StageCheck]:
    """Return the stage, or nothing if its config cannot be read; errors are added to the report."""
    config, problems = load_partial(stage, path, overrides)
    report.errors |= dict.fromkeys(problems)
    return [] if config is None else [StageCheck(config, valid=not problems)]
