"""The page itself: nothing of others acts in it, it loads nothing, it is well formed, figures show their series."""

import base64
import hashlib
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from report_run import CARD, answers, begin, change, configs, metrics, report, write_run

from rlhf_cli.commands.report import charts, compare, page, svg
from rlhf_cli.commands.report.rules import Band
from rlhf_cli.commands.report.runs import read_run
from rlhf_cli.commands.report.tables import UNSEEN, visible
from rlhf_cli.jsonl import write_jsonl

VOID = {"meta", "input", "br"}
# Control characters, what turns the direction, what has no width, and half a character.
UNSEEABLE = "\x00\x1b[2J\x7f\x9b\u202e\u2066\u200b\ufeff\ud800"
ATTACK = "<script>alert(1)</script></script></style>\"'`><img src=x onerror=alert(2)>{{ 7*7 }}{% x %}<!--"
HOSTILE = ATTACK + UNSEEABLE[:-1]  # no file of ours can hold half a character


class Read(HTMLParser):
    """Elements with their attributes; fails on a tag that is not closed, or closed twice."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str]]] = []
        self.scripts: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        assert len(dict(attrs)) == len(attrs), "no attribute twice"
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a run whose every text is an attack: prompts, answers, config, names, warnings, versions, tokens."""
    folder = write_run(tmp_path_factory.mktemp("runs") / "<b>&'\"$x$ {{ 7*7 }}")
    told = report() | {"warnings": [HOSTILE]}
    for where in (*told["models"].values(), *told["frontier"], *told["best_of"], told["greedy"]["models"]["sft"]):
        where["judges"] = {"gold": where["judges"]["gold"], "$</svg><script>$": where["judges"]["gold"]}
    told["win_rate"]["ppo_vs_sft"]["</text><script>"] = told["win_rate"]["ppo_vs_sft"]["gold"]
    change(folder / "eval/report.json", **told)
    with (folder / "eval/samples.jsonl").open("w") as file:
        for row in answers(prompt=HOSTILE, response=HOSTILE):
            file.write(json.dumps(row) + "\n")
    begin(folder / "ppo", configs()["ppo"] | {"ppo": {HOSTILE: HOSTILE}})
    tokens = {
        "text": ["<b>", "\u202e", "\n", ""],
        **{name: [0.5, -1.0, 0, 2] for name in ("reward", "kl", "value", "advantage")},
    }
    write_jsonl(folder / "ppo/samples.jsonl", [{"step": 5, "prompt": "</p><script>", "tokens": tokens}])
    write_jsonl(folder / "ppo/watchdog.jsonl", [{"step": 7, "signal": "</li><script>", "action": "<i>"}])
    change(
        folder / "reward/manifest.json",
        versions={"<u>": "<u>"},
        card=CARD | {"flags": [{"code": "<s>", "text": "<s>"}]},
    )
    change(
        folder / "sft/manifest.json", data={"data.train": "<em>"}, parents={"m": {"stage": "foreign", "path": "<em>"}}
    )
    return page.of_run(read_run(folder))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = write_run(tmp_path_factory.mktemp("runs") / "demo")
    write_jsonl(folder / "ppo/watchdog.jsonl", [{"step": 7, "signal": "kl"}])
    return page.of_run(read_run(folder))


def test_nothing_of_others_acts(hostile: str, plain: str) -> None:
    ours, theirs = Counter(tag for tag, _ in Read(plain).found), Counter(tag for tag, _ in Read(hostile).found)
    assert theirs["script"] == ours["script"] == 1 and theirs["style"] == ours["style"] == 1
    assert not {"img", "b", "u", "s", "em", "i", "iframe", "link", "a href"} & theirs.keys()
    assert not [name for _, attributes in Read(hostile).found for name in attributes if name.startswith("on")]
    assert "{{ 7*7 }}" in hostile and "{% x %}" in hostile


def test_what_cannot_be_seen_is_made_visible(hostile: str) -> None:
    assert UNSEEN.search(hostile) is None
    hostile.encode("utf-8")
    for name in ("[U+0000]", "[U+001B]", "[U+009B]", "[U+202E]", "[U+2066]", "[U+200B]"):
        assert name in hostile
    assert visible("a\ud800\tb\nc") == "a[U+D800]\tb\nc", "line breaks and tabs are text"


def test_secrets_of_the_environment_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "do-not-tell-me")
    assert visible("it is do-not-tell-me!") == "it is [secret]!"


