"""Figures of the report, drawn by matplotlib as SVG elements of a page: nothing is loaded, colors follow the page."""

import io
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from markupsafe import Markup, escape

from rlhf_cli.report.formats import number, visible
from rlhf_cli.report.rules import Band
from rlhf_cli.runs.report import CalibrationBin

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas
    from matplotlib.patches import Polygon

# Placeholder colors, replaced by the page's own, which follow light and dark mode.
INK = "#010203"
MUTED = "#010204"
GRID = "#010205"
BAND = "#010206"
LINE_COLORS = ("#010211", "#010212", "#010213", "#010214", "#010215", "#010216")
ALARM = "#010221"
VARIABLES = {INK: "currentColor", MUTED: "var(--muted)", GRID: "var(--grid)", BAND: "var(--band)", ALARM: "var(--bad)"}
VARIABLES |= {color: f"var(--line-{index})" for index, color in enumerate(LINE_COLORS, start=1)}
STYLE = Path(__file__).with_name("charts.mplstyle")
ID = re.compile(r' id="([^"]*)"')
USED = re.compile(r'(?:href="#|url\(#)([^")]+)')
SERIES_ID = "series-"  # prefix of the group of a line, a bar or an interval
CARD = (4.4, 2.3)  # inches; on a phone its letters are as large as those of the page
MARGIN = 0.15  # above and below the values, as a share of their range
Points = Sequence[tuple[float, float]]
Draw = Callable[["Axes"], None]  # draws on a matplotlib axis


@dataclass(frozen=True)
class Figure:
    """A figure of the page; `markup` is None if there is nothing to draw."""

    title: str
    sentence: str
    markup: Markup | None
    verdict: str = "none"
    advice: str = ""
    key: str = ""


def figure(
    name: str, title: str, text: str, draw: Draw, size: tuple[float, float] = CARD, *, about: str = "", key: str = ""
) -> Figure:
    """Return a figure with a drawing. `name` is unique on its page; `about` describes the drawing without seeing it."""
    return Figure(title, text, draw_svg(name, f"{title}. {about or text}", size, draw), key=key)


# SVG


def draw_svg(name: str, about: str, size: tuple[float, float], draw: Draw) -> Markup:
    """Draw one panel of `size` inches as an SVG element whose ids begin with `name`, such as `ppo-val/ratio`."""
    omitted = ("Creator", "Date", "Format", "Type")
    svg = render(size, lambda canvas: draw(canvas.subplots()), omitted=omitted, style=STYLE, transparent=True)
    return Markup(_inline(svg, re.sub("[/_]", "-", name), visible(about)))


