"""From a matplotlib figure to SVG inside a page: no ids of two figures alike, nothing loaded, colours of the page's."""

import io
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from rlhf_cli.report.texts import visible

# Drawn in these, which nothing else has, and replaced by the page's own colours, which follow light and dark.
INK, MUTED, GRID, BAND = "#010203", "#010204", "#010205", "#010206"
SERIES = ("#010211", "#010212", "#010213", "#010214", "#010215", "#010216")
ALARM = "#010221"
VARIABLES = {INK: "currentColor", MUTED: "var(--muted)", GRID: "var(--grid)", BAND: "var(--band)", ALARM: "var(--bad)"}
VARIABLES |= {color: f"var(--line-{place})" for place, color in enumerate(SERIES, start=1)}
THEME: dict[Any, Any] = {
    "svg.hashsalt": "rlhf",  # the same run is the same page
    "svg.fonttype": "none",
    "text.parse_math": False,  # a judge may be called $x$
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.titlesize": 10,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "grid.color": GRID,
    "grid.linewidth": 0.5,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.4,
}
ID = re.compile(r' id="([^"]*)"')
USED = re.compile(r'(?:href="#|url\(#)([^")]+)')
SERIES_ID = "series-"  # the group of a line, a bar or an interval that a test, or a reader of the source, looks for


@dataclass(frozen=True)
class Drawing:
    """A figure as it stands in the page. `about` says what it shows, for those who do not see it."""

    name: str
    about: str
    markup: Markup


def drawing(name: str, about: str, size: tuple[float, float], draw: Callable[[Any], None]) -> Drawing:
    """A figure of `size` inches with one panel, which `draw` fills. `name` is unique on its page."""
    with style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=size, layout="constrained")
        draw(figure.subplots())
        picture = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(picture, format="svg", metadata=nothing, transparent=True)
    return Drawing(name, visible(about), Markup(inline(picture.getvalue(), name, visible(about))))


@contextmanager
def style() -> Iterator[None]:
    """Within, matplotlib draws as the page looks."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it tells that it looks for fonts
    import matplotlib

    with matplotlib.rc_context(THEME):
        yield


def inline(svg: str, name: str, about: str) -> str:
    """matplotlib's SVG file as an element of a page."""
    body = svg[svg.index("<svg") :]
    box = re.search(r'viewBox="([^"]*)"', body)
    assert box, "matplotlib gives a figure a size"
    body = body[body.index(">") + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", body, flags=re.S)
    body = body.replace("xlink:href", "href")
    body = re.sub(
        r"font-family: [^;\"]*;?|font: (\d+px)[^;\"]*", lambda told: f"font-size: {told[1]}" if told[1] else "", body
    )
    body = ID.sub(_Ids(name, set(USED.findall(body))), body)
    body = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", body)
    for color, variable in VARIABLES.items():
        body = body.replace(color, variable)
    body = re.sub(r"\n\s*", "\n", body).strip()
    return f'<svg class="figure" viewBox="{box[1]}" role="img" aria-label="{escape(about)}">\n{body}'


class _Ids:
    """Keeps the ids that something refers to and those of series, each once: two series may be called alike."""

    def __init__(self, name: str, used: set[str]) -> None:
        self.name, self.used, self.given = name, used, set[str]()

    def __call__(self, found: re.Match[str]) -> str:
        told = found[1]
        if told not in self.used and not told.startswith(SERIES_ID):
            return ""
        while told in self.given:
            told += "-again"
        self.given.add(told)
        return f' id="{self.name}-{told}"'


def mark(artist: Any, name: str) -> None:
    """Name the group of an artist, so that it can be found in the page."""
    artist.set_gid(SERIES_ID + re.sub(r"\W+", "-", visible(name)))
