"""Figures of the report: marks stand where their data says.

Modules: `report/svg.py`.
"""

import re
from xml.etree import ElementTree

import pytest

from rlhf_cli.report import charts
from rlhf_cli.report.charts import WinRateRow
from rlhf_cli.report.rules import Band
from tests.report.test_page import drawn

pytestmark = pytest.mark.usefixtures("figures")


def group(root: ElementTree.Element, name: str) -> ElementTree.Element:
    (found,) = [each for each in root.iter("g") if each.get("id", "").endswith(f"series-{name}")]
    return found


def corners(element: ElementTree.Element) -> list[tuple[float, float]]:
    """The corners of the first path, at the place where it is used."""
    path, use = next(element.iter("path")), next(element.iter("use"), ElementTree.Element("use"))
    left, top = float(use.get("x", 0)), float(use.get("y", 0))
    return [(left + float(x), top + float(y)) for x, y in re.findall(r"[ML] (-?[\d.]+) (-?[\d.]+)", path.get("d", ""))]


def height(root: ElementTree.Element, name: str) -> float:
    ys = [y for _, y in corners(group(root, name))]
    return max(ys) - min(ys)


def test_a_curve_goes_through_its_points_and_what_is_outside_its_range_is_shaded() -> None:
    root = drawn(charts.draw_curves, {"one": [(1, 0.0), (2, 4.0), (3, 2.0)], "two": [(1, 1.0), (3, 1.0)]})
    (x1, y1), (x2, y2), (x3, y3) = corners(group(root, "one"))
    assert x3 - x2 == pytest.approx(x2 - x1) and x2 > x1
    assert (y3 - y2) / (y1 - y2) == pytest.approx(0.5, abs=1e-4), "SVG counts downwards"
    assert len(corners(group(root, "two"))) == 2
    assert {"one", "two", "update"} <= {text.text for text in root.iter("text")}
    root = drawn(charts.draw_curves, {"a": [(1, 0.0), (2, 10.0)]}, band=Band([2.0, 2.0], [100.0, 100.0]))
    line, shade = corners(group(root, "a")), corners(group(root, "too-low"))
    zero, ten = line[0][1], line[1][1]
    bottom, top = max(y for _, y in shade), min(y for _, y in shade)
    assert (zero - top) / (zero - ten) == pytest.approx(0.2, abs=1e-4)
    assert (zero - bottom) / (zero - ten) == pytest.approx(-0.15, abs=1e-4), "to the edge of the panel"
    assert "too-high" not in ElementTree.tostring(root, "unicode"), "100 is not in the panel"


def test_win_rates_are_at_their_values() -> None:
    rows = [("wins", 0.75, [0.7, 0.8]), ("loses", 0.25, [0.2, 0.3]), ("open", 0.5, [0.4, 0.6]), ("alone", 0.5, None)]
    root = drawn(charts.draw_win_rates, [WinRateRow(*row) for row in rows])
    dots = [next(group(root, f"win-{label}").iter("use")) for label, _, _ in rows]
    x = [float(dot.get("x", "")) for dot in dots]
    assert x[0] - x[2] == pytest.approx(x[2] - x[1], abs=1e-3) and x[2] == x[3] and x[0] > x[1]
    styles = [str(dot.get("style")) for dot in dots]
    assert [name in style for name, style in zip(("line-1", "line-2", "muted", "line-1"), styles, strict=True)] == [
        True
    ] * 4


def test_bars_and_histograms_have_the_heights_of_their_counts() -> None:
    root = drawn(charts.draw_margins, [1, 3], [0.0])
    assert height(root, "bar-1") / height(root, "bar-0") == pytest.approx(3, abs=1e-3)
    root = drawn(charts.draw_margins, [0, 6, 3, 0], [-2.0, 0.0, 1.0])
    assert height(root, "bar-1") == pytest.approx(height(root, "bar-2"), abs=1e-3), "areas are the numbers"
    root = drawn(charts.draw_lengths, {"SFT": [1, 1, 1, 9], "PPO": [9, 9, 9, 9]})
    assert height(root, "PPO") / height(root, "SFT") == pytest.approx(4 / 3, abs=1e-3)
