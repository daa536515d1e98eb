"""Comparison of several runs on one page: results with mean and spread, curves, and the settings that differ."""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rlhf_cli.commands.report import diagnosis
from rlhf_cli.commands.report.charts import Figure, draw_curves, figure
from rlhf_cli.commands.report.page import WORDS, render_template
from rlhf_cli.commands.report.rules import RULES
from rlhf_cli.commands.report.tables import bounds, number, percent, rated, stage_row, total_seconds
from rlhf_cli.evaluation.render import pair_label
from rlhf_cli.jsonl import at, is_number
from rlhf_cli.runs.layout import STAGES
from rlhf_cli.runs.read import Run
from rlhf_cli.runs.settings import between
from rlhf_cli.statistics import bonferroni_z, last_quarter, wilson_difference

SECTIONS = (("numbers", "Results"), ("curves", "PPO"), ("differences", "Settings that differ"), ("stages", "Stages"))
# Rows that are keys of report.json: title, path, whether it is a share.
REPORT_ROWS = (
    ("PPO, KL from SFT in nats", "models.ppo.kl", False),
    ("PPO, tokens per answer", "models.ppo.response_length_mean", False),
    ("SFT, tokens per answer", "models.sft.response_length_mean", False),
    ("PPO, answers that end", "models.ppo.eos_fraction", True),
    ("SFT, answers that end", "models.sft.eos_fraction", True),
)


def row(
    title: str, results: list[Any], intervals: list[Any] | None = None, *, share: bool = False, averaged: bool = True
) -> list[str]:
    """Return the title, each run's result with its 95 % interval, and mean, standard deviation over runs (n - 1) and n.

    Results that are not numbers are unknown. A `share` is shown in percent; without `averaged`, the mean is omitted.
    """

    def text(value: Any) -> str:
        return "-" if not is_number(value) else percent(value) if share else number(value)

    cells = [
        text(value) + (bounds(interval) if is_number(value) else "")
        for value, interval in zip(results, intervals or [None] * len(results), strict=True)
    ]
    known = [float(value) for value in results if is_number(value)]
    spread = stdev(known) if len(known) > 1 else None
    over_runs = [text(fmean(known)), text(spread)] if known and averaged else ["", ""]
    return [title, *cells, *over_runs, str(len(known))]


def of_runs(runs: list[Run]) -> str:
    """Return the page that compares runs; equal files give equal bytes."""
    names = short_names([run.folder for run in runs])
    badges, differences = [diagnosis.badges(run) for run in runs], between(runs)
    by_stage = [{badge.stage: badge for badge in each} for each in badges]
    states = [
        [name, *(_state(run, each[name]) if name in each else "" for run, each in zip(runs, by_stage, strict=True))]
        for name in STAGES
        if any(name in each for each in by_stage)
    ]
    return render_template(
        "compare.html.jinja",
        title=f"{len(runs)} runs",
        subtitle=", ".join(names),
        sections=SECTIONS,
        names=names,
        notes=[f"{name}: {note}" for name, run in zip(names, runs, strict=True) for note in run.notes],
        headlines=[(name, diagnosis.headline(run, each)) for name, run, each in zip(names, runs, badges, strict=True)],
        win_rates=list(win_rate_differences(names, runs)),
        only_seeds=all(key == "seed" for _, key, _ in differences),
        results=[cells for cells in results(runs) if cells[-1] != "0"],
        curves=list(_curves(names, runs)),
        differences=[[stage, key, *values] for stage, key, values in differences],
        stages=states,
    )


def short_names(folders: list[Path]) -> list[str]:
    """Return a unique name for each folder, with as few of its last parts as possible; equal folders are numbered."""
    for parts in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = [Path(*folder.parts[-parts:]).as_posix() for folder in folders]
        if len(set(names)) == len(set(folders)):
            break
    return [f"{name} ({index})" if names.count(name) > 1 else name for index, name in enumerate(names, start=1)]


def _state(run: Run, badge: diagnosis.Badge) -> str:
    _, state, *_ = stage_row(run.stages[badge.stage])
    return state if badge.grade == "open" else f"{state}: {WORDS[badge.grade]}"


