"""The figures of a run: which data each one shows, and the sentence below it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

from rlhf_cli.evaluation import report_text
from rlhf_cli.evaluation.sample_pairs import ResponsePair, deciding_judge
from rlhf_cli.jsonl import is_number
from rlhf_cli.report import charts
from rlhf_cli.report.charts import Figure, WinRateRow, curves, figure
from rlhf_cli.report.diagnosis import Diagnosis, Finding
from rlhf_cli.report.formats import number, percent
from rlhf_cli.report.frontier import ON_PAGE, draw_panel
from rlhf_cli.report.rules import ILL, SEVERITY, Reading, Series, by_cause, end_mean, with_values
from rlhf_cli.report.svg import sparkline
from rlhf_cli.runs.read import Run, Stage
from rlhf_cli.runs.report import FrontierPoint, PolicyScores, Report, RewardModelCard

# Metrics of SFT, reward model and DPO: key, title, unit. The held-out series is drawn with it.
TRAINING = {
    "sft": (
        ("loss", "Loss", "nats per token"),
        ("mean_token_accuracy", "Token accuracy", "share"),
    ),
    "reward": (
        ("loss", "Loss", ""),
        ("accuracy", "Pair accuracy", "share"),
        ("margin", "Margin", "score"),
    ),
    "dpo": (
        ("loss", "Loss", ""),
        ("rewards/accuracies", "Pair accuracy", "share"),
        ("rewards/margins", "Margin", "nats"),
    ),
}


STAGE_TITLES = {"sft": "SFT", "reward": "Reward model", "dpo": "DPO"}
# The findings on a metric, by their tables in findings.toml.
LOSSES = ("loss_rose", "loss_flat", "held_out_loss_rose", "memorized", "memorized_while_falling")
FINDINGS = {"loss": LOSSES, "accuracy": ("chance", "trivial")}

# Training


@dataclass(frozen=True)
class Health:
    """The training figures of a run: those with a finding, and the others, which need no look."""

    open: Sequence[Figure]
    folded: Sequence[Figure]


def health(run: Run, found: Diagnosis) -> Health:
    """Return the figures of all training stages, those of PPO first."""
    figures = ppo(run, found.readings)
    for name in TRAINING:
        if name in run.stages:
            figures += training(run.stages[name], found.findings[name])
    ill = [each for each in figures if each.verdict in ILL]
    others = [each for each in figures if each.verdict not in ILL]
    return Health(open=ill, folded=sorted(others, key=lambda each: each.markup is None))  # constant ones last


def training(stage: Stage, findings: Sequence[Finding] = ()) -> list[Figure]:
    """Return the curves of a stage that TRL trains, with the verdict of the findings on them."""
    found = []
    for key, title, unit in TRAINING[stage.name]:
        lines = _training_lines(stage, key)
        if not lines:
            continue
        sentence = _training_sentence(stage, key, lines)
        name = f"{stage.name}-{key}"
        title = f"{STAGE_TITLES[stage.name]}: {title}"
        drawn = curves(name, title, sentence, lines, unit=unit, x="step", key=key)
        grades = [finding.grade for finding in findings if finding.key in FINDINGS.get(key, ())]
        verdict = max(grades, key=SEVERITY.index, default="none")
        drawn = replace(drawn, verdict=verdict)
        points = next(iter(lines.values()))
        found.append(_with_spark(drawn, points, points[-1][1], x="step", unit=unit))
    return found


def _with_spark(drawn: Figure, points: Series, end: float, *, x: str, unit: str) -> Figure:
    """Return a figure with what it shows when it is folded: a sparkline, the first value and the end."""
    spark = sparkline(drawn.title, ("", x, unit or "value"), points)
    values = dict.fromkeys(number(value) for value in (points[0][1], end))  # of a constant: one
    return replace(drawn, spark=spark, ends=" to ".join(values))


def _training_lines(stage: Stage, key: str) -> dict[str, Series]:
    """Return the series of a metric that the log has."""
    lines = {"training": stage.series(key), "held-out": stage.series(f"eval_{key}")}
    return {name: points for name, points in lines.items() if points}


def _training_sentence(stage: Stage, key: str, lines: Mapping[str, Series]) -> str:
    """Return first and last value of each series, and a final loss that the curve lacks."""
    sentences = []
    for name, points in lines.items():
        ends = dict.fromkeys((points[0], points[-1]))  # of one point: one
        values = " to ".join(number(value) for _, value in ends)
        sentences.append(f"{name.capitalize()}: {values}.")

    final = stage.manifest.known_metrics.eval_loss if key == "loss" else None
    held_out = lines.get("held-out")
    if is_number(final) and (held_out is None or final != held_out[-1][1]):
        sentences.append(f"At the end, over all held-out tokens: {number(final)}; the curve averages batches.")
    return " ".join(sentences)


def ppo(run: Run, found: Sequence[Reading]) -> list[Figure]:
    """Return a figure for each of PPO's metrics with a rule, unhealthy ones first.

    Each drawing marks the first alarm of every watchdog signal.
    """
    stage = run.stages["ppo"]
    alarms = _first_alarms(run.firings)
    ill = [reading for reading in by_cause(found) if reading.verdict in ILL]
    others = [reading for reading in found if reading not in ill]
    return [_metric_figure(reading, stage, alarms) for reading in ill + others]


def _first_alarms(firings: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the steps of the first alarm of every signal."""
    first: dict[str, int] = {}
    for row in firings:
        first.setdefault(str(row.get("signal")), row["step"])
    return sorted(first.values())


