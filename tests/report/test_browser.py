"""The report in a real browser: no errors, no requests, nothing cut off, nothing that axe-core finds. `make browser`.

Screenshots go to the folder that RLHF_SCREENSHOTS names, for people to look at; RLHF_REPORT names another page.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from browser import WIDTHS, faults, opened, picture
from report_run import answers, draws, report, with_limit, write_run

from rlhf_cli.jsonl import write_jsonl
from rlhf_cli.report import compare
from rlhf_cli.report import page as report_page
from rlhf_cli.runs.read import read_run

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser
N = 130  # prompts: three times what is drawn at once, and less

SHOWN = """
    [...document.querySelectorAll('p:not(:has(input)), td, pre, svg')]
        .filter(e => e.getBoundingClientRect().width).length
"""
GAINS = (
    "[...document.querySelectorAll('.pair .gain:not(.others)')]"
    ".map(e => Number(e.textContent.split(' ')[1].replace('\u2212', '-')))"
)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of a whole run; or the one that RLHF_REPORT names."""
    if given := os.environ.get("RLHF_REPORT"):
        return Path(given).resolve().as_uri()
    return of_files(tmp_path_factory.mktemp("seen") / "run")


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of a run whose answers are known."""
    return of_files(tmp_path_factory.mktemp("known") / "run")


def of_files(folder: Path) -> str:
    run = write_run(folder, evaluation=with_limit(report()))
    write_jsonl(run / "eval/samples.jsonl", rows())
    with pytest.MonkeyPatch.context() as patch:
        draws(patch)
        (run / "eval/report.html").write_text(report_page.of_run(read_run(run)), encoding="utf-8")
    return (run / "eval/report.html").as_uri()


def rows() -> list[dict[str, Any]]:
    """Answers of SFT, a snapshot and PPO: its gain by gold is index - 4; the reward disagrees on every tenth prompt."""
    found = answers(N)
    for row in found:
        row["columns"] = {"topic": "sea" if row["index"] % 2 else "sky"}
        row["response"] = f"the {row['model']} answer {row['index']} ends here"
        row["ended"] = row["index"] != 7
        if row["model"] == "ppo" and row["index"] == 0:
            row["tokens"] = {"text": ["the", " ppo", "<eos>"], "kl": [0.5, -2.0, 0.0]}
        if row["index"] % 10 == 0:
            row["scores"] = row["scores"] | {"reward": -row["scores"]["reward"]}
    return [*found, *(row | {"model": "ppo_step_000010"} for row in found if row["model"] == "ppo")]


@pytest.fixture
def opened_page(known: str, chromium: Any) -> Iterator["Page"]:
    with opened(chromium, known, "1400-light") as page:
        page.wait_for_selector("#found:not(:empty)")
        yield page


def found(page: "Page") -> str:
    return page.locator("#found").inner_text()


def first(page: "Page") -> str:
    """The first prompt and its gain by the judge that is selected."""
    return page.locator(".pair h3").first.inner_text().partition(",")[0]


@pytest.mark.parametrize("look", WIDTHS)
def test_the_page_is_readable(address: str, chromium: Any, look: str) -> None:
    with opened(chromium, address, look) as page:
        page.wait_for_selector("#found:not(:empty)")
        picture(page, f"report-{look}-top")
        picture(page, f"report-{look}", whole=True)
        assert faults(page) == []


@pytest.mark.parametrize("look", ["390-dark", "1400-light"])
def test_what_is_folded_is_readable(address: str, chromium: Any, look: str) -> None:
    with opened(chromium, address, look) as page:
        page.wait_for_selector("#found:not(:empty)")
        page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        assert faults(page) == []


def test_it_is_whole_without_scripts(known: str, chromium: Any) -> None:
    """The verdict, the figures and the first fifty answers."""
    with opened(chromium, known, scripts=False) as page:
        assert page.locator(".verdict").inner_text().startswith("Better, and worth its KL.")
        assert page.locator(".key-figure svg").count() == 3 and page.locator("svg.figure").count() > 20
        assert page.locator("#pairs .pair").count() == 50
        lost = page.locator("#pairs h3#loss ~ .pair h3").first.inner_text()
        assert lost == "Prompt 0 gold \N{MINUS SIGN}4, reward +2", "the gain by both judges"
        assert page.locator("#pairs .pair:visible").count() == 10, "the others are folded"
        assert page.get_by_role("searchbox").count() == 0 and page.get_by_role("button").count() == 0


HOSTILE = "</script></template><script>seen = 1</script><img src=x onerror='seen = 1'>\u202e"


def test_texts_of_models_are_never_run(tmp_path: Path, chromium: Any) -> None:
    """Nor do they leave their place: answers, prompts, columns and tokens are shown as they are."""
    run = write_run(tmp_path / "run")
    found = answers(3, prompt=HOSTILE, response=HOSTILE)
    for row in found:
        row["columns"] = {HOSTILE: HOSTILE}
        row["tokens"] = {"text": [HOSTILE], "kl": [1.0]}
    write_jsonl(run / "eval/samples.jsonl", found)
    (run / "eval/report.html").write_text(report_page.of_run(read_run(run)), encoding="utf-8")
    with opened(chromium, (run / "eval/report.html").as_uri(), "1400-light") as page:
        page.wait_for_selector("#found:not(:empty)")
        page.get_by_text("PPO, token by token").first.click()
        page.get_by_label("mark words").uncheck()
        shown = HOSTILE.replace("\u202e", "[U+202E]")
        for part in (".pair .prompt", ".pair .answer", "#tools option:last-child"):
            assert shown in page.locator(part).all_inner_texts(), part
        assert page.evaluate("typeof seen") == "undefined" and page.locator("main img, main script").count() == 0


def test_a_comparison_shows_the_answers_of_both_runs(tmp_path: Path, chromium: Any) -> None:
    runs = []
    for name in ("a", "b"):
        run = write_run(tmp_path / name)
        shown = [row | {"response": f"{row['response']} in {name}"} for row in answers(60)]
        write_jsonl(run / "eval/samples.jsonl", shown)
        runs.append(read_run(run))
    (tmp_path / "report.html").write_text(compare.of_runs(runs).page(), encoding="utf-8")
    with opened(chromium, (tmp_path / "report.html").as_uri(), "390-dark") as page:
        page.wait_for_selector("#found:not(:empty)")
        picture(page, "comparison-390-dark", whole=True)
        pair = page.locator(".pair").first
        assert pair.locator("h4 .policy").all_inner_texts() == ["a", "b"] and pair.locator("details").count() == 0
        assert pair.locator("del").all_inner_texts() == ["a"] and pair.locator("ins").all_inner_texts() == ["b"]
        assert faults(page) == []


def test_the_largest_loss_is_one_click_away(opened_page: "Page") -> None:
    opened_page.get_by_role("link", name="largest losses").click()
    assert first(opened_page) == "Prompt 0 gold \N{MINUS SIGN}4"
    opened_page.wait_for_timeout(1000)
    top = opened_page.locator(".pair").first.bounding_box()
    assert top and 0 <= top["y"] < 600, "it is on the screen"


@pytest.mark.parametrize(
    ("order", "title"),
    [
        ("gain", "Prompt 129 gold +125"),
        ("loss", "Prompt 0 gold \N{MINUS SIGN}4"),
        ("score", "Prompt 129 gold +125"),
        ("low score", "Prompt 0 gold \N{MINUS SIGN}4"),
        ("length", "Prompt 129 gold +125"),
        ("KL", "Prompt 4 gold 0"),  # its KL is index % 5, the first of those with 4
        ("disagreement of judges", "Prompt 120 gold +116"),
        ("number", "Prompt 0 gold \N{MINUS SIGN}4"),
    ],
)
def test_answers_are_sorted(opened_page: "Page", order: str, title: str) -> None:
    opened_page.get_by_role("button", name=order, exact=True).click()
    assert first(opened_page) == title
    assert opened_page.get_by_role("button", name=order, exact=True).get_attribute("aria-pressed") == "true"
    assert opened_page.locator("[aria-pressed=true]").count() == 1


def test_all_rows_can_be_reached(opened_page: "Page") -> None:
    """Ten, then fifty at a time; and with another policy, and along the training, those of the others."""
    gains = [float(index - 4) for index in reversed(range(N))]
    assert opened_page.evaluate(GAINS) == gains[:10] and found(opened_page) == f"10 of {N} prompts shown"
    more = opened_page.get_by_role("button", name="Show 50 more")
    for _ in range(3):
        more.click()
    assert opened_page.evaluate(GAINS) == gains and not more.is_visible()
    pair = opened_page.locator(".pair").first
    pair.get_by_text("All 3 answers to this prompt").click()
    names = [each.split(" gold")[0] for each in pair.locator("details h4").all_inner_texts()]
    assert names == ["SFT", "PPO, update 10", "PPO"]
    opened_page.get_by_label("Compare with").select_option("PPO, update 10")
    assert "the ppo answer" in opened_page.locator(".pair .answer").nth(1).inner_text()
    assert "PPO, update 10" in opened_page.locator(".pair h4").nth(1).inner_text()


def test_answers_are_filtered_and_found(opened_page: "Page") -> None:
    outcome, topic = opened_page.get_by_label("Outcome"), opened_page.get_by_label("topic")
    for choice, count in (("wins", N - 5), ("losses", 4), ("ties", 1), ("cut off", 1), ("judges disagree", 13)):
        outcome.select_option(choice)
        assert f" of {count} prompts" in found(opened_page), choice
    outcome.select_option("losses")
    assert first(opened_page) == "Prompt 0 gold \N{MINUS SIGN}4", "the largest first"
    opened_page.get_by_role("button", name="gain", exact=True).click()
    outcome.select_option("all")
    topic.select_option("sea")
    assert f" of {N // 2} prompts" in found(opened_page)
    opened_page.get_by_role("searchbox", name="Find").fill("ppo answer 99 ENDS")
    assert first(opened_page) == "Prompt 99 gold +95" and found(opened_page).startswith("1 of 1 prompts")
    assert found(opened_page).endswith("; 2 answers have the text, of all 3 versions")
    marked = "[...CSS.highlights.get('found')].map(range => range.toString())"
    assert opened_page.evaluate(marked) == ["ppo answer 99 ends"], "across words that differ"
    opened_page.get_by_text("All 3 answers to this prompt, 2 with the text").click()
    opened_page.wait_for_function("CSS.highlights.get('found').size === 3")
    topic.select_option("sky")
    assert found(opened_page) == "No prompt is left: change the filters."
    topic.select_option("all")
    opened_page.locator("#judge").select_option("reward")
    assert first(opened_page) == "Prompt 99 reward +47.5"


def test_links_of_the_navigation_land_on_their_heading(known: str, chromium: Any) -> None:
    """At once, and from an address, too: the answers above have another height once they are drawn."""
    with opened(chromium, known, "390-light") as page:
        page.evaluate("location.hash = '#reward'")
        page.reload()
        page.wait_for_selector("#found:not(:empty)")
        page.wait_for_timeout(200)
        top = "document.querySelector('#{} h2').getBoundingClientRect().top"
        assert 0 <= page.evaluate(top.format("reward")) < 100
        page.locator("nav").get_by_text("Was training healthy?").click()
        assert 0 <= page.evaluate(top.format("health")) < 100


def test_words_that_differ_are_marked(opened_page: "Page") -> None:
    pair = opened_page.locator(".pair").first
    assert pair.locator("del").all_inner_texts() == ["sft"] and pair.locator("ins").all_inner_texts() == ["ppo"]
    assert pair.locator(".answer").nth(1).inner_text() == "the ppo answer 129 ends here"
    opened_page.get_by_label("mark words").uncheck()
    assert opened_page.locator(".pair ins, .pair del").count() == 0


def test_tokens_of_the_largest_losses_are_shaded_by_their_log_ratio(opened_page: "Page") -> None:
    opened_page.get_by_role("button", name="loss", exact=True).click()
    pair = opened_page.locator(".pair").first
    pair.get_by_text("PPO, token by token").click()
    tokens = pair.locator(".strip span")
    assert tokens.all_inner_texts() == ["the", " ppo", "<eos>"]
    assert [each.get_attribute("class") for each in tokens.all()] == ["plus", "minus", "plus"]
    tokens.nth(1).click()
    assert pair.locator(".readout").inner_text() == " ppo: \N{MINUS SIGN}2".strip()


def test_values_show_under_the_pointer_and_by_the_arrow_keys(opened_page: "Page") -> None:
    figure = opened_page.locator(".key-figure").first
    figure.locator("svg").hover(position={"x": 5, "y": 15})
    assert figure.locator(".readout").inner_text() == "update 0, win rate 0.5"
    svg = opened_page.locator("#far figure svg").first
    svg.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
        opened_page.keyboard.press(key)
    assert opened_page.locator("#far figure .readout").first.inner_text().startswith("SFT: KL 0, score")


def test_a_figure_has_a_logarithmic_scale_and_its_values_as_csv(opened_page: "Page") -> None:
    opened_page.locator("#folded summary").click()
    loss = opened_page.locator("figure[data-figure='sft-loss']")
    assert loss.get_by_role("button").count() == 1, "3 to 2.1 needs no logarithmic scale"
    with opened_page.expect_download() as download:
        loss.get_by_role("button", name="CSV of SFT: Loss").click()
    assert download.value.suggested_filename == "sft-loss.csv"
    lines = Path(download.value.path()).read_text(encoding="utf-8").splitlines()
    assert lines[:2] == ["series,step,nats per token", "training,10,3"] and len(lines) == 6


def test_the_demo_keyboard_alone(opened_page: "Page") -> None:
    """From the top of the page to the answers, in another order, and into what is folded."""
    link = opened_page.get_by_role("link", name="largest losses")
    link.focus()
    opened_page.keyboard.press("Enter")
    assert opened_page.evaluate("document.activeElement.dataset.order") == "loss"
    opened_page.keyboard.press("Tab")
    opened_page.keyboard.press("Enter")
    assert opened_page.evaluate("document.activeElement.dataset.order") == "score"
    assert opened_page.locator("[aria-pressed=true]").inner_text() == "score"


def test_tables_are_searched(opened_page: "Page") -> None:
    opened_page.get_by_text("Settings other than the defaults").click()
    whole = opened_page.evaluate(SHOWN)
    search = opened_page.get_by_role("searchbox", name="Find a key")
    search.fill("no such word anywhere")
    assert opened_page.evaluate(SHOWN) < whole
    search.fill("")
    assert opened_page.evaluate(SHOWN) == whole
