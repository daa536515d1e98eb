"""Figures of the report, drawn by matplotlib as SVG elements of a page: nothing is loaded, colors follow the page."""

import io
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup, escape

from rlhf_cli.commands.report.rules import Band
from rlhf_cli.commands.report.tables import number, visible
from rlhf_cli.evaluation.render import other_policies, ppo_points
from rlhf_cli.files import write_text

# Placeholder colors, replaced by the page's own, which follow light and dark mode.
INK, MUTED, GRID, BAND = "#010203", "#010204", "#010205", "#010206"
SERIES = ("#010211", "#010212", "#010213", "#010214", "#010215", "#010216")
ALARM = "#010221"
VARIABLES = {INK: "currentColor", MUTED: "var(--muted)", GRID: "var(--grid)", BAND: "var(--band)", ALARM: "var(--bad)"}
VARIABLES |= {color: f"var(--line-{index})" for index, color in enumerate(SERIES, start=1)}
STYLE = Path(__file__).with_name("charts.mplstyle")
ID = re.compile(r' id="([^"]*)"')
USED = re.compile(r'(?:href="#|url\(#)([^")]+)')
SERIES_ID = "series-"  # prefix of the group of a line, a bar or an interval
CARD = (4.4, 2.3)  # inches; on a phone its letters are as large as those of the page
MARGIN = 0.15  # above and below the values, as a share of their range
Points = Sequence[tuple[float, float]]
Draw = Callable[[Any], None]  # draws on a matplotlib axis


@dataclass(frozen=True)
class Figure:
    """A card of the page; `markup` is None if there is nothing to draw."""

    title: str
    sentence: str
    markup: Markup | None
    verdict: str = "none"
    advice: str = ""
    key: str = ""


def figure(
    name: str, title: str, text: str, draw: Draw, size: tuple[float, float] = CARD, *, about: str = "", key: str = ""
) -> Figure:
    """Return a card with a drawing. `name` is unique on its page; `about` describes the drawing without seeing it."""
    return Figure(title, text, draw_svg(name, f"{title}. {about or text}", size, draw), key=key)


# SVG


def draw_svg(name: str, about: str, size: tuple[float, float], draw: Draw) -> Markup:
    """Draw one panel of `size` inches as an SVG element whose ids begin with `name`, such as `ppo-val/ratio`."""
    omitted = ("Creator", "Date", "Format", "Type")
    svg = _render(size, lambda canvas: draw(canvas.subplots()), omitted, STYLE, transparent=True)
    return Markup(_inline(svg, re.sub("[/_]", "-", name), visible(about)))


