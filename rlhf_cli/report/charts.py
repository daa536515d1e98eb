"""Kinds of figures of the report. Each draws on a matplotlib axis, and returns the values that it drew."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING, NamedTuple, cast

from markupsafe import Markup

from rlhf_cli.report.formats import number, visible
from rlhf_cli.report.rules import Band
from rlhf_cli.report.svg import (
    ALARM,
    BAND,
    INK,
    LINE_COLORS,
    MODEL_COLORS,
    MUTED,
    Draw,
    Mark,
    Values,
    can_be_logarithmic,
    draw_svg,
    drawn_range,
    element_id,
    mark,
)
from rlhf_cli.runs.report import CalibrationBin

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Polygon

CARD = (4.2, 2.3)  # inches; letters of 10 points are as large as a caption of the page, on a phone a little smaller
MARGIN = 0.15  # above and below the values, as a share of their range
LOG_MARGIN = 1.3  # the same on a logarithmic scale, as a factor
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Figure:
    """A figure of the page; `markup` is None if there is nothing to draw."""

    title: str
    sentence: str
    markup: Markup | None = None
    logarithmic: Markup | None = None  # the same on a logarithmic scale
    values: Values | None = None
    name: str = ""  # of its file of values
    spark: Markup | None = None  # of a figure that may be folded
    ends: str = ""  # its first and last value
    verdict: str = "none"
    advice: str = ""
    key: str = ""

    @property
    def anchor(self) -> str:
        """Return its id on the page."""
        return f"figure-{element_id(self.name)}"


def tables(figures: Iterable[Figure]) -> dict[str, list[Sequence[str | float | None]]]:
    """Return the values of each figure by its name: the columns, then the rows."""
    found = {}
    for each in figures:
        if each.values:
            found[visible(each.name)] = [each.values.columns, *each.values.rows]
    return found


def figure(
    name: str, title: str, text: str, draw: Draw, size: tuple[float, float] = CARD, *, about: str = "", key: str = ""
) -> Figure:
    """Return a figure with a drawing. `name` is unique on its page; `about` describes the drawing without seeing it."""
    drawing = draw_svg(name, f"{title}. {about or text}", size, draw)
    return Figure(title, text, drawing.markup, values=drawing.values, name=name, key=key)


def curves(
    name: str,
    title: str,
    text: str,
    lines: Mapping[str, Points],
    *,
    band: Band | None = None,
    unit: str = "",
    x: str = "update",
    alarms: Sequence[int] = (),
    key: str = "",
) -> Figure:
    """Return a figure of lines over steps, and its drawing on a logarithmic scale if the values ask for one."""
    draw = partial(draw_curves, lines, band=band, unit=unit, x=x, alarms=alarms)
    drawn = figure(name, title, text, draw, key=key)
    if not can_be_logarithmic(lines):
        return drawn
    about = f"{title}, on a logarithmic scale. {text}"
    logarithmic = draw_svg(f"{name}-log", about, CARD, partial(draw, logarithmic=True))
    return replace(drawn, logarithmic=logarithmic.markup)


# Without the axis, such as partial(draw_curves, lines), they are a Draw


def draw_curves(
    lines: Mapping[str, Points],
    axis: "Axes",
    *,
    band: Band | None = None,
    unit: str = "",
    x: str = "update",
    alarms: Sequence[int] = (),
    logarithmic: bool = False,
) -> Values:
    """Draw lines over steps, what is outside the healthy range shaded, a dotted line at each alarm."""
    from matplotlib.ticker import MaxNLocator

    for index, (label, points) in enumerate(lines.items()):
        (line,) = axis.plot(
            *zip(*points, strict=True),
            color=LINE_COLORS[index % len(LINE_COLORS)],
            marker="o" if len(points) == 1 else None,
            label=visible(label),
        )
        mark(line, label)

    values = [value for _, value in chain.from_iterable(lines.values())]
    low, high = _range_with_margin(values)
    if logarithmic:
        low, high = min(values) / LOG_MARGIN, max(values) * LOG_MARGIN
        axis.set_yscale("log")
    if band:
        first_line = next(iter(lines.values()))
        _shade(band, [step for step, _ in first_line], (low, high), axis)
    for step in alarms:
        mark(axis.axvline(step, color=ALARM, linestyle=":", linewidth=1), f"alarm-{step}")

    axis.set(xlabel=x, ylabel=unit, ylim=(low, high))
    axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    if len(lines) > 1:
        axis.legend(loc="best")

    marks: list[Mark] = []
    for label, points in lines.items():
        marks += [Mark(step, value, (label, step, value)) for step, value in points]
    return Values(("series", x, unit or "value"), marks)


def _range_with_margin(values: Sequence[float]) -> tuple[float, float]:
    """Return the visible range of values, which is not empty if they are equal."""
    low, high = drawn_range(values)
    margin = MARGIN * (high - low) or 1.0
    return low - margin, high + margin


def _shade(band: Band, steps: list[float], visible_range: tuple[float, float], axis: "Axes") -> None:
    """Shade the visible part of what is below and above a healthy range."""
    low, high = visible_range
    bottom = [min(max(value, low), high) for value in band.low]
    top = [min(max(value, low), high) for value in band.high]

    if len(steps) == 1:
        steps = [steps[0] - 0.5, steps[0] + 0.5]
        bottom *= 2
        top *= 2
    if max(bottom) > low:
        mark(axis.fill_between(steps, low, bottom, color=BAND, linewidth=0), "too-low")
    if min(top) < high:
        mark(axis.fill_between(steps, top, high, color=BAND, linewidth=0), "too-high")


class WinRateRow(NamedTuple):
    """A comparison: its name, the win rate and its interval."""

    label: str
    value: float
    interval: Sequence[float] | None

    @property
    def color(self) -> str:
        """Return the color of better, worse or undecided."""
        low, high = self.interval or (1.0, 1.0)
        if low > 0.5:
            return LINE_COLORS[0]
        return LINE_COLORS[1] if high < 0.5 else MUTED


def draw_win_rates(rows: Sequence[WinRateRow], axis: "Axes") -> Values:
    """Draw a row for each comparison: the win rate, its interval, and the line of one half."""
    axis.axvline(0.5, color=MUTED, linestyle="--", linewidth=1)
    for y, row in enumerate(rows):
        if row.interval:
            axis.plot(row.interval, [y, y], color=row.color, linewidth=2.2, solid_capstyle="butt")
        (dot,) = axis.plot([row.value], [y], "o", color=row.color, markersize=5)
        mark(dot, f"win-{row.label}")

    labels = [visible(row.label) for row in rows]
    axis.set_yticks(range(len(rows)), labels, color=INK, fontsize=9)
    axis.set(xlim=(-0.02, 1.02), ylim=(len(rows) - 0.5, -0.5), xlabel="win rate with 95 % interval")
    axis.set_xticks([0, 0.5, 1], ["0", "50 %", "100 %"])
    axis.grid(visible=False, axis="y")

    marks = []
    for y, row in enumerate(rows):
        low, high = row.interval or (None, None)
        marks.append(Mark(row.value, y, (row.label, row.value, low, high)))
    return Values(("comparison", "win rate", "from", "to"), marks)


def draw_lengths(values: Mapping[str, Sequence[float]], axis: "Axes") -> Values:
    """Draw one outline of the answers' lengths per series, with the same bins."""
    import numpy as np

    pooled = list(chain.from_iterable(values.values()))
    spread = int(max(pooled) - min(pooled))
    bins: list[float] = np.histogram_bin_edges(pooled, bins=min(30, max(5, spread))).tolist()
    marks: list[Mark] = []
    for label, series in values.items():
        color = MODEL_COLORS[label]
        _, _, filled = axis.hist(series, bins, histtype="stepfilled", alpha=0.35, color=color)
        axis.hist(series, bins, histtype="step", color=color, linewidth=1.4)
        (outline,) = cast("list[Polygon]", filled)
        outline.set_label(label)
        mark(outline, label)
        counts = np.histogram(series, bins)[0].tolist()
        for low, high, count in zip(bins[:-1], bins[1:], counts, strict=True):
            marks.append(Mark((low + high) / 2, count, (label, low, high, count)))
    axis.set(xlabel="tokens per answer", ylabel="answers")
    axis.legend(loc="best")
    return Values(("policy", "from token", "to token", "answers"), marks)


