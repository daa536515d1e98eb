"""`rlhf report RUN...`: a run, or a comparison of several, as one HTML page that loads nothing. Reads files alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rlhf_cli import distributed, system, terminal
from rlhf_cli.commands.report.runs import Run, at_step, read_run
from rlhf_cli.commands.report.svg import draw as draw_frontier
from rlhf_cli.commands.report.tables import GENERATOR
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.errors import RLHFError, collect_errors, shell_path, shown
from rlhf_cli.evaluation import render
from rlhf_cli.files import write_text
from rlhf_cli.runs.resolve import LAST
from rlhf_cli.runs.stage_folder import REPORT

BEGINNING = 4096  # bytes in which a page of ours says that it is one


def run(folders: Sequence[Path], out: Path | None, step: str = LAST) -> Path:
    """Write the page, print its path, and return it; the log has what the page says in a line.

    `step` says which of PPO's policies it tells of, as `steps.at_step` takes it. Without `out` it is
    RUN/eval/report.html, RUN/report.html where there is no eval/, ./report.html for several runs, and report-STEP.html
    for another policy than the last. Raises RLHFError M01 for folders that hold no stage, C07 and M10 for `step`, C15
    where a file of somebody else's is in its place, E03 where it cannot be written.
    """
    runs: list[Run] = []
    collect_errors(*(partial(_read, folder, runs) for folder in folders))
    runs = [at_step(each, step) for each in runs]
    name = REPORT if step == LAST else f"{Path(REPORT).stem}-{step}.html"
    target = out or (_place(runs[0], name) if len(runs) == 1 else Path(name))
    _require_ours(target)
    write_text(target.resolve(), _page(runs))
    terminal.out(shown(target))
    terminal.say(f"report   {_in_a_line(runs)}")
    terminal.say("next: open it in a browser")
    return target


def show_evaluation(config: EvalConfig) -> None:
    """Draw and print the report of a finished evaluation, and check `eval.require` (R06).

    Of several processes only the main one does so: it sets the exit code.
    """
    if not distributed.is_main_process():
        return
    report = render.read_report(config.folder)
    if "frontier" in report:
        draw_frontier(report, config.folder / "frontier.svg")
    write_beside(config.folder)
    render.print_report(config.folder)
    render.check_requirements(report, config.eval.require, where=config.where)


def write_beside(eval_folder: Path) -> Path | None:
    """Draw report.html in an evaluation's folder and return its path.

    The evaluation is complete by then, so a failure is a warning (R15) and returns None.
    """
    target = eval_folder / REPORT
    try:
        _require_ours(target)
        write_text(target, _page([read_run(eval_folder)]))
    except Exception as error:  # of matplotlib, of the disk, of a file that somebody changed by hand
        said = error.problems[0].text if isinstance(error, RLHFError) else f"{type(error).__name__}: {error}"
        text = f"the page of the evaluation could not be made: {' '.join(said.split())}"
        terminal.warn("R15", text, hint=f"rlhf report {shell_path(eval_folder.parent)} makes it")
        return None
    return target


@dataclass(frozen=True)
class Brief:
    """What the page of a run says first, in a sentence, and whether it calls a stage bad, or worth a look."""

    headline: str
    suspect: bool


def brief(folder: Path) -> Brief:
    """A run's page in brief; nothing is drawn. Raises RLHFError M01 where there is no stage."""
    return _brief(read_run(folder))


def _read(folder: Path, runs: list[Run]) -> None:
    runs.append(read_run(folder))


def _page(runs: list[Run]) -> str:
    if len(runs) == 1:
        from rlhf_cli.commands.report import page

        return page.of_run(runs[0])
    from rlhf_cli.commands.report import compare

    return compare.of_runs(runs)


def _brief(run: Run) -> Brief:
    from rlhf_cli.commands.report import health, summary

    badges = summary.badges(run)
    return Brief(summary.suspect(run, badges), any(badge.grade in health.ILL for badge in badges))


def _in_a_line(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return _brief(runs[0]).headline
    from rlhf_cli.commands.report import compare

    return f"{len(runs)} runs are compared: {', '.join(compare.told_apart([run.folder for run in runs]))}"


def _place(run: Run, name: str) -> Path:
    inside = run.folder / "eval"
    return (inside if inside.is_dir() else run.folder) / name


def _require_ours(target: Path) -> None:
    """Raises RLHFError C15 where the path holds something that is no page of ours, E03 where it cannot be written."""
    hint = "give another place: --out FILE"
    if target.is_dir():
        raise RLHFError("C15", f"{shown(target)} is a folder", hint=hint)
    if target.exists() and not _is_ours(target):
        raise RLHFError("C15", f"{shown(target)} is no page of ours; nothing is overwritten", hint=hint)
    system.require_writable(target.resolve().parent, hint=hint)
    target.resolve().parent.mkdir(parents=True, exist_ok=True)


def _is_ours(path: Path) -> bool:
    with path.open("rb") as file:
        return f'<meta name="generator" content="{GENERATOR}">'.encode() in file.read(BEGINNING)
