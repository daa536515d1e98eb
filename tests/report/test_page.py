"""HTML of the report: untrusted text is inert, nothing is loaded, figures show their data.

Modules: `report/charts.py`, `report/figures.py`, `report/formats.py`, `report/frontier.py`,
`report/html.py`.
"""

import base64
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import pytest
import report_run
from matplotlib.figure import Figure as Canvas
from report_run import CARD, answers, begin, change, configs, metrics, report, with_limit, with_policies, write_run

from rlhf_cli.jsonl import write_jsonl
from rlhf_cli.report import charts, frontier, page
from rlhf_cli.report.charts import WinRateRow
from rlhf_cli.report.formats import INVISIBLE, visible
from rlhf_cli.report.rules import Band
from rlhf_cli.runs.read import at_step, read_run
from rlhf_cli.runs.report import Report

VOID = {"meta", "input", "br"}
# Control characters, direction overrides, zero-width characters.
UNSEEABLE = "\x00\x1b[2J\x7f\x9b\u202e\u2066\u200b\ufeff"
HOSTILE = "<script>alert(1)</script></script></style>\"'`><img src=x onerror=alert(2)>{{ 7*7 }}{% x %}<!--" + UNSEEABLE


class Reader(HTMLParser):
    """Elements with their attributes; fails on a tag that is not closed, or closed twice."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.scripts: list[str] = []
        self.feed(html)
        assert self.open == []
        self.tags = Counter(tag for tag, _ in self.elements)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        assert len(dict(attrs)) == len(attrs), "an attribute is repeated"
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)


@pytest.fixture(scope="module", autouse=True)
def drawn_figures() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        report_run.draws(patch)
        yield


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a run whose every text is an attack: prompts, answers, config, names, warnings, versions, tokens."""
    folder = write_run(tmp_path_factory.mktemp("runs") / "<b>&'\"$x$ {{ 7*7 }}")
    evaluation = report() | {"warnings": [HOSTILE]}
    models = (*evaluation["models"].values(), *evaluation["frontier"], *evaluation["best_of"])
    for row in (*models, evaluation["greedy"]["models"]["sft"]):
        row["judges"] = {"gold": row["judges"]["gold"], "$</svg><script>$": row["judges"]["gold"]}
    evaluation["win_rate"]["ppo_vs_sft"]["</text><script>"] = evaluation["win_rate"]["ppo_vs_sft"]["gold"]
    change(folder / "eval/report.json", **evaluation)
    with (folder / "eval/samples.jsonl").open("w") as file:
        for row in answers(prompt=HOSTILE, response=HOSTILE):
            file.write(json.dumps(row) + "\n")
    begin(folder / "ppo", configs()["ppo"] | {"ppo": {HOSTILE: HOSTILE}})
    values = {name: [0.5, -1.0, 0, 2] for name in ("reward", "kl", "value", "advantage")}
    tokens = {"text": ["<b>", "\u202e", "\n", ""], **values}
    write_jsonl(folder / "ppo/samples.jsonl", [{"step": 5, "prompt": "</p><script>", "tokens": tokens}])
    write_jsonl(folder / "ppo/watchdog.jsonl", [{"step": 7, "signal": "</li><script>", "action": "<i>"}])
    card = CARD | {"flags": [{"code": "<s>", "text": "<s>"}]}
    change(folder / "reward/manifest.json", versions={"<u>": "<u>"}, card=card)
    parents = {"m": {"stage": "foreign", "path": "<em>"}}
    change(folder / "sft/manifest.json", data={"data.train": "<em>"}, parents=parents)
    return page.of_run(read_run(folder))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = write_run(tmp_path_factory.mktemp("runs") / "demo")
    write_jsonl(folder / "ppo/watchdog.jsonl", [{"step": 7, "signal": "kl"}])
    return page.of_run(read_run(folder))


@pytest.mark.full
def test_untrusted_text_is_inert(hostile: str, plain: str) -> None:
    ours, theirs = Reader(plain), Reader(hostile)
    assert theirs.tags["script"] == ours.tags["script"] == 1 and theirs.tags["style"] == ours.tags["style"] == 1
    assert not {"img", "b", "u", "s", "em", "i", "iframe", "link", "a href"} & theirs.tags.keys()
    assert not [name for _, attributes in theirs.elements for name in attributes if name.startswith("on")]
    assert "{{ 7*7 }}" in hostile and "{% x %}" in hostile


