"""Each kind of figure on the page, one function a kind."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_cli.commands.report import svg
from rlhf_cli.commands.report.health import ILL, Reading, by_cause, readings
from rlhf_cli.commands.report.rules import Band
from rlhf_cli.commands.report.runs import Run, Stage, at, is_number
from rlhf_cli.commands.report.svg import ALARM, BAND, INK, MUTED, SERIES, Drawing, drawing, mark
from rlhf_cli.commands.report.tables import lengths, number, percent, visible
from rlhf_cli.evaluation.render import win_rate_rows

Points = Sequence[tuple[float, float]]
CARD = (4.4, 2.3)  # inches: a figure of a card, whose letters are as large as the page's on a phone
ROOM = 0.15  # of the range of the values, above and below, which a healthy range may stretch


def curves(
    name: str, about: str, lines: Mapping[str, Points], *, band: Band | None = None, unit: str = "", x: str = "update",
    alarms: Sequence[int] = (),
) -> Drawing:  # fmt: skip
    """Lines over steps, a healthy range shaded behind them, a dotted line at each alarm."""

    def draw(axis: Any) -> None:
        for place, (label, points) in enumerate(lines.items()):
            dots = "o" if len(points) == 1 else None
            color = SERIES[place % len(SERIES)]
            (line,) = axis.plot(*zip(*points, strict=True), color=color, marker=dots, label=visible(label))
            mark(line, label)
        low, high = _limits([value for points in lines.values() for _, value in points])
        if band:
            _shade(axis, band, [step for step, _ in next(iter(lines.values()))], low, high)
        for step in alarms:
            mark(axis.axvline(step, color=ALARM, linestyle=":", linewidth=1), f"alarm-{step}")
        axis.set_ylim(low, high)
        axis.set(xlabel=x, ylabel=unit)
        _whole_steps(axis)
        if len(lines) > 1:
            axis.legend(loc="best")

    return drawing(name, about, CARD, draw)


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """What an axis shows: the values, with some room."""
    low, high = min(values), max(values)
    room = ROOM * (high - low) or 0.1 * abs(high) or 1.0
    return low - room, high + room


def _shade(axis: Any, band: Band, steps: Sequence[float], low: float, high: float) -> None:
    """The range as far as it can be seen: where the values are far inside, all of the panel is shaded."""
    ends = [steps[0] - 0.5, steps[0] + 0.5] if len(steps) == 1 else steps
    bottom, top = (
        [min(max(value, low), high) for value in bound] if bound else [edge] * len(steps)
        for bound, edge in ((band.low, low), (band.high, high))
    )
    twice = len(ends) // len(steps)
    mark(axis.fill_between(ends, bottom * twice, top * twice, color=BAND, linewidth=0), "healthy")


def _whole_steps(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))


def win_rate_chart(name: str, about: str, rows: Sequence[tuple[str, float, Sequence[float] | None]]) -> Drawing:
    """A row for each comparison: the share that is won, its interval, and the line of a coin's."""

    def draw(axis: Any) -> None:
        axis.axvline(0.5, color=MUTED, linestyle="--", linewidth=1)
        for place, (label, value, interval) in enumerate(rows):
            color = SERIES[0] if not interval or interval[0] > 0.5 else SERIES[1] if interval[1] < 0.5 else MUTED
            if interval:
                axis.plot(interval, [place, place], color=color, linewidth=2.2, solid_capstyle="butt")
            (dot,) = axis.plot([value], [place], "o", color=color, markersize=5)
            mark(dot, f"win-{label}")
        axis.set_yticks(range(len(rows)), [visible(label) for label, _, _ in rows], color=INK, fontsize=8)
        axis.set(xlim=(-0.02, 1.02), ylim=(len(rows) - 0.5, -0.5), xlabel="share of prompts won, with 95 % interval")
        axis.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
        axis.grid(visible=False, axis="y")

    return drawing(name, about, (4.8, 0.7 + 0.25 * len(rows)), draw)


