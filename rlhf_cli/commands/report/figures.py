"""The figures of a run: which data each one shows, and the sentence below it."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rlhf_cli.commands.report import charts
from rlhf_cli.commands.report.charts import INK, SERIES, Figure, figure
from rlhf_cli.commands.report.rules import ILL, by_cause, readings, with_values
from rlhf_cli.commands.report.tables import number, percent
from rlhf_cli.evaluation import render
from rlhf_cli.jsonl import at, is_number
from rlhf_cli.runs.read import Run, Stage

# Metrics of SFT, reward model and DPO: key, title, unit. The held-out series is drawn with it.
TRAINING = {
    "sft": (("loss", "Loss", "nats per token"), ("mean_token_accuracy", "Token accuracy", "share")),
    "reward": (("loss", "Loss", ""), ("accuracy", "Pair accuracy", "share"), ("margin", "Margin", "score")),
    "dpo": (
        ("loss", "Loss", ""), ("rewards/accuracies", "Pair accuracy", "share"), ("rewards/margins", "Margin", "nats"),
    ),
}  # fmt: skip

COLORS = (SERIES[0], SERIES[1], INK, SERIES[2], SERIES[3], SERIES[5])  # of a frontier, as charts.PAPER


def training(stage: Stage) -> list[Figure]:
    """Return the curves of a stage that TRL trains."""
    found = []
    for key, title, unit in TRAINING[stage.name]:
        series = {"training": stage.series(key), "held-out": stage.series(f"eval_{key}")}
        lines = {name: points for name, points in series.items() if points}
        if lines:
            ends = {name: dict.fromkeys((points[0], points[-1])) for name, points in lines.items()}  # of one point: one
            texts = {name: " to ".join(number(value) for _, value in points) for name, points in ends.items()}
            sentence = " ".join(f"{name.capitalize()}: {text}." for name, text in texts.items())
            final = stage.manifest.metrics.get("eval_loss") if key == "loss" else None
            if is_number(final) and final != lines.get("held-out", [(0, None)])[-1][1]:  # a run of an older version
                sentence += f" At the end, over all held-out tokens: {number(final)}; the curve averages batches."
            draw = partial(charts.draw_curves, lines, unit=unit, x="step")
            found.append(figure(f"{stage.name}-{key}", title, sentence, draw, key=key))
    return found


def ppo(run: Run) -> list[Figure]:
    """Return a card for each of PPO's metrics with a rule: unhealthy ones first, constant ones last.

    Each drawing marks the first alarm of every watchdog signal.
    """
    stage = run.stages["ppo"]
    alarms = sorted({str(row.get("signal")): row["step"] for row in reversed(run.firings)}.values())
    found = readings(stage)
    ill = [reading for reading in by_cause(found) if reading.verdict in ILL]
    cards = []
    for reading in [*ill, *(each for each in found if each not in ill)]:
        title, sentence, key, markup = reading.title, reading.sentence, reading.key, None
        if len({value for _, value in reading.points}) > 1:
            lines = {title: reading.points}
            if key == "objective/scores" and (penalized := stage.series("objective/rlhf_reward")):
                lines = {"score": reading.points, "minus the KL penalty": penalized}
            draw = partial(charts.draw_curves, lines, band=reading.band, unit=reading.rule.unit, alarms=alarms)
            markup = figure(f"ppo-{key}", title, sentence, draw).markup
        cards.append(Figure(title, sentence, markup, reading.verdict, with_values(reading.advice, stage.config), key))
    return sorted(cards, key=lambda card: card.markup is None and card.verdict not in ILL)


def report_card(card: Mapping[str, Any]) -> list[Figure]:
    """Return calibration and margins of a reward model's report card."""
    ece = f"Expected calibration error {number(card['ece'])}: the mean distance from the dashed line. "
    ece += "Larger dots have more pairs."
    edges, counts = card["margin_histogram"]["edges"], card["margin_histogram"]["counts"]
    margins = "The margin is the score of the chosen answer minus that of the rejected one. "
    margins += f"{sum(counts[: 1 + edges.index(0.0)])} of {card['n']} are below 0: the rejected answer scores higher."
    draw = partial(charts.draw_bars, counts, edges, "margin, chosen - rejected", "pairs")
    return [
        figure("card-calibration", "Calibration", ece, partial(charts.draw_calibration, card["calibration"])),
        figure("card-margins", "Margins", margins, draw),
    ]


def frontiers(report: Mapping[str, Any]) -> list[Figure]:
    """Return a panel for each judge, if there is more to draw than SFT and PPO."""
    found, points = [], (report.get("frontier") or []) if report else []
    for index, judge in enumerate(at(report, "models.sft.judges") if report and render.has_frontier(report) else ()):
        parts = [_course(judge, points)] if points else []
        others = render.other_points(report) if points else [*render.ppo_points(report), *render.other_points(report)]
        means = [(name, number(row["judges"][judge]["mean"]), number(row["kl"])) for name, row in others]
        parts += ["; ".join(f"{name}: {mean} at {kl} nats" for name, mean, kl in means)] if means else []
        if judge == "reward" and at(report, "limit.missing_eos_penalty"):
            parts.append(f"the picture shows the {render.limit_score(report)}")
        draw = partial(charts.draw_panel, judge, report, COLORS, legend=True)
        sentence = " ".join(f"{part[:1].upper()}{part[1:]}." for part in parts)
        found.append(figure(f"frontier-{index}", f"By {judge}", sentence, draw, (4.8, 3.2)))
    return found


def _course(judge: str, points: Sequence[Mapping[str, Any]]) -> str:
    """Return the highest and the last score of PPO's snapshots as text."""
    best, end = max(points, key=lambda point: point["judges"][judge]["mean"]), points[-1]
    sentence = f"Highest at update {best['step']}: {number(best['judges'][judge]['mean'])} at {number(best['kl'])} "
    sentence += f"nats; at the end {number(end['judges'][judge]['mean'])} at {number(end['kl'])} nats"
    tied = end["judges"][judge].get("within_noise")  # evaluations of older versions lack it
    if end is not best and tied is not None:
        sentence += ", within noise of it" if tied else ", worse by more than noise"
    return sentence


def wins(report: Mapping[str, Any]) -> Figure | None:
    """Return the chart of all win rates, sampled ones first."""
    rows = [(f"{pair}, {judge}", rate["value"], rate.get("ci95")) for pair, judge, rate in render.win_rate_rows(report)]
    if not rows:
        return None
    about = "; ".join(f"{label}: {percent(value)}" for label, value, _ in rows)
    draw = partial(charts.draw_win_rates, rows)
    return figure("win-rates", "Win rates", "", draw, (4.8, 0.7 + 0.25 * len(rows)), about=about)


def lengths(answers: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Return the histogram of the lengths of both policies' answers."""
    pairs = render.response_pairs(answers)
    if not pairs:
        return None
    tokens = {"SFT": [pair.sft["length"] for pair in pairs], "PPO": [pair.ppo["length"] for pair in pairs]}
    means = ", ".join(f"{name} {number(sum(each) / len(each))}" for name, each in tokens.items())
    draw = partial(charts.draw_histograms, tokens, "tokens per answer")
    return figure("lengths", "Answer lengths", f"Mean tokens per answer: {means}.", draw)