def test_invisible_characters_and_secrets(hostile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert INVISIBLE.search(hostile) is None
    hostile.encode("utf-8")
    for name in ("[U+0000]", "[U+001B]", "[U+009B]", "[U+202E]", "[U+2066]", "[U+200B]"):
        assert name in hostile
    assert visible("a\ud800\tb\nc") == "a[U+D800]\tb\nc", "line breaks and tabs are text"
    monkeypatch.setenv("MY_API_KEY", "do-not-show-me")
    assert visible("it is do-not-show-me!") == "it is [secret]!"


@pytest.mark.parametrize("name", ["hostile", "plain"])
def test_the_page_is_self_contained(name: str, request: pytest.FixtureRequest) -> None:
    """It loads nothing, allows one script by its hash, and each reference has exactly one id."""
    html = request.getfixturevalue(name)
    reader = Reader(html)
    for tag, attributes in reader.elements:
        assert "src" not in attributes and tag not in ("link", "iframe", "object", "image")
        assert attributes.get("href", "#").startswith("#") and "url(" not in attributes.get("style", "")
        assert all("http" not in str(value) for value in attributes.values())
    policy = next(each["content"] for _, each in reader.elements if each.get("http-equiv") == "Content-Security-Policy")
    (script,) = reader.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.startswith("default-src 'none'; ") and f"script-src 'sha256-{digest}'" in policy
    assert len(script.splitlines()) < 50 and "url(" not in re.findall(r"<style>.*?</style>", html, re.S)[0]
    ids = [attributes["id"] for _, attributes in reader.elements if "id" in attributes]
    assert len(ids) == len(set(ids)) and set(re.findall(r'(?:href="|url\()#([^")]+)', html)) <= set(ids)


def test_colors_and_hidden_elements(plain: str) -> None:
    """Every color of a figure follows light and dark mode. Only the search boxes need the script."""
    figures = "".join(re.findall(r"<svg.*?</svg>", plain, re.S))
    assert re.findall(r"#[0-9a-f]{6}", figures) == [] and "font-family" not in figures
    used = set(re.findall(r"var\((--[\w-]+)\)", plain))
    light, dark = (set(re.findall(r"(--[\w-]+):", block)) for block in re.findall(r":root \{(.*?)\}", plain, re.S))
    assert used <= light | {"--a"} and {"--band", "--bad", "--line-1", "--muted", "--grid", "--ink"} <= dark
    hidden = [(tag, each.get("class")) for tag, each in Reader(plain).elements if "hidden" in each]
    assert set(hidden) == {("p", "search")} and len(hidden) == plain.count("data-search>") == 2


def test_alarms_and_healthy_ranges_are_drawn(plain: str) -> None:
    figures = dict(re.findall(r'<svg class="figure".*?aria-label="([^"]*)">(.*?)</svg>', plain, re.S))
    of_ppo = {about: figure for about, figure in figures.items() if "at update" in about and "nats;" not in about}
    for about, figure in of_ppo.items():
        assert figure.count('-series-alarm-7"') == 1, about
        assert ('series-healthy"' in figure) == ("healthy range" in about), about
    assert sum("healthy range" in about for about in of_ppo) >= 5
    assert len(figures) == plain.count("<svg ") and all(figures), "every figure has a description"


@pytest.mark.full
def test_unhealthy_figures_come_first_and_first_alarms_are_marked(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "demo")
    log = metrics(policy__approxkl_avg=[0.5] * 20, policy__clipfrac_avg=[0.2] * 20, objective__repetition=[0.0] * 20)
    write_jsonl(folder / "ppo/metrics.jsonl", log)
    firings = [{"step": step, "signal": signal} for step, signal in ((3, "kl"), (5, "eos"), (6, "kl"), (9, "eos"))]
    write_jsonl(folder / "ppo/watchdog.jsonl", firings)
    html = page.of_run(read_run(folder))
    ppo = html[html.index('id="ppo"') : html.index('id="frontier"')]
    shown = re.findall(r'<figure class="card (\w+).*?<code>(.*?)</code>', ppo, re.S)
    first = [("bad", "policy/approxkl_avg"), ("look", "policy/clipfrac_avg"), ("good", "objective/scores")]
    assert shown[:3] == first and shown[-1] == ("good", "objective/repetition"), "constant metrics are last"
    assert set(re.findall(r'-series-alarm-(\d+)"', html)) == {"3", "5"}


# Figures


def drawn(draw: Callable, *data: Any, name: str = "x", **options: Any) -> ElementTree.Element:
    return ElementTree.fromstring(str(charts.draw_svg(name, "about", charts.CARD, partial(draw, *data, **options))))


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


def test_a_curve_goes_through_its_points_and_the_visible_part_of_its_range_is_shaded() -> None:
    root = drawn(charts.draw_curves, {"one": [(1, 0.0), (2, 4.0), (3, 2.0)], "two": [(1, 1.0), (3, 1.0)]})
    (x1, y1), (x2, y2), (x3, y3) = corners(group(root, "one"))
    assert x3 - x2 == pytest.approx(x2 - x1) and x2 > x1
    assert (y3 - y2) / (y1 - y2) == pytest.approx(0.5, abs=1e-4), "SVG counts downwards"
    assert len(corners(group(root, "two"))) == 2
    assert {"one", "two", "update"} <= {text.text for text in root.iter("text")}
    root = drawn(charts.draw_curves, {"a": [(1, 0.0), (2, 10.0)]}, band=Band([2.0, 2.0], [100.0, 100.0]))
    line, shade = corners(group(root, "a")), corners(group(root, "healthy"))
    zero, ten = line[0][1], line[1][1]
    bottom, top = max(y for _, y in shade), min(y for _, y in shade)
    assert (zero - bottom) / (zero - ten) == pytest.approx(0.2, abs=1e-4)
    assert (zero - top) / (zero - ten) == pytest.approx(1.15, abs=1e-4), "to the edge of the panel"


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


def test_the_selected_policy_has_a_ring() -> None:
    evaluation = report()
    root = drawn(frontier.draw_panel, "gold", Report.model_validate(evaluation), frontier.ON_PAGE)
    assert len(list(group(root, "selected-update-10").iter("use"))) == 1
    assert len(list(group(root, "PPO-snapshots").iter("use"))) == 4, "SFT and three policies"
    del evaluation["selected_step"]
    root = drawn(frontier.draw_panel, "gold", Report.model_validate(evaluation), frontier.ON_PAGE)
    assert "selected" not in ElementTree.tostring(root, "unicode")


@pytest.mark.full
def test_policies_beside_and_between_sft_and_ppo_are_on_the_frontier(tmp_path: Path) -> None:
    evaluation = with_policies()
    for has_snapshots in (True, False):
        shown = {key: row for key, row in evaluation.items() if has_snapshots or not key.startswith(("front", "sel"))}
        root = drawn(frontier.draw_panel, "gold", Report.model_validate(shown), frontier.ON_PAGE)
        text = ElementTree.tostring(root, "unicode")
        assert len(list(group(root, "between-SFT-and-PPO").iter("use"))) == 4, "SFT, two shares and PPO"
        assert len(list(group(root, "dpo").iter("use"))) == 1
        assert all(f">{label}<" in text for label in ("0.3", "0.7", "dpo")), "labels beside the points"
        assert len(list(group(root, "PPO-snapshots" if has_snapshots else "PPO").iter("use"))) == (
            4 if has_snapshots else 2
        )
    text = page_with_frontiers(write_run(tmp_path / "run", evaluation=evaluation))
    assert "PPO over dpo by judge gold: 0.630 [0.570, 0.690] at 12.30 nats against 4.00 nats: PPO is better." in text
    assert "Share 0.3: 0.5 at 2 nats; share 0.7: 0.6 at 5 nats; dpo: 0.4 at 4 nats." in text
    assert "SFT + share (PPO - SFT)" in text and text.count("<td>PPO over dpo</td>") == 2
    at_ten = at_step(read_run(tmp_path / "run"), "10").report
    assert at_ten is not None and at_ten.interpolated is None and "ppo_vs_dpo" not in at_ten.win_rate


def page_with_frontiers(run: Path) -> str:
    """The page without its other figures, which take seconds."""
    with pytest.MonkeyPatch.context() as patch:
        report_run.draws_nothing(patch)
        kinds = {True: report_run.DRAW_SVG, False: charts.draw_svg}
        patch.setattr(charts, "draw_svg", lambda name, *rest: kinds[name.startswith("frontier")](name, *rest))
        return page.of_run(read_run(run))


def plotted(judge: str, evaluation: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """The points of a panel by the label of their series."""
    axis = Canvas().subplots()
    frontier.draw_panel(judge, Report.model_validate(evaluation), frontier.IN_FILE, axis)
    lines = {each.get_label(): each[0] for each in axis.containers} | {
        line.get_label(): line for line in axis.get_lines() if not str(line.get_label()).startswith("_")
    }
    return {str(label): [*map(tuple, line.get_xydata().tolist())] for label, line in lines.items()}


@pytest.mark.full
@pytest.mark.parametrize("has_snapshots", [True, False])
@pytest.mark.parametrize("policies", [True, False])
def test_the_panel_of_the_reward_has_the_scores_of_the_limit(
    tmp_path: Path, *, has_snapshots: bool, policies: bool
) -> None:
    """They are 1 below the judge's means; the other panels have no limit, and its absence changes no other point."""
    evaluation = with_limit(with_policies() if policies else report())
    if not has_snapshots:
        for key in ("frontier", "selected_step", "selected"):
            del evaluation[key]
    own = plotted("reward", {key: row for key, row in evaluation.items() if key != "limit"})
    shown = plotted("reward", evaluation)
    assert shown.pop("limit") == [(0.0, -1.0), (1.0, 0.5)]
    assert shown == {
        label: [(pytest.approx(kl), pytest.approx(mean - 1)) for kl, mean in each] for label, each in own.items()
    }
    ppo = {"PPO snapshots", "selected: update 10"} if has_snapshots else {"PPO"}
    others = {"between SFT and PPO", "dpo"} if policies else set()
    assert shown.keys() == {"SFT and its best of n (KL bound)"} | ppo | others
    assert plotted("gold", evaluation).keys() == shown.keys()
    html = page_with_frontiers(write_run(tmp_path / "run", evaluation=evaluation))
    assert html.count('series-limit"') == 1 and "The picture shows the score by the reward model, less 1 for" in html
    frontier.draw_file(Report.model_validate(evaluation), tmp_path / "frontier.svg")
    assert 'series-limit"' in (tmp_path / "frontier.svg").read_text()


def test_bars_and_histograms_have_the_heights_of_their_counts() -> None:
    root = drawn(charts.draw_margins, [1, 3], [0.0])
    assert height(root, "bar-1") / height(root, "bar-0") == pytest.approx(3, abs=1e-3)
    root = drawn(charts.draw_lengths, {"SFT": [1, 1, 1, 9], "PPO": [9, 9, 9, 9]})
    assert height(root, "PPO") / height(root, "SFT") == pytest.approx(4 / 3, abs=1e-3)


@pytest.mark.full
def test_ids_are_unique_and_figures_deterministic() -> None:
    curve = partial(charts.draw_curves, {name: [(1, 2.0), (2, 3.0)] for name in ("to -2", "to 2", "to_2")})
    ids = [each.get("id") for each in drawn(curve, name="b").iter("g") if "series" in each.get("id", "")]
    assert ids == ["b-series-to-2", "b-series-to-2-again", "b-series-to_2"]
    one, two = (str(charts.draw_svg(name, "about", charts.CARD, curve)) for name in ("one", "two"))
    assert one != two and one.replace("one-", "two-") == two
    with matplotlib.rc_context({"axes.xmargin": 0.4}):  # as in a user's matplotlibrc
        assert str(charts.draw_svg("one", "about", charts.CARD, curve)) == one
