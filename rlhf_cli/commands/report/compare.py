"""Several runs on one page: their numbers with mean and spread, their curves, and what is set differently."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rlhf_cli.commands.report import charts, summary
from rlhf_cli.commands.report.charts import Figure, figure_name
from rlhf_cli.commands.report.page import WORDS, render
from rlhf_cli.commands.report.rules import RULES, last_quarter
from rlhf_cli.commands.report.run_tables import stage_row, total_seconds
from rlhf_cli.commands.report.runs import STAGES, Run, at, between, is_number
from rlhf_cli.commands.report.tables import bounds, number, percent, rated
from rlhf_cli.evaluation.render import pair_label
from rlhf_cli.statistics import bonferroni_z, wilson_difference

SECTIONS = (
    ("numbers", "Numbers"), ("curves", "PPO"), ("differences", "What is set differently"), ("stages", "Stages"),
)  # fmt: skip
OF_REPORT = (
    ("PPO, KL from SFT in nats", "models.ppo.kl"),
    ("PPO, tokens of an answer", "models.ppo.response_length_mean"),
    ("SFT, tokens of an answer", "models.sft.response_length_mean"),
)
ENDED = (("PPO, answers that end", "models.ppo.eos_fraction"), ("SFT, answers that end", "models.sft.eos_fraction"))


@dataclass(frozen=True)
class Row:
    """A number of each run, and its 95 % interval; None where a run has none."""

    title: str
    values: list[float | None]
    intervals: list[Any] | None = None
    share: bool = False  # told in percent
    averaged: bool = True  # whether a mean over runs means anything

    def cells(self) -> list[str]:
        """The row as text: what it is, each run's number, and over them mean, spread and n."""
        intervals = self.intervals or [None] * len(self.values)
        told = [
            self.said(value) + (bounds(interval) if value is not None else "")
            for value, interval in zip(self.values, intervals, strict=True)
        ]
        return [self.title, *told, *self._spread()]

    def _spread(self) -> list[str]:
        """Mean, standard deviation over runs (n - 1), and n, of the runs that have the number."""
        found = [value for value in self.values if value is not None]
        if not self.averaged:
            return ["", "", str(len(found))]
        return [self.said(fmean(found)), self.said(stdev(found) if len(found) > 1 else None), str(len(found))]

    def said(self, value: float | None) -> str:
        """One number of the row."""
        return "-" if value is None else percent(value) if self.share else number(value)


def of_runs(runs: list[Run]) -> str:
    """The page that compares runs; the same bytes for the same files."""
    names = told_apart([run.folder for run in runs])
    rows = [row for row in numbers(runs) if any(value is not None for value in row.values)]
    badges, differences = [summary.badges(run) for run in runs], between(runs)
    return render(
        "compare.html.jinja",
        title=f"{len(runs)} runs",
        subtitle=", ".join(names),
        sections=SECTIONS,
        names=names,
        notes=[f"{name}: {note}" for name, run in zip(names, runs, strict=True) for note in run.notes],
        first=[(name, summary.suspect(run, each)) for name, run, each in zip(names, runs, badges, strict=True)],
        apart=list(apart(names, runs)),
        seeds_alone=all(key == "seed" for _, key, _ in differences),
        numbers=[row.cells() for row in rows],
        curves=list(_curves(names, runs)),
        differences=[[stage, key, *values] for stage, key, values in differences],
        stages=[
            [name, *(_state(run, each[place]) for run, each in zip(runs, badges, strict=True))]
            for place, name in enumerate(STAGES)
        ],
    )


def told_apart(folders: list[Path]) -> list[str]:
    """A name for each folder: as many of its last parts as it takes; the same folder twice is numbered."""
    for parts in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = [Path(*folder.parts[-parts:]).as_posix() for folder in folders]
        if len(set(names)) == len(set(folders)):
            break
    return [f"{name} ({place})" if names.count(name) > 1 else name for place, name in enumerate(names, start=1)]


def _state(run: Run, badge: summary.Badge) -> str:
    state = stage_row(run.stages[badge.stage]).state
    return state if badge.grade == "open" else f"{state}: {WORDS[badge.grade]}"