@pytest.mark.parametrize("name", ["hostile", "plain"])
def test_the_page_loads_nothing_and_allows_one_script(name: str, request: pytest.FixtureRequest) -> None:
    made = request.getfixturevalue(name)
    read = Read(made)
    for tag, attributes in read.found:
        assert "src" not in attributes and tag not in ("link", "iframe", "object", "image")
        assert attributes.get("href", "#").startswith("#")
        assert "url(" not in attributes.get("style", "") and all(
            "http" not in str(value) for value in attributes.values()
        )
    policy = next(told["content"] for _, told in read.found if told.get("http-equiv") == "Content-Security-Policy")
    (script,) = read.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.startswith("default-src 'none'; ") and f"script-src 'sha256-{digest}'" in policy
    assert len(script.splitlines()) < 50 and "url(" not in re.findall(r"<style>.*?</style>", made, re.S)[0]


@pytest.mark.parametrize("name", ["hostile", "plain"])
def test_every_id_stands_once_and_every_reference_has_its_id(name: str, request: pytest.FixtureRequest) -> None:
    made = request.getfixturevalue(name)
    ids = [attributes["id"] for _, attributes in Read(made).found if "id" in attributes]
    assert [each for each, times in Counter(ids).items() if times > 1] == []
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', made)) <= set(ids)


def test_colours_are_the_pages(plain: str) -> None:
    """Every colour of a figure follows light and dark; each variable is set for both."""
    figures = "".join(re.findall(r"<svg.*?</svg>", plain, re.S))
    assert re.findall(r"#[0-9a-f]{6}", figures) == [] and "font-family" not in figures
    used = set(re.findall(r"var\((--[\w-]+)\)", plain))
    light, dark = re.findall(r":root \{(.*?)\}", plain, re.S)
    assert used <= set(re.findall(r"(--[\w-]+):", light)) | {"--a"}
    assert {"--band", "--bad", "--line-1", "--muted", "--grid", "--ink"} <= set(re.findall(r"(--[\w-]+):", dark))


def test_the_page_is_whole_without_its_script(plain: str) -> None:
    """The box is hidden until the script shows it; nothing else is."""
    hidden = [(tag, told.get("class")) for tag, told in Read(plain).found if "hidden" in told]
    assert set(hidden) == {("p", "search")} and len(hidden) == plain.count("data-search>") == 2


def test_alarms_and_healthy_ranges_are_drawn(plain: str) -> None:
    figures = dict(re.findall(r'<svg class="figure".*?aria-label="([^"]*)">(.*?)</svg>', plain, re.S))
    for about, figure in figures.items():
        if "over updates" in about:
            assert figure.count('-series-alarm-7"') == 1, about
            assert ('series-healthy"' in figure) == ("healthy range" in about), about
    assert sum("healthy range" in about for about in figures) >= 5
    assert len(figures) == plain.count("<svg ") and all(figures), "every figure says what it shows"


def test_figures_to_look_at_come_first_and_a_signal_is_marked_where_it_first_fired(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "demo")
    log = metrics(policy__approxkl_avg=[0.5] * 20, policy__clipfrac_avg=[0.2] * 20, objective__repetition=[0.0] * 20)
    write_jsonl(folder / "ppo/metrics.jsonl", log)
    firings = [{"step": step, "signal": signal} for step, signal in ((3, "kl"), (5, "eos"), (6, "kl"), (9, "eos"))]
    write_jsonl(folder / "ppo/watchdog.jsonl", firings)
    made = page.of_run(read_run(folder))
    shown = re.findall(
        r'<figure class="card (\w+).*?<code>(.*?)</code>',
        made[made.index('id="ppo"') : made.index('id="frontier"')],
        re.S,
    )
    assert shown[:3] == [
        ("bad", "policy/approxkl_avg"), ("look", "policy/clipfrac_avg"), ("good", "objective/scores"),
    ]  # fmt: skip
    assert shown[-1] == ("good", "objective/repetition"), "what never moves is last"
    assert set(re.findall(r'-series-alarm-(\d+)"', made)) == {"3", "5"}


# Figures


def drawn(figure: svg.Drawing) -> ElementTree.Element:
    return ElementTree.fromstring(str(figure.markup))


def group(root: ElementTree.Element, name: str) -> ElementTree.Element:
    (found,) = [each for each in root.iter("g") if each.get("id", "").endswith(f"series-{name}")]
    return found


def corners(element: ElementTree.Element) -> list[tuple[float, float]]:
    """Of the first path; where it is a shape that is put somewhere, there."""
    path, put = next(element.iter("path")), next(element.iter("use"), ElementTree.Element("use"))
    left, top = float(put.get("x", 0)), float(put.get("y", 0))
    return [(left + float(x), top + float(y)) for x, y in re.findall(r"[ML] (-?[\d.]+) (-?[\d.]+)", path.get("d", ""))]


