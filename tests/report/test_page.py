"""HTML of the report: untrusted text is inert, nothing is loaded, figures show their data.

Modules: `report/formats.py`, `report/html.py`.
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
from report_run import CARD, answers, begin, change, configs, report, write_run

from rlhf_cli.jsonl import write_jsonl
from rlhf_cli.report import charts, page
from rlhf_cli.report.formats import INVISIBLE, visible
from rlhf_cli.runs.read import read_run

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


def test_the_page_says_which_step_was_kept_and_what_the_choice_hides(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    evaluated = [
        {"step": 10, "accuracy": 0.8, "within_noise": True},
        {"step": 30, "accuracy": 0.6, "within_noise": False},
    ]
    kept = {"step": 10, "evaluated": evaluated, "optimism": 0.02}
    change(folder / "reward/manifest.json", card=CARD | {"kept_step": kept})
    html = page.of_run(read_run(folder))
    assert "The model is that of step 10 of 30: held-out accuracy 0.800; that of the last step, 0.600, is lower" in html
    assert "which flatters it" in html and "yes: step 10 of 30" in html
    without = page.of_run(read_run(write_run(tmp_path / "without")))
    assert "The model is that of" not in without and "no: one step was evaluated" in without


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
    assert len(script.splitlines()) < 400 and "url(" not in re.findall(r"<style>.*?</style>", html, re.S)[0]
    ids = [attributes["id"] for _, attributes in reader.elements if "id" in attributes]
    assert len(ids) == len(set(ids)) and set(re.findall(r'(?:href="|url\()#([^")]+)', html)) <= set(ids)


def test_colors_and_hidden_elements(plain: str) -> None:
    """Every color of a figure follows light and dark mode. Only what needs the script is hidden without it."""
    figures = "".join(re.findall(r"<svg.*?</svg>", plain, re.S))
    assert re.findall(r"#[0-9a-f]{6}", figures) == [] and "font-family" not in figures
    used = set(re.findall(r"var\((--[\w-]+)\)", plain))
    light, dark = (set(re.findall(r"(--[\w-]+):", block)) for block in re.findall(r":root \{(.*?)\}", plain, re.S))
    assert used <= light | {"--a"} and {"--band", "--bad", "--line-1", "--muted", "--grid", "--ink"} <= dark
    elements = [(tag, each) for tag, each in Reader(plain).elements if "hidden" in each]
    hidden = Counter((tag, each.get("class"), each.get("id")) for tag, each in elements)
    assert hidden.pop(("p", "search", None)) == plain.count("data-search>") == 1
    assert hidden.pop(("p", "muted columns-read", None)) == 1 + 16, "the data have no columns"
    assert hidden == {("div", None, "tools"): 1, ("button", None, "more"): 1}


def test_alarms_and_healthy_ranges_are_drawn(plain: str) -> None:
    figures = dict(re.findall(r'<svg class="figure[ "].*?aria-label="([^"]*)">(.*?)</svg>', plain, re.S))
    of_ppo = {about: figure for about, figure in figures.items() if "at update" in about and "nats;" not in about}
    for about, figure in of_ppo.items():
        assert figure.count('-series-alarm-7"') == 1, about
        assert ("-series-too-" not in figure) or ("healthy range" in about), about
    assert sum("-series-too-" in figure for figure in of_ppo.values()) >= 2
    assert len(figures) == plain.count("<svg ") and all(figures), "every figure has a description"


# Figures


def drawn(draw: Callable, *data: Any, name: str = "x", **options: Any) -> ElementTree.Element:
    drawing = charts.draw_svg(name, "about", charts.CARD, partial(draw, *data, **options))
    return ElementTree.fromstring(str(drawing.markup))


@pytest.mark.full
def test_ids_are_unique_and_figures_deterministic() -> None:
    curve = partial(charts.draw_curves, {name: [(1, 2.0), (2, 3.0)] for name in ("to -2", "to 2", "to_2")})
    ids = [each.get("id") for each in drawn(curve, name="b").iter("g") if "series" in each.get("id", "")]
    assert ids == ["b-series-to-2", "b-series-to-2-again", "b-series-to_2"]
    one, two = (str(charts.draw_svg(name, "about", charts.CARD, curve).markup) for name in ("one", "two"))
    assert one != two and one.replace("one-", "two-") == two
    with matplotlib.rc_context({"axes.xmargin": 0.4}):  # as in a user's matplotlibrc
        assert str(charts.draw_svg("one", "about", charts.CARD, curve).markup) == one
