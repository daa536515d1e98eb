"""Drawings of matplotlib as SVG elements of a page: nothing is loaded, colors follow the page, values show on hover."""

import io
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from markupsafe import Markup, escape

from rlhf_cli.report.formats import number, visible

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

# Placeholder colors, replaced by the page's own, which follow light and dark mode.
INK = "#010203"
MUTED = "#010204"
GRID = "#010205"
BAND = "#010206"
LINE_COLORS = ("#010211", "#010212", "#010213", "#010214", "#010215", "#010216")
MODEL_COLORS = {"PPO": LINE_COLORS[0], "SFT": LINE_COLORS[1]}  # in every figure, and in the answers
ALARM = "#010221"
VARIABLES = {INK: "currentColor", MUTED: "var(--muted)", GRID: "var(--grid)", BAND: "var(--band)", ALARM: "var(--bad)"}
VARIABLES |= {color: f"var(--line-{index})" for index, color in enumerate(LINE_COLORS, start=1)}
STYLE = Path(__file__).with_name("charts.mplstyle")
ID = re.compile(r' id="([^"]*)"')
USED = re.compile(r'(?:href="#|url\(#)([^")]+)')
SERIES_ID = "series-"  # prefix of the group of a line, a bar or an interval
POINTS_PER_INCH = 72  # of an SVG file by matplotlib
LEAST_SPREAD = 0.1  # of the values that are drawn, as a share of the largest
MAX_SPOTS = 200  # places of a figure that show a value: a long log would make the page heavy


class Mark(NamedTuple):
    """A value of a drawing: its place on the axes, and its row of the figure's table."""

    x: float
    y: float
    cells: Sequence[str | float | None]


class Values(NamedTuple):
    """All values of a drawing, as a table. The first column names the series."""

    columns: Sequence[str]
    marks: Sequence[Mark]

    @property
    def rows(self) -> list[Sequence[str | float | None]]:
        return [mark.cells for mark in self.marks]


Draw = Callable[["Axes"], Values]  # draws on a matplotlib axis, and returns what it drew


class Drawing(NamedTuple):
    """An SVG element, and its values."""

    markup: Markup
    values: Values


def draw_svg(name: str, about: str, size: tuple[float, float], draw: Draw) -> Drawing:
    """Draw one panel of `size` inches as an SVG element whose ids begin with `name`, such as `ppo-val/ratio`."""
    drawn: list[Values] = []
    canvases: list[Canvas] = []

    def draw_on(canvas: "Canvas") -> None:
        canvases.append(canvas)
        drawn.append(draw(canvas.subplots()))

    omitted = ("Creator", "Date", "Format", "Type")
    svg = render(size, draw_on, omitted=omitted, style=STYLE, transparent=True)
    spots = _spots(drawn[0], canvases[0])
    return Drawing(Markup(_inline(svg, element_id(name), visible(about), spots)), drawn[0])


def element_id(name: str) -> str:
    """Return the name of a figure as an id."""
    return re.sub(r"[^\w.-]|_", "-", visible(name))


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


def mark(artist: "Artist", name: str) -> None:
    """Name the SVG group of an artist."""
    artist.set_gid(SERIES_ID + re.sub(r"\W+", "-", visible(name)))


# Values on hover


def _spots(values: Values, canvas: "Canvas") -> str:
    """Return a circle for each value, at its place, with its text as a title; of a long log for some of them."""
    (axis,) = canvas.axes
    scale = POINTS_PER_INCH / canvas.dpi
    height = canvas.get_figheight() * POINTS_PER_INCH
    every = math.ceil(len(values.marks) / MAX_SPOTS)

    circles = []
    for each in values.marks[:: every or 1]:
        x, y = axis.transData.transform((each.x, each.y)) * scale
        if math.isfinite(y):
            circles.append(spot(x, height - y, spot_text(values.columns, each.cells)))
    return "".join(circles)


def spot(x: float, y: float, text: str) -> str:
    """Return a place of a figure that shows a text on hover."""
    return f'<circle class="spot" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{escape(visible(text))}</title></circle>'


def spot_text(columns: Sequence[str], cells: Sequence[str | float | None]) -> str:
    """Return a row of a figure's table as text: `training: step 3, loss 0.5`; without a series only its values."""
    series, *rest = cells
    parts = []
    for column, cell in zip(columns[1:], rest, strict=True):
        if cell is not None:
            parts.append(f"{column} {cell if isinstance(cell, str) else number(cell)}")
    values = ", ".join(parts)
    return f"{series}: {values}" if series else values


# Matplotlib's SVG file as an element of a page


def _inline(svg: str, name: str, about: str, spots: str) -> str:
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
    body = re.sub(r"\n\s*", "\n", body).strip().removesuffix("</svg>")

    return f'<svg class="figure" viewBox="{box[1]}" role="img" aria-label="{escape(about)}">\n{body}{spots}</svg>'


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


# Sparklines

SPARK = (140, 36)  # pixels
EDGE = 4


def sparkline(about: str, columns: Sequence[str], points: Sequence[tuple[float, float]]) -> Markup | None:
    """Return a line without axes through two or more points; None for fewer."""
    if len(points) < 2:
        return None
    width, height = SPARK
    across = _placer((points[0][0], points[-1][0]), EDGE, width - EDGE)
    up = _placer(drawn_range([y for _, y in points]), height - EDGE, EDGE)
    every = math.ceil(len(points) / MAX_SPOTS)

    places = [(across(x), up(y)) for x, y in points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    circles = []
    for (x, y), point in list(zip(places, points, strict=True))[::every]:
        circles.append(spot(x, y, spot_text(columns, ["", *point])))
    last_x, last_y = places[-1]
    values = f"{number(points[0][1])} to {number(points[-1][1])}"
    return Markup(
        f'<svg class="figure spark" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(visible(about))}: {values}"><polyline points="{path}"/>'
        f'<circle class="end" cx="{last_x:.1f}" cy="{last_y:.1f}" r="2.5"/>{"".join(circles)}</svg>'
    )


def _placer(values: tuple[float, float], start: float, end: float) -> Callable[[float], float]:
    """Return the function that maps the range of values to the range from start to end."""
    low, high = values
    if low == high:
        return lambda _: (start + end) / 2
    return lambda value: start + (end - start) * (value - low) / (high - low)


def drawn_range(values: Sequence[float]) -> tuple[float, float]:
    """Return the lowest and highest value that is drawn, not so close that a small change looks like a large one."""
    low = min(values)
    high = max(values)
    missing = max(0.0, LEAST_SPREAD * max(abs(low), abs(high)) - (high - low))
    return low - missing / 2, high + missing / 2


def can_be_logarithmic(lines: Mapping[str, Sequence[tuple[float, float]]]) -> bool:
    """Return True if all values are positive and differ by a factor of ten."""
    values = [value for points in lines.values() for _, value in points]
    return min(values) > 0 and max(values) >= 10 * min(values)