def test_a_curve_goes_through_its_points() -> None:
    points = {"one": [(1, 0.0), (2, 4.0), (3, 2.0)], "two": [(1, 1.0), (3, 1.0)]}
    root = drawn(charts.curves("x", "about", points))
    (x1, y1), (x2, y2), (x3, y3) = corners(group(root, "one"))
    assert x3 - x2 == pytest.approx(x2 - x1) and x2 > x1
    assert (y3 - y2) / (y1 - y2) == pytest.approx(0.5, abs=1e-4), "SVG counts downwards"
    assert len(corners(group(root, "two"))) == 2
    assert {"one", "two", "update"} <= {text.text for text in root.iter("text")}


def test_a_range_is_shaded_as_far_as_it_is_seen() -> None:
    points = {"a": [(1, 0.0), (2, 10.0)]}
    root = drawn(charts.curves("x", "about", points, band=Band([2.0, 2.0], [100.0, 100.0], "")))
    line, shade = corners(group(root, "a")), corners(group(root, "healthy"))
    zero, ten = line[0][1], line[1][1]
    bottom, top = max(y for _, y in shade), min(y for _, y in shade)
    assert (zero - bottom) / (zero - ten) == pytest.approx(0.2, abs=1e-4)
    assert (zero - top) / (zero - ten) == pytest.approx(1.15, abs=1e-4), "to the panel's edge"


def test_win_rates_stand_at_their_values() -> None:
    rows = [("wins", 0.75, [0.7, 0.8]), ("loses", 0.25, [0.2, 0.3]), ("open", 0.5, [0.4, 0.6]), ("alone", 0.5, None)]
    root = drawn(charts.win_rate_chart("w", "about", rows))
    places = [next(group(root, f"win-{label}").iter("use")) for label, _, _ in rows]
    x = [float(place.get("x", "")) for place in places]
    assert x[0] - x[2] == pytest.approx(x[2] - x[1], abs=1e-3) and x[2] == x[3] and x[0] > x[1]
    assert ["line-1" in str(p.get("style")) for p in places] == [True, False, False, True], "surely better"
    assert "line-2" in str(places[1].get("style")) and "muted" in str(places[2].get("style"))


def test_a_frontier_has_a_ring_only_where_something_was_selected() -> None:
    told = report()
    root = drawn(svg.panel("f", "about", "gold", told))
    assert len(list(group(root, "selected-update-10").iter("use"))) == 1
    assert len(list(group(root, "PPO-along-its-updates").iter("use"))) == 4, "SFT and three policies"
    del told["selected_step"]
    assert "selected" not in str(svg.panel("f", "about", "gold", told).markup)


def test_a_histogram_counts_and_bars_are_as_high_as_their_counts() -> None:
    root = drawn(charts.bars("b", "about", [1, 3], [0.0], "x", "y"))
    one, three = ([y for _, y in corners(group(root, f"bar-{place}"))] for place in (0, 1))
    assert (max(three) - min(three)) / (max(one) - min(one)) == pytest.approx(3, abs=1e-3)
    outline = drawn(charts.histograms("h", "about", {"SFT": [1, 1, 1, 9], "PPO": [9, 9, 9, 9]}, "tokens"))
    (sft, ppo) = (
        max(y for _, y in corners(group(outline, name))) - min(y for _, y in corners(group(outline, name)))
        for name in ("SFT", "PPO")
    )
    assert ppo / sft == pytest.approx(4 / 3, abs=1e-3)


def test_two_series_of_like_names_are_two_groups() -> None:
    root = drawn(charts.curves("b", "about", {name: [(1, 2.0), (2, 3.0)] for name in ("to -2", "to 2", "to_2")}))
    assert [each.get("id") for each in root.iter("g") if "series" in each.get("id", "")] == [
        "b-series-to-2",
        "b-series-to-2-again",
        "b-series-to_2",
    ]


def test_the_same_figure_is_the_same_text_under_any_name() -> None:
    one, two = (str(charts.curves(name, "a", {"a": [(1, 2.0), (2, 3.0)]}).markup) for name in ("one", "two"))
    assert one != two and one.replace("one-", "two-") == two


# Several runs


