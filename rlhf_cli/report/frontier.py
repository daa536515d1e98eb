"""Drawings of the judges' scores over KL: PPO's snapshots, SFT's best of n, other policies, and the limit."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain, cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_cli.evaluation.report_text import other_policies, ppo_points
from rlhf_cli.files import write_text
from rlhf_cli.report.formats import visible
from rlhf_cli.report.svg import INK, LINE_COLORS, MODEL_COLORS, Mark, Values, mark, render
from rlhf_cli.runs.report import KLLimit, LimitPoint, PolicyScores, Report, policy_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas


class Colors(NamedTuple):
    """Colors of a drawing."""

    ppo: str
    best_of_n: str
    ring: str  # around the recommended policy
    between: str  # policies between SFT and PPO
    other: str
    limit: str


ON_PAGE = Colors(
    ppo=MODEL_COLORS["PPO"],
    best_of_n=MODEL_COLORS["SFT"],
    ring=INK,
    between=LINE_COLORS[2],
    other=LINE_COLORS[3],
    limit=LINE_COLORS[5],
)
IN_FILE = Colors("#1f5fa8", "#d1660a", ring="black", between="#2e7d4f", other="#8a4fa3", limit="#b8155c")
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 40, 50, 75, 100, 150, 200, 300, 500, 1000)


class Point(NamedTuple):
    """A drawn mean."""

    kl: float
    mean: float
    interval: Sequence[float]
    label: str = ""  # beside it
    step: int | None = None
    ring: str = ""  # label of the ring around it


class Panel(NamedTuple):
    """The points of one judge's panel; those of PPO, of best of n and on the line begin with SFT."""

    ppo: list[Point]
    best_of_n: list[Point]
    line: list[Point]  # through SFT and PPO in the weights, by their share
    others: list[Point]
    limit: list[Point]

    @property
    def interpolated(self) -> list[Point]:
        """Return the points of the line that are neither SFT nor PPO."""
        return [point for point in self.line if point.label]

    @property
    def end(self) -> float:
        """Return the KL at the right end of the panel."""
        return 1.15 * (max(point.kl for point in chain(*self)) or 1.0)  # room for the last label


# The points of a panel


def panel_of(judge: str, report: Report) -> Panel:
    """Return the points of a judge's panel. In that of the reward all are by the limit's score if there is one."""
    limit = report.limit if judge == "reward" else None
    if limit:
        point = partial(_by_limit, report, limit)
        best_of = [_on_limit(each) for each in limit.best_of]
    else:
        point = partial(_by_judge, report, judge)
        best_of = [point(each, "sft") for each in report.best_of or []]

    models = report.models
    start = point(models["sft"], "sft")
    snapshots = [point(each.scores, "ppo") for each in ppo_points(report)]
    line = []
    if report.interpolated:
        shares = {0.0: start, 1.0: point(models["ppo"], "ppo")}
        for each in report.interpolated:
            shares[each.share] = point(each, f"interpolated_{each.share:g}", f"{each.share:g}")
        line = [shares[share] for share in sorted(shares)]
    return Panel(
        ppo=[start, *_with_steps(snapshots, report.selected_step)],
        best_of_n=[start, *best_of],
        line=line,
        others=[point(models[name], name, name) for name in other_policies(report)],
        limit=[_on_limit(each) for each in limit.points] if limit else [],
    )


def _with_steps(snapshots: Sequence[Point], recommended: int | None) -> list[Point]:
    """Return snapshots, the first, the recommended and the last one with their step as label: more would overlap."""
    steps = [point.step for point in snapshots]
    labelled = {steps[0], recommended, steps[-1]} if len(steps) > 1 else set()
    return [point._replace(label=f"{point.step}") if point.step in labelled else point for point in snapshots]


def _by_judge(report: Report, judge: str, scores: PolicyScores, _name: str, label: str = "") -> Point:
    """Return a policy's mean score by a judge."""
    mean = scores.judges[judge]
    interval = mean.ci95 or [mean.mean, mean.mean]  # all answers have the same score
    return Point(_shown_kl(scores), mean.mean, interval, label=label, step=scores.step, ring=_ring(report, scores))