def numbers(runs: list[Run]) -> Iterator[Row]:
    """The headline numbers. What an evaluation tells that is out of date is no number of the run."""
    reports = [run.outcome or {} for run in runs]
    yield Row(
        "SFT, loss on held-out rows", [_number(run.stages["sft"].told("metrics").get("eval_loss")) for run in runs]
    )
    right = [run.stages["reward"].told("metrics") for run in runs]
    intervals = [each.get("accuracy_ci95") for each in right]
    yield Row(
        "reward model, pairs told right", [_number(each.get("accuracy")) for each in right], intervals, share=True
    )
    for pair, judge in _rated(reports):
        rates = [at(report, "win_rate") or {} for report in reports]
        told = [each.get(pair, {}).get(judge, {}) for each in rates]
        for key, bound, note in (
            ("value", "ci95", ""),
            ("length_controlled", "length_controlled_ci95", ", at equal length"),
        ):
            values, intervals = [_number(rate.get(key)) for rate in told], [rate.get(bound) for rate in told]
            yield Row(f"{pair_label(pair)}, {judge}{note}", values, intervals, share=True)
    judges = [at(report, "models.ppo.judges") or {} for report in reports]
    for judge in dict.fromkeys(name for each in judges for name in each):
        means = [each.get(judge, {}) for each in judges]
        title, values = f"PPO, mean of {judge}, held-out prompts", [_number(mean.get("mean")) for mean in means]
        yield Row(title, values)
    for title, path in OF_REPORT:
        yield Row(title, [_number(at(report, path)) for report in reports])
    for title, path in ENDED:
        yield Row(title, [_number(at(report, path)) for report in reports], share=True)
    yield Row("selected update", [_number(report.get("selected_step")) for report in reports], averaged=False)
    yield Row("PPO, reward score in training, at its end", [_end(run) for run in runs])
    yield Row("PPO, seconds", [total_seconds(run.stages["ppo"]) or None for run in runs])


def _rated(reports: list[Any]) -> dict[tuple[str, str], None]:
    """Pairs of policies and the judges of any run, in the order of their first run."""
    sections = [report.get("win_rate") or {} for report in reports]
    return {
        (pair, judge): None for each in sections for pair, judges in each.items() if "_vs_" in pair for judge in judges
    }


def apart(names: list[str], runs: list[Run]) -> Iterator[str]:
    """For each judge whether PPO's highest and lowest win rate over SFT differ by more than chance in the prompts.

    They are the outermost of several: the interval of their difference is one of as many as there are pairs of runs.
    """
    rates = [run.rates for run in runs]
    for judge in dict.fromkeys(name for each in rates for name in each):
        told = [
            (each[judge], name, run)
            for each, name, run in zip(rates, names, runs, strict=True)
            if {"ci95", "n"} <= (each.get(judge) or {}).keys()
        ]
        if len(told) < 2:
            continue
        if len({_who(run, judge) for _, _, run in told}) > 1:
            yield f"{judge} is another judge in these runs: its win rates cannot be held against each other."
            continue
        ordered = sorted(told, key=lambda each: float(each[0]["value"]))
        (least, low, _), (most, high, _) = ordered[0], ordered[-1]
        ends = [f"{name} ({rated(rate)})" for rate, name in ((most, high), (least, low))]
        pairs = bonferroni_z(math.comb(len(told), 2))
        gap, _ = wilson_difference((most["value"], most["n"]), (least["value"], least["n"]), pairs)
        which = (
            "differ by more than chance in the prompts, though another seed may move both"
            if gap > 0
            else "cannot be told apart: the interval of their difference holds 0"
        )
        yield f"By {judge} {' and '.join(ends)} {which}."


def _who(run: Run, judge: str) -> str:
    """What a judge is: its model's hash, or what the config names."""
    key, stage = "models.reward" if judge == "reward" else f"judges.{judge}", run.stages["eval"]
    return str(at(stage.told("parents").get(key), "sha256") or stage.setting(key))


def _end(run: Run) -> float | None:
    values = [value for _, value in run.stages["ppo"].series("objective/scores")]
    return fmean(last_quarter(values)) if values else None


def _curves(names: list[str], runs: list[Run]) -> Iterator[Figure]:
    for rule in RULES:
        series = {name: run.stages["ppo"].series(rule.key) for name, run in zip(names, runs, strict=True)}
        lines = {name: points for name, points in series.items() if points}
        if len({value for points in lines.values() for _, value in points}) < 2:
            continue
        told = "; ".join(
            f"{name} {number(fmean(last_quarter([y for _, y in points])))}" for name, points in lines.items()
        )
        said = f"At the end: {told}."
        drawing = charts.curves(figure_name(rule.key), f"{rule.title}. {said}", lines, unit=rule.unit)
        yield Figure(rule.title, drawing, said, key=rule.key)


def _number(value: object) -> float | None:
    return float(value) if is_number(value) else None
