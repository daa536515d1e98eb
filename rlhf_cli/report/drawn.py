"""The figures of a run's page, each with what it shows in words."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_cli.evaluation.render import win_rate_rows
from rlhf_cli.report import charts, frontier
from rlhf_cli.report.health import ILL, Reading, by_cause, readings
from rlhf_cli.report.runs import Run, Stage, at, is_number
from rlhf_cli.report.samples import lengths
from rlhf_cli.report.svg import Drawing
from rlhf_cli.report.texts import number, percent

# Of SFT and reward model: metric, title, unit; its evaluation is drawn beside it.
TRAINING = {
    "sft": (("loss", "Loss", "nats a token"), ("mean_token_accuracy", "Tokens guessed right", "share")),
    "reward": (("loss", "Loss", ""), ("accuracy", "Pairs told right", "share"), ("margin", "Margin", "score")),
}


@dataclass(frozen=True)
class Figure:
    """A card of the page: a figure, what it is called, and what is seen."""

    title: str
    drawing: Drawing | None
    sentence: str
    verdict: str = "none"
    advice: str = ""
    key: str = ""


def training(stage: Stage) -> list[Figure]:
    """The curves of SFT or of the reward model."""
    found = []
    for key, title, unit in TRAINING[stage.name]:
        series = {"training": stage.series(key), "held-out": stage.series(f"eval_{key}")}
        lines = {name: points for name, points in series.items() if points}
        if lines:
            told = " ".join(f"{name.capitalize()}: {_way(points)}" for name, points in lines.items())
            final = stage.told("metrics").get("eval_loss") if key == "loss" else None
            if is_number(final) and final != lines.get("held-out", [(0, None)])[-1][1]:  # of runs made before
                told += (
                    f" Over all held-out tokens, at the end: {number(final)}; the curve's is the mean of its batches."
                )
            name = f"{stage.name}-{key}"
            drawing = charts.curves(name, f"{title}. {told}", lines, unit=unit, x="step")
            found.append(Figure(title, drawing, told, key=key))
    return found


def _way(points: list[tuple[int, float]]) -> str:
    (_, first), (_, last) = points[0], points[-1]
    return f"{number(first)}." if len(points) == 1 else f"{number(first)} to {number(last)}."


def ppo(run: Run) -> list[Figure]:
    """A card for each of PPO's metrics that has a rule: first those to look at, last those that never move.

    In all of them it is marked where each of the watchdog's signals first fired.
    """
    stage, found = run.stages["ppo"], []
    alarms = sorted({str(row.get("signal")): row["step"] for row in reversed(run.firings)}.values())
    seen = readings(stage)
    ill = [reading for reading in by_cause(seen) if reading.verdict in ILL]
    for reading in [*ill, *(reading for reading in seen if reading not in ill)]:
        drawing = _curve(reading, stage, alarms) if reading.moves else None
        found.append(
            Figure(
                reading.title,
                drawing,
                reading.sentence,
                reading.verdict,
                reading.advice.text(stage.config),
                reading.key,
            )
        )
    return sorted(found, key=lambda figure: figure.drawing is None and figure.verdict not in ILL)


def _curve(reading: Reading, stage: Stage, alarms: list[int]) -> Drawing:
    lines = {reading.title: reading.points}
    if reading.key == "objective/scores" and (less := stage.series("objective/rlhf_reward")):
        lines = {"score": reading.points, "less the KL penalty": less}
    about = f"{reading.title} over updates. {reading.sentence}"
    return charts.curves(figure_name(reading.key), about, lines, band=reading.band, unit=reading.unit, alarms=alarms)


def figure_name(key: str) -> str:
    """What the figure of a metric of PPO is called within its page."""
    return "ppo-" + key.replace("/", "-").replace("_", "-")


def card(told: Mapping[str, Any]) -> list[Figure]:
    """Calibration and margins of a reward model's report card."""
    found = []
    if bins := told.get("calibration"):
        said = (
            f"Expected calibration error {number(told['ece'])}: on the mean so far from the dashed line, on which what "
            "the scores say comes true. A dot is larger where more pairs are."
        )
        found.append(Figure("Calibration", charts.calibration("card-calibration", f"Calibration. {said}", bins), said))
    if "margin_histogram" in told:
        edges, counts = told["margin_histogram"]["edges"], told["margin_histogram"]["counts"]
        wrong = sum(counts[: 1 + edges.index(0.0)])
        said = (
            "A margin is the chosen answer's score less the rejected one's, a bar the number of pairs between two. "
            f"{wrong} of {told['n']} lie below 0: there the rejected answer scores higher."
        )
        about = f"Margins between chosen and rejected answers. {said}"
        drawing = charts.bars("card-margins", about, counts, edges, "margin, chosen less rejected", "pairs")
        found.append(Figure("Margins", drawing, said))
    return found


def frontiers(report: Mapping[str, Any]) -> list[Figure]:
    """A panel for each judge, where the evaluation went along PPO's snapshots."""
    found = []
    for place, judge in enumerate(at(report, "models.sft.judges") if report.get("frontier") else ()):
        points = report["frontier"]
        best = max(points, key=lambda point: point["judges"][judge]["mean"])
        end = points[-1]
        said = (
            f"Highest at update {best['step']}: {number(best['judges'][judge]['mean'])} at {number(best['kl'])} nats; "
            f"at the end {number(end['judges'][judge]['mean'])} at {number(end['kl'])} nats"
        )
        near = end["judges"][judge].get("within_noise")  # older evaluations do not say
        if end is not best and near is not None:
            said += ", which is no difference beyond noise" if near else ", which is worse beyond noise"
        said += "."
        drawing = frontier.panel(f"frontier-{place}", f"{judge} over KL. {said}", judge, report)
        found.append(Figure(f"By {judge}", drawing, said))
    return found


def wins(report: Mapping[str, Any]) -> Figure | None:
    """Every win rate of the report, sampled ones first."""
    found = [
        (f"{pair}, {judge}{how}", rate["value"], rate.get("ci95")) for pair, how, judge, rate in win_rate_rows(report)
    ]
    if not found:
        return None
    told = "; ".join(f"{label}: {percent(value)}" for label, value, _ in found)
    return Figure("Win rates", charts.win_rates("win-rates", f"Win rates. {told}.", found), "")


def length_figure(run: Run) -> Figure | None:
    """How long both policies' answers are."""
    found = lengths(run.answers)
    if not found or min(map(len, found.values())) == 0:
        return None
    told = ", ".join(f"{name} {number(sum(each) / len(each))}" for name, each in found.items())
    said = f"Mean tokens of an answer: {told}."
    return Figure("Lengths of the answers", charts.histograms("lengths", said, found, "tokens of an answer"), said)