def _by_limit(report: Report, limit: KLLimit, scores: PolicyScores, name: str, label: str = "") -> Point:
    """Return a policy's score as the limit counts it: by its name, or the step of a snapshot."""
    if name == "sft":
        point = limit.points[0]
    elif scores.step is None:
        point = limit.policies[name]
    else:
        point = next(each for each in limit.policies.values() if each.step == scores.step)
    ring = _ring(report, scores)
    return Point(_shown_kl(scores), point.score, point.score_ci95, label=label, step=point.step, ring=ring)


def _ring(report: Report, scores: PolicyScores) -> str:
    """Return the label of the ring around the recommended policy; empty for any other."""
    if not report.is_recommended(scores):
        return ""
    step = report.selected_step if scores.share is None else None
    return f"recommended: {policy_label(step, scores.share)}"


def _on_limit(point: LimitPoint) -> Point:
    return Point(max(0.0, point.kl), point.score, point.score_ci95)


def _shown_kl(scores: PolicyScores) -> float:
    kl = scores.kl if scores.kl_bound is None else scores.kl_bound
    return max(0.0, kl or 0.0)  # estimates may be below 0


# Drawings


def draw_panel(judge: str, report: Report, colors: Colors, axis: "Axes", *, legend: bool = False) -> Values:
    """Draw a judge's mean with interval over KL on a square-root scale: PPO's snapshots, SFT's best of n, and others.

    As Gao et al. 2023 (arXiv 2210.10760, section 3) draw over-optimization: the reward rises with the square root of
    KL, the true quality rises and falls. The panel of the reward has the limit with its band, and the limit's score.
    """
    panel = panel_of(judge, report)
    _draw_points(axis, panel.best_of_n, "s--", color=colors.best_of_n, label="SFT and its best of n (KL bound)")
    if panel.line:
        _draw_points(axis, panel.line, "D:", color=colors.between, label="between SFT and PPO")
    for point in panel.others:
        _draw_points(axis, [point], "^", color=colors.other, label=point.label)
    _draw_points(axis, panel.ppo, "o-", color=colors.ppo, label="PPO snapshots" if report.frontier else "PPO")
    if panel.limit:
        _draw_limit(axis, panel.limit, colors.limit)
    _draw_ring(axis, [*panel.ppo, *panel.interpolated], colors.ring)

    _scale_by_square_root(axis, panel.end)
    axis.set(xlabel="KL from SFT, nats per response (square-root scale)")
    axis.grid(alpha=0.3)
    if legend:
        axis.legend(*_legend(axis), loc="best")
    else:
        axis.set_title(visible(judge))
    return _values(panel)


def draw_runs(judge: str, reports: Mapping[str, Report], axis: "Axes") -> Values:
    """Draw a judge's mean over KL for PPO's snapshots of several runs, each beginning with its SFT."""
    marks: list[Mark] = []
    colors = dict(zip(reports, cycle(LINE_COLORS), strict=False))
    courses: dict[str, list[Point]] = {}
    for name, report in reports.items():
        start = _by_judge(report, judge, report.models["sft"], "sft")
        points = [start, *(_by_judge(report, judge, each.scores, "ppo") for each in ppo_points(report))]
        courses[name] = points
        _draw_points(axis, points, "o-", color=colors[name], label=name)
        marks += [Mark(each.kl, each.mean, (name, each.step, each.kl, each.mean, *each.interval)) for each in points]

    _scale_by_square_root(axis, 1.07 * (max(each.x for each in marks) or 1.0))
    axis.set(xlabel="KL from SFT, nats per response (square-root scale)", ylabel=visible(judge))
    axis.grid(alpha=0.3)
    axis.legend(loc="best")
    for name, points in courses.items():  # after the legend, which does not explain rings
        _draw_ring(axis, points, colors[name])
    return Values(("run", "update", "KL", "score", "from", "to"), marks)


