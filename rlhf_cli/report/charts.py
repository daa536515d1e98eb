"""Each kind of figure on the page, one function a kind."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_cli.report.ranges import Band
from rlhf_cli.report.svg import ALARM, BAND, INK, MUTED, SERIES, Drawing, drawing, mark
from rlhf_cli.report.texts import number, visible

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


def win_rates(name: str, about: str, rows: Sequence[tuple[str, float, Sequence[float] | None]]) -> Drawing:
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
