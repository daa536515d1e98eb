"""The summary of one or several runs as Markdown, for a pull request or the summary of a job in GitHub Actions."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence

from rlhf_cli.errors import shown
from rlhf_cli.evaluation.report_text import policies_table, summary_sentence, win_rate_table
from rlhf_cli.report.compare import comparable_judges, results, short_names, win_rate_differences
from rlhf_cli.report.diagnosis import Diagnosis
from rlhf_cli.report.formats import visible
from rlhf_cli.report.head_to_head import head_to_head
from rlhf_cli.report.html import WORDS

SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"  # names a file that Actions shows on the page of the job
SPECIAL = re.compile(r"([\\`*_\[\]<>#|~])")
NO_MENTION = "@<!-- -->"  # an @ that notifies no user of that name


def of_runs(found: Sequence[Diagnosis]) -> str:
    """Return the Markdown of a run, or of a comparison."""
    parts = _of_run(found[0]) if len(found) == 1 else _of_comparison(found)
    return "\n\n".join(parts) + "\n"


def append_to_job_summary(text: str) -> None:
    """Append Markdown to the summary of a job in GitHub Actions, if this is one. Raises OSError."""
    path = os.environ.get(SUMMARY_VARIABLE)
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{text}\n")


def _of_run(diagnosis: Diagnosis) -> Iterator[str]:
    run = diagnosis.run
    yield f"### {escape(shown(run.folder))}"
    yield f"**{escape(diagnosis.conclusion())}**"
    if run.outcome:
        if summary := summary_sentence(run.outcome):
            yield escape(summary)
        yield _table(*policies_table(run.outcome))
        columns, rates = win_rate_table(run.outcome)
        if rates:
            yield _table(columns, rates)
    rows = [[badge.stage, WORDS[badge.grade], "; ".join(badge.reasons)] for badge in diagnosis.badges]
    yield _table(["stage", "", "findings"], rows)


def _of_comparison(found: Sequence[Diagnosis]) -> Iterator[str]:
    runs = [each.run for each in found]
    names = short_names([run.folder for run in runs])
    yield f"### {len(runs)} runs"
    conclusions = zip(names, found, strict=True)
    yield "\n".join(f"- **{escape(name)}**: {escape(each.conclusion())}" for name, each in conclusions)
    if direct := head_to_head(names, runs, comparable_judges(runs)):
        yield _table(*direct.table)
    yield from (escape(sentence) for sentence in win_rate_differences(names, runs))
    rows = [row for row in results(runs) if row[-1]]  # known of some run
    yield _table(["", *names, "mean", "spread", "n"], rows)


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [_row(columns), _row(["---"] * len(columns), escaped=True)]
    return "\n".join([*lines, *map(_row, rows)])


def _row(cells: Sequence[object], *, escaped: bool = False) -> str:
    texts = [str(cell) if escaped else escape(str(cell)) for cell in cells]
    return f"| {' | '.join(texts)} |"


def escape(text: str) -> str:
    """Return text that Markdown shows as it is, on one line: names of runs and judges are not ours."""
    return SPECIAL.sub(r"\\\1", " ".join(visible(text).split())).replace("@", NO_MENTION)