def _metric_figure(reading: Reading, stage: Stage, alarms: Sequence[int]) -> Figure:
    """Return the figure of a metric, without a drawing if it is constant."""
    name = f"ppo-{reading.key}"
    unit = reading.rule.unit
    found = Figure(reading.title, reading.sentence, name=name)
    if len({value for _, value in reading.points}) > 1:
        lines = {reading.title: reading.points}
        penalized = stage.series("objective/rlhf_reward")
        if reading.key == "objective/scores" and penalized:
            lines = {"score": reading.points, "minus the KL penalty": penalized}
        found = curves(name, reading.title, reading.sentence, lines, band=reading.band, unit=unit, alarms=alarms)
    advice = with_values(reading.advice, stage.config)

    found = replace(found, verdict=reading.verdict, advice=advice, key=reading.key)
    return _with_spark(found, reading.points, end_mean(reading.points), x="update", unit=unit)


# Evaluation


def report_card(card: RewardModelCard) -> list[Figure]:
    """Return calibration and margins of a reward model's report card."""
    ece = (
        f"Expected calibration error {number(card.ece)}: the mean distance from the dashed line. "
        "Larger dots have more pairs."
    )
    edges = card.margin_histogram.edges
    counts = card.margin_histogram.counts
    below_zero = sum(counts[: 1 + edges.index(0.0)])  # counts[0] is below the first edge
    margins = (
        "The margin is the score of the chosen answer minus that of the rejected one; areas are numbers of pairs. "
        f"{below_zero} of {card.n} are below 0: the rejected answer scores higher."
    )

    draw_calibration = partial(charts.draw_calibration, card.calibration)
    draw_margins = partial(charts.draw_margins, counts, edges)
    return [
        figure("card-calibration", "Calibration", ece, draw_calibration),
        figure("card-margins", "Margins", margins, draw_margins),
    ]


def frontiers(report: Report) -> list[Figure]:
    """Return a panel for each judge, the deciding one first, if there is more to draw than SFT and PPO."""
    if not report_text.has_frontier(report):
        return []
    judges = report.models["sft"].judges
    found = []
    for index, judge in enumerate(sorted(judges, key=lambda name: name != deciding_judge(judges))):
        parts = [f"{part[:1].upper()}{part[1:]}." for part in _frontier_sentences(report, judge)]
        draw = partial(draw_panel, judge, report, ON_PAGE, legend=True)
        found.append(figure(f"frontier-{index}", f"By {judge}", " ".join(parts), draw, size=(4.2, 3.1)))

    return found


def _frontier_sentences(report: Report, judge: str) -> Iterator[str]:
    """Yield what a judge's panel shows."""
    points = report.frontier or []
    others = report_text.other_points(report)

    if points:
        yield _frontier_course(judge, points)
    else:
        others = report_text.ppo_points(report) + others
    yield from _cheaper(judge, report)
    if others:
        yield "; ".join(f"{each.name}: {_score_at_kl(each.scores, judge)}" for each in others)
    if judge == "reward" and report.limit and report.limit.missing_eos_penalty:
        yield f"the picture shows the {report_text.limit_score(report)}"


def _cheaper(judge: str, report: Report) -> Iterator[str]:
    """Yield each best of n of SFT with a higher mean, at less KL, than some snapshot of PPO."""
    for best_of in report.best_of or []:
        mean = best_of.judges[judge].mean
        farther = [point for point in report.frontier or [] if point.kl >= best_of.kl_bound]
        beaten = [point for point in farther if point.judges[judge].mean < mean]
        if beaten:
            point = max(beaten, key=lambda each: each.kl)
            ours = f"{number(mean)} at {number(best_of.kl_bound)} nats or less"
            yield f"SFT's best of {best_of.n}: {ours}; PPO's update {point.step}: {_score_at_kl(point, judge)}"


def _score_at_kl(scores: PolicyScores, judge: str) -> str:
    assert scores.kl is not None, "it was sampled"
    return f"{number(scores.judges[judge].mean)} at {number(scores.kl)} nats"


def _frontier_course(judge: str, points: Sequence[FrontierPoint]) -> str:
    """Return the highest and the last score of PPO's snapshots as text."""
    best = max(points, key=lambda point: point.judges[judge].mean)
    end = points[-1]
    sentence = f"Highest at update {best.step}: {_score_at_kl(best, judge)}; at the end {_score_at_kl(end, judge)}"
    tied = end.judges[judge].within_noise  # evaluations of older versions lack it
    if end is not best and tied is not None:
        sentence += ", within noise of it" if tied else ", worse by more than noise"

    return sentence


def wins(report: Report) -> Figure | None:
    """Return the chart of all win rates, sampled ones first."""
    rows = [
        WinRateRow(f"{each.pair}, {each.judge}", each.rate.value, each.rate.ci95)
        for each in report_text.win_rate_rows(report)
    ]
    if not rows:
        return None
    about = "; ".join(f"{row.label}: {percent(row.value)}" for row in rows)
    height = 0.7 + 0.25 * len(rows)

    return figure("win-rates", "Win rates", "", partial(charts.draw_win_rates, rows), size=(4.2, height), about=about)


def lengths(pairs: Sequence[ResponsePair]) -> Figure | None:
    """Return the histogram of the lengths of both policies' answers."""
    if not pairs:
        return None
    tokens = {
        "SFT": [pair.sft["length"] for pair in pairs],
        "PPO": [pair.ppo["length"] for pair in pairs],
    }
    means = ", ".join(f"{name} {number(fmean(each))}" for name, each in tokens.items())
    draw = partial(charts.draw_lengths, tokens)

    return figure("lengths", "Answer lengths", f"Mean tokens per answer: {means}.", draw)
