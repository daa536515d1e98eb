"""Several runs on one page: their numbers with mean and spread, their curves, and what is set differently."""

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev

from rlhf_cli.report import charts
from rlhf_cli.report.differences import between
from rlhf_cli.report.drawn import Figure, figure_name
from rlhf_cli.report.facts import stage_row, total_seconds
from rlhf_cli.report.health import last_quarter
from rlhf_cli.report.page import render
from rlhf_cli.report.ranges import RULES
from rlhf_cli.report.runs import STAGES, Run, at, is_number
from rlhf_cli.report.texts import number
from rlhf_cli.verdict import versus

SECTIONS = (
    ("numbers", "Numbers"), ("curves", "PPO"), ("differences", "What is set differently"), ("stages", "Stages"),
)  # fmt: skip
# Headline numbers that stand in the same place in every run.
OF_MANIFEST = (
    ("SFT, loss on held-out rows", "sft", "metrics.eval_loss"),
    ("reward model, pairs told right", "reward", "metrics.accuracy"),
)
OF_REPORT = (
    ("PPO, KL from SFT in nats", "models.ppo.kl"),
    ("PPO, tokens of an answer", "models.ppo.response_length_mean"),
    ("SFT, tokens of an answer", "models.sft.response_length_mean"),
    ("PPO, answers that end", "models.ppo.eos_fraction"),
    ("selected update", "selected_step"),
)


def of_runs(runs: list[Run]) -> str:
    """The page that compares runs; the same bytes for the same files."""
    names = told_apart([run.folder for run in runs])
    rows = [row for row in numbers(runs) if any(value is not None for value in row[1])]
    return render(
        "compare.html.jinja",
        title=f"{len(runs)} runs",
        subtitle=", ".join(names),
        sections=SECTIONS,
        names=names,
        notes=[f"{name}: {note}" for name, run in zip(names, runs, strict=True) for note in run.notes],
        numbers=[[title, *map(_cell, values), *spread(values)] for title, values in rows],
        curves=list(_curves(names, runs)),
        differences=[[stage, key, *values] for stage, key, values in between(runs)],
        stages=[[name, *(stage_row(run.stages[name]).state for run in runs)] for name in STAGES],
    )


def told_apart(folders: list[Path]) -> list[str]:
    """A name for each folder: as many of its last parts as it takes; the same folder twice is numbered."""
    for parts in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = [Path(*folder.parts[-parts:]).as_posix() for folder in folders]
        if len(set(names)) == len(set(folders)):
            break
    return [f"{name} ({place})" if names.count(name) > 1 else name for place, name in enumerate(names, start=1)]


def numbers(runs: list[Run]) -> Iterator[tuple[str, list[float | None]]]:
    """(what, its value in each run): None where a run does not have it."""
    for title, stage, path in OF_MANIFEST:
        yield title, [_number(at(run.stages[stage].manifest, path)) for run in runs]
    for pair, judge in _rated(runs):
        for key, note in (("value", ""), ("length_controlled", ", at equal length")):
            rates = [((run.report or {}).get("win_rate") or {}).get(pair, {}).get(judge, {}) for run in runs]
            yield f"{versus(pair)}, {judge}{note}", [_number(rate.get(key)) for rate in rates]
    for judge in dict.fromkeys(name for run in runs for name in at(run.report, "models.ppo.judges") or ()):
        told = [(at(run.report, "models.ppo.judges") or {}).get(judge, {}) for run in runs]
        yield f"PPO, mean of {judge}, held-out prompts", [_number(each.get("mean")) for each in told]
    for title, path in OF_REPORT:
        yield title, [_number(at(run.report, path)) for run in runs]
    yield "PPO, reward score in training, at its end", [_end(run) for run in runs]
    yield "PPO, seconds", [total_seconds(run.stages["ppo"]) or None for run in runs]


def _rated(runs: list[Run]) -> dict[tuple[str, str], None]:
    """Pairs of policies and the judges of any run, in the order of their first run."""
    sections = [(run.report or {}).get("win_rate") or {} for run in runs]
    return {
        (pair, judge): None for each in sections for pair, judges in each.items() if "_vs_" in pair for judge in judges
    }


def _end(run: Run) -> float | None:
    values = [value for _, value in run.stages["ppo"].series("objective/scores")]
    return fmean(last_quarter(values)) if values else None


def spread(values: list[float | None]) -> tuple[str, str, str]:
    """Mean, standard deviation over runs (n - 1), and n, of the runs that have the number."""
    found = [value for value in values if value is not None]
    return _cell(fmean(found)), _cell(stdev(found)) if len(found) > 1 else "-", str(len(found))


def _curves(names: list[str], runs: list[Run]) -> Iterator[Figure]:
    for rule in RULES:
        series = {name: run.stages["ppo"].series(rule.key) for name, run in zip(names, runs, strict=True)}
        lines = {name: points for name, points in series.items() if points}
        if len({value for points in lines.values() for _, value in points}) < 2:
            continue
        told = "; ".join(
            f"{name} {_cell(fmean(last_quarter([y for _, y in points])))}" for name, points in lines.items()
        )
        said = f"At the end: {told}."
        drawing = charts.curves(figure_name(rule.key), f"{rule.title}. {said}", lines, unit=rule.unit)
        yield Figure(rule.title, drawing, said, key=rule.key)


def _number(value: object) -> float | None:
    return float(value) if is_number(value) else None


def _cell(value: float | None) -> str:
    return "-" if value is None else number(value)
