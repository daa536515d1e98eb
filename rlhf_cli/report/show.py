"""Write the page of a run, or of a comparison, to a file; show an evaluation at its end."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_cli import distributed, system, terminal
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.errors import RLHFError, collect_errors, shell_path, shown
from rlhf_cli.evaluation import report_text
from rlhf_cli.evaluation.print_report import print_report
from rlhf_cli.evaluation.requirements import check_requirements
from rlhf_cli.files import open_regular, write_text
from rlhf_cli.runs.layout import REPORT_PAGE
from rlhf_cli.runs.read import Run, at_step, read_run
from rlhf_cli.runs.report import read_report
from rlhf_cli.runs.resolve import LAST

if TYPE_CHECKING:
    from rlhf_cli.report.diagnosis import Diagnosis


@dataclass(frozen=True)
class Page:
    """A page that was written, the diagnosis of each of its runs, and what it says in one line."""

    path: Path
    found: Sequence["Diagnosis"]
    summary: str
    comparison: Mapping[str, Any] = field(default_factory=dict)  # of several runs, as JSON

    def as_json(self) -> dict[str, Any]:
        return {"page": shown(self.path), "runs": [each.as_json() for each in self.found], **self.comparison}


def write_page(folders: Sequence[Path], out: Path | None, step: str = LAST) -> Page:
    """Write the page, print its path and a summary line, and return it. Raises RLHFError as `draw_page` does."""
    page = draw_page(folders, out, step)
    terminal.out(shown(page.path))
    terminal.say(f"report   {page.summary}")
    terminal.say("next: open it in a browser")
    return page


def draw_page(folders: Sequence[Path], out: Path | None, step: str = LAST, *, reload_s: float | None = None) -> Page:
    """Write the page of a run or of several, which reloads itself every `reload_s` seconds in the browser.

    `step` selects PPO's policy as in `runs.at_step`. The default of `out` is RUN/eval/report.html, RUN/report.html
    without eval/, ./report.html for several runs, and report-STEP.html for a policy other than the last. Raises
    RLHFError M01 for folders without a stage, C07 and M10 for `step`, C15 if the path has a file that is not a report,
    E03 if it cannot be written.
    """
    from rlhf_cli.report import compare, diagnosis, html, page

    runs: list[Run] = []

    def read(folder: Path) -> None:
        runs.append(read_run(folder))

    collect_errors(*(partial(read, folder) for folder in folders))
    runs = [at_step(each, step) for each in runs]

    target = out or _default_target(runs, step)
    _prepare_target(target)
    compared: dict[str, Any] = {}
    if len(runs) == 1:
        found: Sequence[Diagnosis] = [diagnosis.diagnose(runs[0])]
        contents = page.of_run(runs[0])
        summary = found[0].conclusion()
    else:
        comparison = compare.of_runs(runs)
        found = comparison.found
        contents = comparison.page()
        summary = f"comparison of {len(runs)} runs: {', '.join(comparison.names)}"
        compared = comparison.as_json()

    if reload_s:
        contents = html.with_reload(contents, reload_s)
    write_text(target.resolve(), contents)
    return Page(target, found, summary, compared)


def _default_target(runs: Sequence[Run], step: str) -> Path:
    """Return where a page is written without --out."""
    name = REPORT_PAGE if step == LAST else f"{Path(REPORT_PAGE).stem}-{step}.html"
    if len(runs) > 1:
        return Path(name)

    evaluation = runs[0].folder / "eval"
    return (evaluation if evaluation.is_dir() else runs[0].folder) / name


def show_evaluation(config: EvalConfig) -> None:
    """Draw and print the report of a finished evaluation, and check `eval.require` (R06).

    With several processes only the main one does so: it sets the exit code.
    """
    if not distributed.is_main_process():
        return
    report = read_report(config.folder)
    if report_text.has_frontier(report):
        from rlhf_cli.report.frontier import draw_file

        with _failure_as_warning("frontier.svg", "run `rlhf eval` again"):
            draw_file(report, config.folder / "frontier.svg")
    write_beside(config.folder)
    print_report(config.folder)
    check_requirements(report, config.eval.require, where=config.where)


def write_beside(eval_folder: Path) -> None:
    """Write report.html in an evaluation's folder. The evaluation is complete by then: a failure is a warning (R15)."""
    target = eval_folder / REPORT_PAGE
    hint = f"write it with `rlhf report {shell_path(eval_folder.parent)}`"
    with _failure_as_warning("the report of the evaluation", hint):
        from rlhf_cli.report import page

        _prepare_target(target)
        write_text(target, page.of_run(read_run(eval_folder)))


@contextmanager
def _failure_as_warning(what: str, hint: str) -> Iterator[None]:
    """Warn (R15) if a file could not be written: for matplotlib, the disk, or a file that was edited by hand."""
    try:
        yield
    except Exception as error:
        reason = error.problems[0].text if isinstance(error, RLHFError) else f"{type(error).__name__}: {error}"
        terminal.warn("R15", f"{what} could not be written: {' '.join(reason.split())}", hint=hint)


def brief(folder: Path) -> tuple[str, bool]:
    """Return the conclusion of a run's report, and whether a stage is bad or worth a look.

    Raises RLHFError M01 if there is no stage.
    """
    from rlhf_cli.report import diagnosis

    found = diagnosis.diagnose(read_run(folder))
    return found.conclusion(), any(badge.grade in diagnosis.ILL for badge in found.badges)


def _prepare_target(target: Path) -> None:
    """Make the folder of a page. Raises RLHFError C15 if its path has a file that is not a report, E03."""
    from rlhf_cli.report.html import GENERATOR_TAG

    hint = "choose another path: --out FILE"
    if target.is_dir():
        raise RLHFError("C15", f"{shown(target)} is a folder", hint=hint)
    if target.exists():
        with open_regular(target) as file:
            is_report = GENERATOR_TAG.encode() in file.read(4096)
        if not is_report:
            problem = f"{shown(target)} exists and is not a report of rlhf; it is not overwritten"
            raise RLHFError("C15", problem, hint=hint)
    folder = target.resolve().parent
    system.require_writable(folder, hint=hint)
    folder.mkdir(parents=True, exist_ok=True)