def _values(panel: Panel) -> Values:
    """Return the points of a panel as a table."""
    start = panel.ppo[0]
    series = {
        "SFT": [start],
        "PPO": panel.ppo[1:],
        "best of n": panel.best_of_n[1:],
        "between SFT and PPO": panel.interpolated,
        "other": panel.others,
        "limit": panel.limit,
    }
    marks: list[Mark] = []
    for name, points in series.items():
        for point in points:
            low, high = point.interval
            label = f"{name} {point.label or point.step or ''}".strip()
            marks.append(Mark(point.kl, point.mean, (label, point.kl, point.mean, low, high)))
    return Values(("policy", "KL", "score", "from", "to"), marks)


def _draw_points(axis: "Axes", points: Sequence[Point], style: str, *, color: str, label: str) -> None:
    """Draw means with intervals over KL, each with its label."""
    dots, _, _ = axis.errorbar(
        [point.kl for point in points],
        [point.mean for point in points],
        yerr=[
            [abs(point.interval[0] - point.mean) for point in points],
            [abs(point.interval[1] - point.mean) for point in points],
        ],
        fmt=style,
        label=visible(label),
        capsize=2,
        linewidth=1.2,
        markersize=4,
        color=color,
    )
    mark(dots, label)

    for point in points:
        if point.label:
            is_last = point is points[-1]
            axis.annotate(
                visible(point.label),
                (point.kl, point.mean),
                (9, -3) if is_last else (-4, 9),  # right of all; or left of the interval, and above a ring
                textcoords="offset points",
                horizontalalignment="left" if is_last else "right",
                color=color,
                fontsize=9,
            )


def _draw_limit(axis: "Axes", points: Sequence[Point], color: str) -> None:
    """Draw the limit with its band."""
    kls = [point.kl for point in points]
    lows = [point.interval[0] for point in points]
    highs = [point.interval[1] for point in points]
    axis.fill_between(kls, lows, highs, color=color, alpha=0.25, linewidth=0)
    (line,) = axis.plot(kls, [point.mean for point in points], color=color, label="limit")
    mark(line, "limit")


def _draw_ring(axis: "Axes", points: Sequence[Point], color: str) -> None:
    """Draw a ring around the recommended policy."""
    for point in points:
        if point.ring:
            (ring,) = axis.plot(point.kl, point.mean, "o", ms=13, fillstyle="none", color=color, label=point.ring)
            mark(ring, point.ring)


def _scale_by_square_root(axis: "Axes", end: float) -> None:
    """Scale the KL from 0 to `end`."""
    import numpy as np

    def root(values: Any) -> Any:
        return np.sign(values) * np.sqrt(np.abs(values))  # continued to the left of 0

    def square(values: Any) -> Any:
        return np.sign(values) * np.square(values)

    axis.set_xscale("function", functions=(root, square))
    axis.set_xlim(-end / 800, end)  # 0 is not on the frame
    axis.set_xticks(ticks(end), [f"{tick:g}" for tick in ticks(end)])


def ticks(end: float) -> list[float]:
    """Return round numbers up to `end` whose labels do not overlap on the square-root scale."""
    shown = [0.0]
    for tick in TICKS:
        gap = math.sqrt(tick) - math.sqrt(shown[-1])
        if tick <= end and gap > 0.07 * math.sqrt(end):
            shown.append(tick)
    return shown


class Legend(NamedTuple):
    """What a panel's legend shows, PPO first."""

    handles: list[Any]
    labels: list[str]


def _legend(axis: "Axes") -> Legend:
    handles, labels = axis.get_legend_handles_labels()
    return Legend(handles[::-1], labels[::-1])


def draw_file(report: Report, path: Path) -> None:
    """Write the frontier as an SVG file with a panel for each judge."""
    judges = list(report.models["sft"].judges)

    def draw(canvas: "Canvas") -> None:
        axes = canvas.subplots(1, len(judges), squeeze=False)[0]
        for axis, judge in zip(axes, judges, strict=True):
            draw_panel(judge, report, IN_FILE, axis)

        legends = [_legend(axis) for axis in axes]
        largest = max(legends, key=lambda legend: len(legend.labels))  # with the limit, if any
        columns = 1
        if len(judges) > 1:
            columns = min(len(largest.labels), 2 * len(judges))
        canvas.legend(*largest, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)

    write_text(path, render((0.8 + 4.4 * len(judges), 4.0), draw, omitted=["Date"]))
