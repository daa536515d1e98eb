"""`rlhf check FILE|DIR`: everything that can be known before a training, found at once, in the stages' own words.

First what needs no torch (configs, files, parents); then tokenizers and every row of data; with `deep` models too.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

from rlhf_cli import pipeline, processes, terminal
from rlhf_cli.check import static
from rlhf_cli.check.report import Report
from rlhf_cli.config import Options, load_what_is_sound, stage_of


def run(
    path: Path, overrides: Sequence[str], options: Options, *, deep: bool, as_json: bool = False, quiet: bool = False
) -> int:
    """Check a stage's file or a run's folder, and print what was found; returns 0, or 2 where something is wrong.

    `quiet` prints errors alone: what comes before a run, whose stages warn themselves.
    """
    report = Report()
    with report.collecting():
        processes.refuse_several("check")
    with report.collecting(), terminal.muted_warnings() if quiet else nullcontext():
        whole_run = os.path.isdir(path) or not (os.path.isfile(path) or path.suffix in (".yaml", ".yml"))
        if whole_run:
            stages, unread = _of_a_run(path, overrides, report)
        else:
            stages, unread = list(_read(stage_of(path), path, overrides, report)), []
        static.look_at(stages, report, unread, whole_run=whole_run)
        if sound := [stage for stage in stages if stage.sound]:
            from rlhf_cli.check.trial import Trial  # brings in torch

            trial = Trial(report, options, deep=deep, runs_here=quiet)
            for stage in sound:
                trial.run(stage)
    return report.show_errors() if quiet else report.show(as_json=as_json)


def _of_a_run(folder: Path, overrides: Sequence[str], report: Report) -> tuple[list[static.Stage], list[Path]]:
    """The stages of a folder as far as they can be read, and where those that are not sound would write."""
    files = pipeline.find_configs(folder)
    routed = {stage: list[str]() for stage in files}
    with report.collecting():
        routed = pipeline.route(overrides, list(files))
    stages: list[static.Stage] = []
    for stage, path in files.items():
        with report.collecting():
            stages += _read(stage, path, routed[stage], report)
    sound = {stage.config.stage for stage in stages if stage.sound}
    return stages, [Path(os.path.abspath(folder)) / stage for stage in files if stage not in sound]


def _read(stage: str, path: Path, overrides: Sequence[str], report: Report) -> Iterator[static.Stage]:
    """A stage, if its config can be read; what is wrong is in the report."""
    config, problems = load_what_is_sound(stage, path, overrides)
    report.errors |= dict.fromkeys(problems)
    if config is not None:
        yield static.Stage(config, sound=not problems)
