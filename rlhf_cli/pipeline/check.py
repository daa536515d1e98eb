"""`rlhf check FILE|DIR`: find all errors that can be known before training, with the stages' own checks."""

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from rlhf_cli import distributed, system, terminal
from rlhf_cli.config.base import Options
from rlhf_cli.config.loading import load_partial, stage_of
from rlhf_cli.pipeline.check_files import check_files
from rlhf_cli.pipeline.check_report import CheckReport, StageCheck
from rlhf_cli.pipeline.load import find_configs, route_overrides


def check_configs(
    path: Path, overrides: Sequence[str], options: Options, *, deep: bool, as_json: bool = False, quiet: bool = False
) -> int:
    """Check a stage's file or a run folder and print the report; return 0, or 2 if there are errors.

    `quiet` prints errors only. `rlhf run` uses it, since its stages print the warnings themselves.
    """
    report = CheckReport()
    report.attempt(distributed.require_single_process, "check")
    with report.collecting(), terminal.muted_warnings() if quiet else nullcontext():
        system.remove_accelerate_variables()
        is_file = os.path.isfile(path) or path.suffix in (".yaml", ".yml")
        whole_run = os.path.isdir(path) or not is_file
        if whole_run:
            files = find_configs(path)
            routed = report.attempt(route_overrides, overrides, list(files)) or {}
        else:
            stage = stage_of(path)
            files = {stage: path}
            routed = {stage: list(overrides)}
        stages = _load_stages(files, routed, report)
        check_files(stages, report, _unreadable(path, files, stages) if whole_run else (), whole_run=whole_run)
        _check_models([stage for stage in stages if stage.valid], report, options, deep=deep, runs_here=quiet)
    return report.show_errors() if quiet else report.show(as_json=as_json)


def _check_models(
    stages: Sequence[StageCheck], report: CheckReport, options: Options, *, deep: bool, runs_here: bool
) -> None:
    """Check what needs torch, which is not imported for nothing."""
    if not stages:
        return
    from rlhf_cli.pipeline.check_models import StageValidator

    validator = StageValidator(report, options, deep=deep, runs_here=runs_here)
    for stage in stages:
        validator.check(stage)


def _load_stages(
    files: Mapping[str, Path], routed: Mapping[str, Sequence[str]], report: CheckReport
) -> list[StageCheck]:
    """Return the stages whose configs can be read; errors are added to the report."""
    stages = []
    for stage, path in files.items():
        with report.collecting():
            config, problems = load_partial(stage, path, routed.get(stage, ()))
            report.errors |= dict.fromkeys(problems)
            if config is not None:
                stages.append(StageCheck(config, valid=not problems))
    return stages


def _unreadable(folder: Path, files: Iterable[str], stages: Sequence[StageCheck]) -> list[Path]:
    """Return the output folders of the stages of a run whose configs are not valid."""
    root = Path(os.path.abspath(folder))
    valid = {stage.config.stage for stage in stages if stage.valid}
    return [root / stage for stage in files if stage not in valid]