def _render(
    size: tuple[float, float], draw: Draw, omitted: Sequence[str], style: Path | None = None, **options: Any
) -> str:
    """Return the SVG file of a drawing on a figure, without some metadata; default style: the user's settings."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it logs its search for fonts
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    settings = matplotlib.rc_params_from_file(style, use_default_template=False) if style else {}
    picture = io.StringIO()
    with matplotlib.rc_context({**settings, "svg.hashsalt": "rlhf"}):  # equal figures are equal bytes
        draw(canvas := Canvas(figsize=size, layout="constrained"))
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
    size = r"font-family: [^;\"]*;?|font: (\d+px)[^;\"]*"
    body = re.sub(size, lambda match: f"font-size: {match[1]}" if match[1] else "", body)
    used, seen = set(USED.findall(body)), set[str]()

    def rename(match: re.Match[str]) -> str:
        old = match[1]
        if old not in used and not old.startswith(SERIES_ID):
            return ""
        while old in seen:  # two series may have the same name
            old += "-again"
        seen.add(old)
        return f' id="{name}-{old}"'

    body = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", ID.sub(rename, body))
    for color, variable in VARIABLES.items():
        body = body.replace(color, variable)
    body = re.sub(r"\n\s*", "\n", body).strip()
    return f'<svg class="figure" viewBox="{box[1]}" role="img" aria-label="{escape(about)}">\n{body}'


def mark(artist: Any, name: str) -> None:
    """Name the SVG group of an artist."""
    artist.set_gid(SERIES_ID + re.sub(r"\W+", "-", visible(name)))


# Kinds of drawings: without the axis, such as partial(draw_curves, lines), they are a Draw


def draw_curves(
    lines: Mapping[str, Points], axis: Any, *, band: Band | None = None, unit: str = "", x: str = "update",
    alarms: Sequence[int] = (),
) -> None:  # fmt: skip
    """Draw lines over steps, the healthy range shaded, a dotted line at each alarm."""
    from matplotlib.ticker import MaxNLocator

    for index, (label, points) in enumerate(lines.items()):
        dots, color = "o" if len(points) == 1 else None, SERIES[index % len(SERIES)]
        (line,) = axis.plot(*zip(*points, strict=True), color=color, marker=dots, label=visible(label))
        mark(line, label)
    values = [value for points in lines.values() for _, value in points]
    margin = MARGIN * (max(values) - min(values)) or 0.1 * abs(max(values)) or 1.0
    low, high = min(values) - margin, max(values) + margin
    if band:  # shade its visible part
        steps: list[float] = [step for step, _ in next(iter(lines.values()))]
        bottom, top = ([min(max(value, low), high) for value in bound] for bound in band)
        if len(steps) == 1:
            steps, bottom, top = [steps[0] - 0.5, steps[0] + 0.5], bottom * 2, top * 2
        mark(axis.fill_between(steps, bottom, top, color=BAND, linewidth=0), "healthy")
    for step in alarms:
        mark(axis.axvline(step, color=ALARM, linestyle=":", linewidth=1), f"alarm-{step}")
    axis.set(xlabel=x, ylabel=unit, ylim=(low, high))
    axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    if len(lines) > 1:
        axis.legend(loc="best")


def draw_win_rates(rows: Sequence[tuple[str, float, Sequence[float] | None]], axis: Any) -> None:
    """Draw a row for each comparison: the win rate, its interval, and the line of one half."""
    axis.axvline(0.5, color=MUTED, linestyle="--", linewidth=1)
    for y, (label, value, interval) in enumerate(rows):
        color = SERIES[0] if not interval or interval[0] > 0.5 else SERIES[1] if interval[1] < 0.5 else MUTED
        if interval:
            axis.plot(interval, [y, y], color=color, linewidth=2.2, solid_capstyle="butt")
        (dot,) = axis.plot([value], [y], "o", color=color, markersize=5)
        mark(dot, f"win-{label}")
    axis.set_yticks(range(len(rows)), [visible(label) for label, _, _ in rows], color=INK, fontsize=8)
    axis.set(xlim=(-0.02, 1.02), ylim=(len(rows) - 0.5, -0.5), xlabel="win rate with 95 % interval")
    axis.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    axis.grid(visible=False, axis="y")


def draw_histograms(values: Mapping[str, Sequence[float]], x: str, axis: Any) -> None:
    """Draw one outline per series, with the same bins."""
    import numpy as np

    pooled = [value for series in values.values() for value in series]
    bins = np.histogram_bin_edges(pooled, bins=min(30, max(5, int(max(pooled) - min(pooled)))))
    for index, (label, series) in enumerate(values.items()):
        _, _, (outline,) = axis.hist(series, bins, histtype="stepfilled", alpha=0.35, color=SERIES[index])
        axis.hist(series, bins, histtype="step", color=SERIES[index], linewidth=1.4)
        outline.set_label(label)
        mark(outline, label)
    axis.set(xlabel=x, ylabel="answers")
    axis.legend(loc="best")


def draw_bars(counts: Sequence[float], edges: Sequence[float], x: str, y: str, axis: Any) -> None:
    """Draw bars of equal width: below the first edge, between each two, and above the last."""
    for index, bar in enumerate(axis.bar(range(len(counts)), counts, color=SERIES[0], width=0.85)):
        mark(bar, f"bar-{index}")
    axis.set_xticks([index + 0.5 for index in range(len(edges))], [number(edge) for edge in edges])
    axis.set(xlabel=x, ylabel=y)
    axis.grid(visible=False, axis="x")


def draw_calibration(bins: Sequence[Mapping[str, float]], axis: Any) -> None:
    """Draw accuracy over confidence, and the diagonal of perfect calibration."""
    axis.plot([0.5, 1], [0.5, 1], color=MUTED, linestyle="--", linewidth=1)
    most = max(each["n"] for each in bins)
    confidence, accuracy = ([each[name] for each in bins] for name in ("confidence", "accuracy"))
    axis.plot(confidence, accuracy, color=SERIES[0], linewidth=1)
    dots = axis.scatter(confidence, accuracy, [10 + 60 * each["n"] / most for each in bins], color=SERIES[0])
    mark(dots, "calibration")
    axis.set(xlim=(0.48, 1.02), ylim=(-0.05, 1.05), xlabel="confidence of the scores", ylabel="accuracy")


# Colors in a separate file: PPO, SFT's best of n, the ring, policies between SFT and PPO, other policies, the limit.
PAPER = ("#1f5fa8", "#d1660a", "black", "#2e7d4f", "#8a4fa3", "#b8155c")
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 40, 50, 75, 100, 150, 200, 300, 500, 1000)


def draw_panel(
    judge: str, report: Mapping[str, Any], colors: Sequence[str], axis: Any, *, legend: bool = False
) -> None:
    """Draw a judge's mean with interval over KL on a square-root scale: PPO's snapshots, SFT's best of n, and others.

    As Gao et al. 2023 (arXiv 2210.10760, section 3) draw over-optimization: the reward rises with the square root of
    KL, the true quality rises and falls. The panel of the reward has the limit with its band, and the limit's score.
    """
    import numpy as np

    ppo_color, best_of_n_color, ring_color, between_color, other_color, limit_color = colors
    snapshots, best_of_n, between, others, limit = _panel_points(judge, report)
    draw = partial(_draw_points, axis)
    draw(best_of_n, "s--", best_of_n_color, "SFT and its best of n (KL bound)")
    if between:
        draw(between, "D:", between_color, "between SFT and PPO")
    for point in others:
        draw([point], "^", other_color, point.label)
    draw(snapshots, "o-", ppo_color, "PPO snapshots" if report.get("frontier") else "PPO")
    if limit:
        bounds = zip(*(point.interval for point in limit), strict=True)
        axis.fill_between(_columns(limit)[0], *bounds, color=limit_color, alpha=0.25, linewidth=0)
        (line,) = axis.plot(*_columns(limit), color=limit_color, label="limit")
        mark(line, "limit")
    for point in snapshots[1:]:
        if point.step is not None and point.step == report.get("selected_step"):
            label = f"selected: update {point.step}"
            (ring,) = axis.plot(point.kl, point.mean, "o", ms=13, fillstyle="none", color=ring_color, label=label)
            mark(ring, label)
    end = 1.07 * (max(point.kl for point in snapshots + best_of_n + between + others + limit) or 1.0)
    root = lambda values: np.sign(values) * np.sqrt(np.abs(values))  # noqa: E731  continued to the left of 0
    axis.set_xscale("function", functions=(root, lambda values: np.sign(values) * np.square(values)))
    axis.set_xlim(-end / 800, end)
    axis.set_xticks(ticks(end), [f"{tick:g}" for tick in ticks(end)])
    axis.set(xlabel="KL from SFT, nats per response (square-root scale)", title=visible(judge))
    axis.grid(alpha=0.3)
    if legend:
        axis.legend(*_legend(axis), loc="best")


class _Point(NamedTuple):
    kl: float
    mean: float
    interval: Sequence[float]
    label: str  # beside it
    step: int | None


def _panel_points(judge: str, report: Mapping[str, Any]) -> list[list[_Point]]:
    """Return points of PPO, of SFT's best of n, between SFT and PPO, all from SFT on; of others; and of the limit.

    In the panel of the reward all are by the limit's score if there is one.
    """
    models, limit = report["models"], report.get("limit") if judge == "reward" else None
    best_of_n, curve, scored = report.get("best_of", []), [], dict[str | int, Any]()
    if limit:
        best_of_n, curve = limit["best_of"], limit["points"]
        scored = {"sft": curve[0], **limit["policies"]}
        scored |= {row["step"]: row for row in limit["policies"].values() if "step" in row}

    def point(row: Mapping[str, Any], name: str = "", label: str = "") -> _Point:
        kl = max(0.0, row.get("kl_bound", row.get("kl", 0.0)))  # estimates may be below 0
        row = scored[row.get("step", name)] if limit and name else row
        score = {"mean": row["score"], "ci95": row["score_ci95"]} if limit else row["judges"][judge]
        interval = score.get("ci95") or [score["mean"]] * 2  # all answers have the same score
        return _Point(kl, score["mean"], interval, label, row.get("step"))

    start = point(models["sft"], "sft")
    shares = [(row, f"{row['share']:g}") for row in report.get("interpolated", [])]
    between = [point(row, f"interpolated_{share}", share) for row, share in shares]
    return [
        [start, *(point(row, "ppo") for _, row in ppo_points(report))],
        [start, *map(point, best_of_n)],
        [start, *between, point(models["ppo"], "ppo")] if between else [],
        [point(models[name], name, name) for name in other_policies(report)],
        [*map(point, curve)],
    ]


def _columns(points: Sequence[_Point]) -> list[list[float]]:
    return [[point.kl for point in points], [point.mean for point in points]]


def _draw_points(axis: Any, points: Sequence[_Point], style: str, color: str, label: str) -> None:
    """Draw means with intervals over KL, each with its label."""
    errors = [[abs(point.interval[side] - point.mean) for point in points] for side in (0, 1)]
    options: dict[str, Any] = {"capsize": 2, "linewidth": 1.2, "markersize": 4, "color": color}
    (dots, _, _) = axis.errorbar(*_columns(points), yerr=errors, fmt=style, label=visible(label), **options)
    mark(dots, label)
    for point in points:
        if point.label:
            place = (point.kl, point.mean), (4, 4)
            axis.annotate(visible(point.label), *place, textcoords="offset points", color=color, fontsize=8)


def _legend(axis: Any) -> list[list[Any]]:
    """Return the handles and labels of a frontier's legend, PPO first."""
    return [each[::-1] for each in axis.get_legend_handles_labels()]


def ticks(end: float) -> list[float]:
    """Return round numbers up to `end` that do not overlap on the square-root scale."""
    shown = [0.0]
    for tick in TICKS:
        if tick <= end and math.sqrt(tick) - math.sqrt(shown[-1]) > 0.07 * math.sqrt(end):
            shown.append(tick)
    return shown


def draw_frontier(report: Mapping[str, Any], path: Path) -> None:
    """Write the frontier as an SVG file with a panel for each judge."""
    judges = list(report["models"]["sft"]["judges"])

    def draw(canvas: Any) -> None:
        axes = canvas.subplots(1, len(judges), squeeze=False)[0]
        for axis, judge in zip(axes, judges, strict=True):
            draw_panel(judge, report, PAPER, axis)
        handles, labels = max(map(_legend, axes), key=lambda entries: len(entries[1]))  # with the limit, if any
        columns = min(len(labels), 2 * len(judges)) if len(judges) > 1 else 1
        canvas.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)

    write_text(path, _render((0.8 + 4.4 * len(judges), 4.0), draw, ["Date"]))
