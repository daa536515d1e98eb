"""`rlhf report`: write an HTML report."""

from pathlib import Path
from typing import Annotated

from rlhf_cli import system, terminal
from rlhf_cli.cli import completion
from rlhf_cli.cli.errors import only_run
from rlhf_cli.cli.options import Debug, JsonAtEnd, Markdown, Quiet, Verbose, argument, flag, option
from rlhf_cli.errors import shown

RUNS_TEXT = "Run folder; several are compared. Default: the only run here."
OUT_TEXT = "HTML file. Default: RUN/eval/report.html; ./report.html for several runs."
STEP_TEXT = "PPO policy: the last, the one that the evaluation recommends, or update N."
WATCH_TEXT = "Draw it again while a run trains; the browser reloads it. Ends with the run, or Ctrl-C."


def report(
    folders: Annotated[list[Path] | None, argument("RUN...", RUNS_TEXT, completion.runs)] = None,
    out: Annotated[Path | None, option("--out", "FILE", OUT_TEXT)] = None,
    step: Annotated[str, option("--step", "last|recommended|N", STEP_TEXT, completion.steps)] = "last",
    watch: Annotated[bool, flag("--watch", WATCH_TEXT)] = False,
    markdown: Markdown = False,
    as_json: JsonAtEnd = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Write an HTML report that diagnoses each stage, or compares runs.

    The file is self-contained. It covers the stages that exist so far, so a running run can be inspected.
    """
    from rlhf_cli.report import show

    run_folders = folders or [only_run()]
    with system.translate_resource_errors(out or run_folders[0]):
        if watch:
            from rlhf_cli.commands.watch import watch as watch_runs

            page = watch_runs(run_folders, out, step)
        else:
            page = show.write_page(run_folders, out, step)
    if markdown:
        from rlhf_cli.report.markdown import append_to_job_summary, of_runs

        text = of_runs(page.found)
        append_to_job_summary(text)
        terminal.answer(text, end="")
        return
    terminal.conclude(shown(page.path), page.as_json())