def test_runs_are_compared_with_mean_and_spread_by_hand(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / "seeds" / name, told=report(gold))
        for name, gold in zip("abc", (0.6, 0.7, 0.9), strict=True)
    ]
    (folders[2] / "sft/manifest.json").unlink()
    change(folders[0] / "sft/manifest.json", metrics={"eval_loss": 2.0})
    change(folders[1] / "sft/manifest.json", metrics={"eval_loss": 5.0})
    change(folders[2] / "eval/manifest.json", parents={})  # else it is out of date: its SFT is not finished
    rows = {row.title: row.cells()[1:] for row in compare.numbers([read_run(folder) for folder in folders])}
    won = ["60 % [54, 66]", "70 % [64, 76]", "90 % [84, 96]"]
    assert rows["PPO over SFT, gold"] == [*won, "73 %", "15 %", "3"]  # sqrt((0.1333^2 + 0.0333^2 + 0.1667^2) / 2)
    assert rows["SFT, loss on held-out rows"] == ["2", "5", "-", "3.5", "2.12", "2"]
    assert compare.Row("", [2.0, None]).cells() == ["", "2", "-", "2", "-", "1"]
    assert rows["reward model, pairs told right"][0] == "75 % [69, 80]" and rows["SFT, answers that end"][0] == "97 %"
    assert rows["selected update"] == ["10", "10", "10", "", "", "3"], "no mean of updates"
    assert rows["PPO, KL from SFT in nats"][0] == "12.3" and rows["PPO, seconds"][0] == "100"


def test_a_comparison_says_whether_win_rates_differ(tmp_path: Path) -> None:
    """256 prompts each: a standard error of the difference is 0.042. Of four runs it is the outermost of six pairs."""
    for name, gold in (("a", 0.60), ("b", 0.67), ("c", 0.70), ("d", 0.65)):
        write_run(tmp_path / name, told=report(gold))

    def said(*names: str) -> list[str]:
        return list(compare.apart(list(names), [read_run(tmp_path / name) for name in names]))

    assert said("a", "b")[1] == (
        "By gold b (67 % [61, 73]) and a (60 % [54, 66]) cannot be told apart: "
        "the interval of their difference holds 0."
    )
    assert said("c", "a")[1].startswith("By gold c (70 % [64, 76]) and a (60 % [54, 66]) differ by more than chance")
    assert "cannot be told apart" in said("a", "b", "c", "d")[1], "the same two runs, found among four"
    config = configs()["eval"]
    begin(tmp_path / "a/eval", config | {"judges": {"gold": "other:gold"}})
    assert said("a", "c")[1].startswith("gold is another judge in these runs")
    change(tmp_path / "b/ppo/manifest.json", model_sha256="trained again")
    assert said("a", "b") == [], "an evaluation that is out of date says nothing"


def test_a_comparison_lays_curves_over_each_other_and_tells_what_is_set_differently(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name / "demo") for name in ("one", "two")]
    begin(folders[1] / "ppo", configs()["ppo"] | {"seed": 3, "ppo": {"kl_coef": 0.5, "response_length": 53}})
    write_jsonl(folders[1] / "ppo/metrics.jsonl", metrics(objective__scores=[9.0] * 20))
    made = compare.of_runs([read_run(folder) for folder in folders])
    read = Read(made)
    assert len([tag for tag, _ in read.found if tag == "script"]) == 1
    figure = re.findall(r'<svg [^>]*aria-label="Reward score[^"]*">(.*?)</svg>', made, re.S)[0]
    assert figure.count('-series-one-demo"') == figure.count('-series-two-demo"') == 1
    cells = [
        re.sub(r"<[^>]*>", "", cell) for cell in re.findall(r"<tr data-row>(.*?)</tr>", made.replace("</td>", "|"))
    ]
    assert sorted(cells) == ["ppo|ppo.kl_coef|0.2|0.5|", "ppo|seed|0|3|"]
    assert "at the end: one/demo 1.7; two/demo 9." in made.lower()
    assert "These runs differ in more than their seed" in made and "<td>finished: good</td>" in made
    assert "<strong>one/demo</strong>: No stage looks bad." in made


def test_folders_are_told_apart_by_as_few_names_as_it_takes() -> None:
    assert compare.told_apart([Path("/x/a"), Path("/x/b")]) == ["a", "b"]
    assert compare.told_apart([Path("/x/a/demo"), Path("/x/b/demo")]) == ["a/demo", "b/demo"]
    assert compare.told_apart([Path("/x/a"), Path("/x/a")]) == ["a (1)", "a (2)"]


def test_a_comparison_of_runs_that_have_hardly_begun(tmp_path: Path) -> None:
    for name in ("one", "two"):
        begin(tmp_path / name / "sft", configs()["sft"])
    made = compare.of_runs([read_run(tmp_path / name) for name in ("one", "two")])
    assert "Not there yet: no run has made an update." in made and "No key of their configs differs." in made
    assert "No key but their seed differs, so it is noise" in made