def draw_margins(counts: Sequence[float], edges: Sequence[float], axis: "Axes") -> Values:
    """Draw the pairs by margin as bars whose area is their number; the outer bars are open, and as wide as the next."""
    widths = _widths(edges)
    lefts = [edges[0] - widths[0], *edges]
    heights = [count / width for count, width in zip(counts, widths, strict=True)]
    bars = axis.bar(lefts, heights, [0.97 * width for width in widths], align="edge", color=LINE_COLORS[0])
    for index, bar in enumerate(bars):
        mark(bar, f"bar-{index}")
    axis.set_xticks(edges, [number(edge) for edge in edges])
    axis.set(xlabel="margin, chosen - rejected", ylabel="pairs per 1 of margin")
    axis.grid(visible=False, axis="x")

    lows = [None, *edges]
    highs = [*edges, None]
    rows = zip(lows, highs, counts, strict=True)
    middles = [left + width / 2 for left, width in zip(lefts, widths, strict=True)]
    marks = [Mark(x, height, ("margin", *row)) for x, height, row in zip(middles, heights, rows, strict=True)]
    return Values(("series", "from", "to", "pairs"), marks)


def _widths(edges: Sequence[float]) -> list[float]:
    """Return the width of each bar of a histogram with open ends."""
    inner = [high - low for low, high in pairwise(edges)] or [1.0]  # without two edges, any
    return [inner[0], *inner[: len(edges) - 1], inner[-1]]


def draw_calibration(bins: Sequence[CalibrationBin], axis: "Axes") -> Values:
    """Draw accuracy over confidence, and the diagonal of perfect calibration."""
    most = max(each.n for each in bins)
    confidence = [each.confidence for each in bins]
    accuracy = [each.accuracy for each in bins]
    sizes = [10 + 60 * each.n / most for each in bins]

    axis.plot([0.5, 1], [0.5, 1], color=MUTED, linestyle="--", linewidth=1)
    axis.plot(confidence, accuracy, color=LINE_COLORS[0], linewidth=1)
    dots = axis.scatter(confidence, accuracy, sizes, color=LINE_COLORS[0])
    mark(dots, "calibration")
    axis.set(xlim=(0.48, 1.02), ylim=(-0.05, 1.05), xlabel="confidence of the scores", ylabel="accuracy")

    rows = zip(confidence, accuracy, [each.n for each in bins], strict=True)
    marks = [Mark(row[0], row[1], ("bin", *row)) for row in rows]
    return Values(("series", "confidence", "accuracy", "pairs"), marks)