def results(runs: list[Run]) -> Iterator[list[str]]:
    """Yield a row for each of the main results. Evaluations that are out of date are ignored."""
    reports: list[Mapping[str, Any]] = [run.outcome or {} for run in runs]
    yield row("SFT, held-out loss", [run.stages["sft"].manifest.metrics.get("eval_loss") for run in runs])
    metrics = [run.stages["reward"].manifest.metrics for run in runs]
    intervals = [each.get("accuracy_ci95") for each in metrics]
    yield row("reward model, accuracy", [each.get("accuracy") for each in metrics], intervals, share=True)
    sections = [report.get("win_rate") or {} for report in reports]
    pairs = {(pair, judge): None for each in sections for pair in each if "_vs_" in pair for judge in each[pair]}
    for pair, judge in pairs:
        rates = [each.get(pair, {}).get(judge, {}) for each in sections]
        for key, note in (("value", ""), ("length_controlled", ", length-controlled")):
            ends = [rate.get("ci95" if key == "value" else f"{key}_ci95") for rate in rates]
            yield row(f"{pair_label(pair)}, {judge}{note}", [rate.get(key) for rate in rates], ends, share=True)
    judges = [at(report, "models.ppo.judges") or {} for report in reports]
    for judge in dict.fromkeys(name for each in judges for name in each):
        yield row(f"PPO, mean of {judge}, held-out prompts", [(each.get(judge) or {}).get("mean") for each in judges])
    for title, path, share in REPORT_ROWS:
        yield row(title, [at(report, path) for report in reports], share=share)
    yield row("selected update", [report.get("selected_step") for report in reports], averaged=False)
    scores = [[value for _, value in run.stages["ppo"].series("objective/scores")] for run in runs]
    yield row("PPO, final reward score in training", [fmean(last_quarter(each)) if each else None for each in scores])
    yield row("PPO, seconds", [total_seconds(run.stages["ppo"]) or None for run in runs])


def win_rate_differences(names: list[str], runs: list[Run]) -> Iterator[str]:
    """Yield for each judge if the highest and lowest win rate over SFT differ by more than chance in the prompts.

    The interval of their difference is corrected for the number of pairs of runs.
    """
    for judge in dict.fromkeys(name for run in runs for name in run.rates):
        rates = [(run.rates.get(judge) or {}, name, run) for name, run in zip(names, runs, strict=True)]
        rates = [each for each in rates if {"ci95", "n"} <= each[0].keys()]
        if len(rates) < 2:
            continue
        if len({_judge_model(run, judge) for _, _, run in rates}) > 1:
            yield f"{judge} is a different judge in these runs: its win rates are not comparable."
            continue
        ordered = sorted(rates, key=lambda each: float(each[0]["value"]))
        (least, low, _), (most, high, _) = ordered[0], ordered[-1]
        z = bonferroni_z(math.comb(len(rates), 2))
        gap, _ = wilson_difference((most["value"], most["n"]), (least["value"], least["n"]), z)
        result = (
            "differ by more than chance in the prompts; another seed may move both"
            if gap > 0
            else "are not distinguishable: the interval of their difference includes 0"
        )
        yield f"By {judge} {high} ({rated(most)}) and {low} ({rated(least)}) {result}."


def _judge_model(run: Run, judge: str) -> str:
    """Return the hash of a judge's model, or else its setting."""
    key, stage = "models.reward" if judge == "reward" else f"judges.{judge}", run.stages["eval"]
    parent = stage.manifest.parents.get(key)
    return str(parent.sha256 if parent else stage.setting(key))


def _curves(names: list[str], runs: list[Run]) -> Iterator[Figure]:
    for rule in RULES:
        series = {name: run.stages["ppo"].series(rule.key) for name, run in zip(names, runs, strict=True)}
        lines = {name: points for name, points in series.items() if points}
        if len({value for points in lines.values() for _, value in points}) > 1:
            ends = [f"{name} {number(fmean(last_quarter([y for _, y in points])))}" for name, points in lines.items()]
            sentence, draw = f"At the end: {'; '.join(ends)}.", partial(draw_curves, lines, unit=rule.unit)
            yield figure(f"ppo-{rule.key}", rule.title, sentence, draw, key=rule.key)