def histograms(name: str, about: str, values: Mapping[str, Sequence[float]], x: str) -> Drawing:
    """How often each value comes, one outline a series, the same bins for all."""

    def draw(axis: Any) -> None:
        import numpy as np

        every = [value for each in values.values() for value in each]
        bins = np.histogram_bin_edges(every, bins=min(30, max(5, int(max(every) - min(every)))))
        for place, (label, each) in enumerate(values.items()):
            _, _, (outline,) = axis.hist(each, bins, histtype="stepfilled", alpha=0.35, color=SERIES[place])
            axis.hist(each, bins, histtype="step", color=SERIES[place], linewidth=1.4)
            outline.set_label(label)
            mark(outline, label)
        axis.set(xlabel=x, ylabel="answers")
        axis.legend(loc="best")

    return drawing(name, about, CARD, draw)


def bars(name: str, about: str, counts: Sequence[float], edges: Sequence[float], x: str, y: str) -> Drawing:
    """A bar for what lies below the first edge, between each two, and above the last; of like width."""

    def draw(axis: Any) -> None:
        found = axis.bar(range(len(counts)), counts, color=SERIES[0], width=0.85)
        for place, bar in enumerate(found):
            mark(bar, f"bar-{place}")
        axis.set_xticks([place + 0.5 for place in range(len(edges))], [number(edge) for edge in edges])
        axis.set(xlabel=x, ylabel=y)
        axis.grid(visible=False, axis="x")

    return drawing(name, about, CARD, draw)


def calibration(name: str, about: str, bins: Sequence[Mapping[str, float]]) -> Drawing:
    """How often a said chance comes true: on the line it would be as often as it is said."""

    def draw(axis: Any) -> None:
        axis.plot([0.5, 1], [0.5, 1], color=MUTED, linestyle="--", linewidth=1)
        most = max(each["n"] for each in bins)
        line, shares = [each["confidence"] for each in bins], [each["accuracy"] for each in bins]
        axis.plot(line, shares, color=SERIES[0], linewidth=1)
        dots = axis.scatter(line, shares, [10 + 60 * each["n"] / most for each in bins], color=SERIES[0])
        mark(dots, "calibration")
        axis.set(xlim=(0.48, 1.02), ylim=(-0.05, 1.05), xlabel="chance that the scores say", ylabel="comes true")

    return drawing(name, about, CARD, draw)


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
            drawing = curves(name, f"{title}. {told}", lines, unit=unit, x="step")
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
    return curves(figure_name(reading.key), about, lines, band=reading.band, unit=reading.unit, alarms=alarms)


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
        found.append(Figure("Calibration", calibration("card-calibration", f"Calibration. {said}", bins), said))
    if "margin_histogram" in told:
        edges, counts = told["margin_histogram"]["edges"], told["margin_histogram"]["counts"]
        wrong = sum(counts[: 1 + edges.index(0.0)])
        said = (
            "A margin is the chosen answer's score less the rejected one's, a bar the number of pairs between two. "
            f"{wrong} of {told['n']} lie below 0: there the rejected answer scores higher."
        )
        about = f"Margins between chosen and rejected answers. {said}"
        drawing = bars("card-margins", about, counts, edges, "margin, chosen less rejected", "pairs")
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
        drawing = svg.panel(f"frontier-{place}", f"{judge} over KL. {said}", judge, report)
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
    return Figure("Win rates", win_rate_chart("win-rates", f"Win rates. {told}.", found), "")


def length_figure(run: Run) -> Figure | None:
    """How long both policies' answers are."""
    found = lengths(run.answers)
    if not found or min(map(len, found.values())) == 0:
        return None
    told = ", ".join(f"{name} {number(sum(each) / len(each))}" for name, each in found.items())
    said = f"Mean tokens of an answer: {told}."
    return Figure("Lengths of the answers", histograms("lengths", said, found, "tokens of an answer"), said)