def render(
    size: tuple[float, float],
    draw: Callable[["Canvas"], None],
    *,
    omitted: Sequence[str],
    style: Path | None = None,
    **options: Any,
) -> str:
    """Return the SVG file of a drawing on a figure, without some metadata, in matplotlib's default style or `style`."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it logs its search for fonts
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    settings = matplotlib.rc_params_from_file(style, use_default_template=False) if style else {}
    picture = io.StringIO()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # not the user's settings: equal figures are equal bytes
        matplotlib.rcParams.update({**settings, "svg.hashsalt": "rlhf"})
        canvas = Canvas(figsize=size, layout="constrained")
        draw(canvas)
        canvas.savefig(picture, format="svg", metadata=dict.fromkeys(omitted), **options)
    return picture.getvalue()


def _inline(svg: str, name: str, about: str) -> str:
    """Return matplotlib's SVG file as an element of a page. Only ids in use, and those of series, are kept."""
    body = svg[svg.index("<svg") :]
    box = re.search(r'viewBox="([^"]*)"', body)
    assert box, "matplotlib gives a figure a size"
    body = body[body.index(">") + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", body, flags=re.S)
    body = body.replace("xlink:href", "href")
    body = re.sub(r"font-family: [^;\"]*;?", "", body)
    body = re.sub(r"font: (\d+px)[^;\"]*", r"font-size: \1", body)
    body = _with_short_ids(body, name)
    for color, variable in VARIABLES.items():
        body = body.replace(color, variable)
    body = re.sub(r"\n\s*", "\n", body).strip()

    return f'<svg class="figure" viewBox="{box[1]}" role="img" aria-label="{escape(about)}">\n{body}'


def _with_short_ids(body: str, name: str) -> str:
    """Return an element whose ids begin with `name`, without those that are not used."""
    used = set(USED.findall(body))
    seen = set[str]()

    def rename(match: re.Match[str]) -> str:
        old = match[1]
        if old not in used and not old.startswith(SERIES_ID):
            return ""
        while old in seen:  # two series may have the same name
            old += "-again"
        seen.add(old)

        return f' id="{name}-{old}"'

    return re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", ID.sub(rename, body))


def mark(artist: "Artist", name: str) -> None:
    """Name the SVG group of an artist."""
    artist.set_gid(SERIES_ID + re.sub(r"\W+", "-", visible(name)))


# Kinds of drawings: without the axis, such as partial(draw_curves, lines), they are a Draw


def draw_curves(
    lines: Mapping[str, Points],
    axis: "Axes",
    *,
    band: Band | None = None,
    unit: str = "",
    x: str = "update",
    alarms: Sequence[int] = (),
) -> None:
    """Draw lines over steps, the healthy range shaded, a dotted line at each alarm."""
    from matplotlib.ticker import MaxNLocator

    for index, (label, points) in enumerate(lines.items()):
        (line,) = axis.plot(
            *zip(*points, strict=True),
            color=LINE_COLORS[index % len(LINE_COLORS)],
            marker="o" if len(points) == 1 else None,
            label=visible(label),
        )
        mark(line, label)

    low, high = _range_with_margin([value for _, value in chain.from_iterable(lines.values())])
    if band:
        first_line = next(iter(lines.values()))
        _shade(band, [step for step, _ in first_line], (low, high), axis)
    for step in alarms:
        mark(axis.axvline(step, color=ALARM, linestyle=":", linewidth=1), f"alarm-{step}")

    axis.set(xlabel=x, ylabel=unit, ylim=(low, high))
    axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    if len(lines) > 1:
        axis.legend(loc="best")


def _range_with_margin(values: Sequence[float]) -> tuple[float, float]:
    """Return the visible range of values, which is not empty if they are equal."""
    low = min(values)
    high = max(values)
    margin = MARGIN * (high - low) or 0.1 * abs(high) or 1.0
    return low - margin, high + margin


def _shade(band: Band, steps: list[float], visible_range: tuple[float, float], axis: "Axes") -> None:
    """Shade the visible part of a healthy range."""
    low, high = visible_range
    bottom = [min(max(value, low), high) for value in band.low]
    top = [min(max(value, low), high) for value in band.high]

    if len(steps) == 1:
        steps = [steps[0] - 0.5, steps[0] + 0.5]
        bottom *= 2
        top *= 2
    mark(axis.fill_between(steps, bottom, top, color=BAND, linewidth=0), "healthy")


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


def draw_win_rates(rows: Sequence[WinRateRow], axis: "Axes") -> None:
    """Draw a row for each comparison: the win rate, its interval, and the line of one half."""
    axis.axvline(0.5, color=MUTED, linestyle="--", linewidth=1)
    for y, row in enumerate(rows):
        if row.interval:
            axis.plot(row.interval, [y, y], color=row.color, linewidth=2.2, solid_capstyle="butt")
        (dot,) = axis.plot([row.value], [y], "o", color=row.color, markersize=5)
        mark(dot, f"win-{row.label}")

    labels = [visible(row.label) for row in rows]
    axis.set_yticks(range(len(rows)), labels, color=INK, fontsize=8)
    axis.set(xlim=(-0.02, 1.02), ylim=(len(rows) - 0.5, -0.5), xlabel="win rate with 95 % interval")
    axis.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    axis.grid(visible=False, axis="y")


def draw_lengths(values: Mapping[str, Sequence[float]], axis: "Axes") -> None:
    """Draw one outline of the answers' lengths per series, with the same bins."""
    import numpy as np

    pooled = list(chain.from_iterable(values.values()))
    spread = int(max(pooled) - min(pooled))
    bins: list[float] = np.histogram_bin_edges(pooled, bins=min(30, max(5, spread))).tolist()
    for index, (label, series) in enumerate(values.items()):
        color = LINE_COLORS[index]
        _, _, filled = axis.hist(series, bins, histtype="stepfilled", alpha=0.35, color=color)
        axis.hist(series, bins, histtype="step", color=color, linewidth=1.4)
        (outline,) = cast("list[Polygon]", filled)
        outline.set_label(label)
        mark(outline, label)
    axis.set(xlabel="tokens per answer", ylabel="answers")
    axis.legend(loc="best")


def draw_margins(counts: Sequence[float], edges: Sequence[float], axis: "Axes") -> None:
    """Draw the pairs by margin as bars of equal width: below the first edge, between each two, and above the last."""
    bars = axis.bar(range(len(counts)), counts, color=LINE_COLORS[0], width=0.85)
    for index, bar in enumerate(bars):
        mark(bar, f"bar-{index}")
    places = [index + 0.5 for index in range(len(edges))]
    axis.set_xticks(places, [number(edge) for edge in edges])
    axis.set(xlabel="margin, chosen - rejected", ylabel="pairs")
    axis.grid(visible=False, axis="x")


def draw_calibration(bins: Sequence[CalibrationBin], axis: "Axes") -> None:
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
