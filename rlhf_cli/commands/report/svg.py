"""From a matplotlib figure to SVG inside a page: no ids of two figures alike, nothing loaded, colours of the page's."""

import io
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from rlhf_cli.commands.report.tables import visible
from rlhf_cli.files import write_text

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


PAPER = ("#1f5fa8", "#d1660a", "black")  # of PPO, of SFT's best of n, of the ring: in a file of its own
ON_A_PAGE = (SERIES[0], SERIES[1], INK)
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 40, 50, 75, 100, 150, 200, 300, 500, 1000)
Place = tuple[float, Mapping[str, Any]]  # KL, and what judges say there


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Write `path` as SVG: a panel a judge, its mean with interval over KL on a square-root scale.

    So Gao et al. 2023 (arXiv 2210.10760, section 3) draw over-optimisation: what is trained on rises with the square
    root of KL, the true quality rises and falls.
    """
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it tells that it looks for fonts
    import matplotlib
    from matplotlib.figure import Figure

    judges = list(report["models"]["sft"]["judges"])
    with matplotlib.rc_context({"svg.hashsalt": "rlhf"}):  # the same report is the same file
        figure = Figure(figsize=(0.8 + 4.4 * len(judges), 4.0), layout="constrained")
        axes = figure.subplots(1, len(judges), squeeze=False)[0]
        for axis, judge in zip(axes, judges, strict=True):
            _panel(axis, judge, report, PAPER)
        handles, labels = axes[0].get_legend_handles_labels()
        columns = len(labels) if len(judges) > 1 else 1
        handles, labels = handles[::-1], labels[::-1]  # PPO first
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
        picture = io.StringIO()
        figure.savefig(picture, format="svg", metadata={"Date": None})
    write_text(path, picture.getvalue())


def panel(name: str, about: str, judge: str, report: Mapping[str, Any]) -> Drawing:
    """One judge's panel as a figure of a page."""

    def fill(axis: Any) -> None:
        _panel(axis, judge, report, ON_A_PAGE)
        axis.set_title(visible(judge))
        handles, labels = axis.get_legend_handles_labels()
        axis.legend(handles[::-1], labels[::-1], loc="best")

    return drawing(name, about, (4.8, 3.2), fill)


def _panel(axis: Any, judge: str, report: Mapping[str, Any], colors: tuple[str, str, str]) -> None:
    ours, others, ink = colors
    start: Place = (0.0, report["models"]["sft"])
    # An estimate of a KL near 0 may be negative.
    along: list[Place] = [start, *((max(0.0, point["kl"]), point) for point in report["frontier"])]
    tried: list[Place] = [start, *((row["kl_bound"], row) for row in report.get("best_of", []))]
    _line(axis, judge, tried, "s--", others, "SFT and its best of n, at its bound on KL")
    _line(axis, judge, along, "o-", ours, "PPO, along its updates")
    for kl, point in along[1:]:
        if point["step"] == report.get("selected_step"):
            label = f"selected: update {point['step']}"
            (ring,) = axis.plot(
                kl, point["judges"][judge]["mean"], "o", ms=13, fillstyle="none", color=ink, label=label
            )
            mark(ring, label)
    farthest = max(kl for kl, _ in along + tried) or 1.0
    axis.set_xscale("function", functions=(_root, _square))
    end = 1.07 * farthest
    axis.set_xlim(-end / 800, end)
    axis.set_xticks(_ticks(end), [f"{tick:g}" for tick in _ticks(end)])
    axis.set(xlabel="KL from SFT, nats an answer (square-root scale)", title=judge)
    axis.grid(alpha=0.3)


def _line(axis: Any, judge: str, places: Sequence[Place], style: str, color: str, label: str) -> None:
    told = [row["judges"][judge] for _, row in places]
    means = [each["mean"] for each in told]
    errors = [[abs(each["ci95"][side] - each["mean"]) for each in told] for side in (0, 1)]
    kl = [kl for kl, _ in places]
    how: dict[str, Any] = {"capsize": 2, "linewidth": 1.2, "markersize": 4}
    (dots, _, _) = axis.errorbar(kl, means, yerr=errors, fmt=style, color=color, label=label, **how)
    mark(dots, label)


def _ticks(end: float) -> list[float]:
    """Round numbers that stand apart on the scale."""
    found = [0.0]
    for tick in TICKS:
        if tick <= end and math.sqrt(tick) - math.sqrt(found[-1]) > 0.07 * math.sqrt(end):
            found.append(tick)
    return found


def _root(values: Any) -> Any:
    """The square root, continued to the left of 0, where the axis begins."""
    import numpy as np

    return np.sign(values) * np.sqrt(np.abs(values))


def _square(values: Any) -> Any:
    import numpy as np

    return np.sign(values) * np.square(values)
